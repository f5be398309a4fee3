"""How far a client's network may be trusted, measured on images that it kept back from training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oneflare.core.seeds import torch_generator
from oneflare.data import ClientData, prepare
from oneflare.data.patients import held_out_rows
from oneflare.nn import PrototypeNetwork
from oneflare.upload import KNOWN, Contract

CALIBRATION_BATCH = 256
TRUST: tuple[float, ...] = (0.0, *(2.0 ** (e / 4) for e in range(-16, 17)))
"""the values of beta that are tried"""


def hold_out(data: ClientData, share: float, stream: tuple[int, int]) -> tuple[ClientData, ClientData | None]:
    """What a client trains on, and the part of each class that it keeps back; None if nothing is kept back.

    Where patients are known, all images of a patient are on the same side.
    """
    generator = torch_generator(*stream, "hold-out")
    if data.patients is not None:
        order = torch.arange(len(data))
        held = held_out_rows(data.labels, data.patients, share, generator)
    else:
        order = torch.randperm(len(data), generator=generator)
        labels = data.labels[order]
        held = torch.zeros(len(data), dtype=torch.bool)
        for label in labels.unique():
            rows = (labels == label).nonzero().squeeze(1)
            held[rows[: int(share * len(rows))]] = True
    if not bool(held.any()):
        return data, None
    return data.take(order[~held].sort().values), data.take(order[held].sort().values)


@torch.no_grad()
def calibrate(network: PrototypeNetwork, counts: Tensor, held_out: ClientData, contract: Contract) -> float:
    """How far a client's log-likelihood ratios L_c = z.P_c - log n_c may be trusted: beta for softmax(beta L).

    Over the classes it knows (`KNOWN` images), each with equal weight: the smallest beta whose cross-entropy on the
    images kept back is within one standard error of the best, because trusting a network too much costs more than
    trusting it too little. 0 means that it has no say.

    counts: `(C,)` images of each class
    """
    known = counts >= KNOWN
    rows = known[held_out.labels]
    if int(known.sum()) < 2 or not bool(rows.any()):
        return 0.0
    images, labels = held_out.images[rows], (known.cumsum(0) - 1)[held_out.labels[rows]]
    network.eval()
    parts = images.to(network.prototypes.device).split(CALIBRATION_BATCH)
    features = torch.cat([network(prepare(part, contract.image)) for part in parts])
    ratios = (features @ network.prototypes[known].T).cpu().double() - counts[known].double().log()
    weights = 1 / torch.bincount(labels)[labels].double()
    weights = weights / weights.sum()
    losses = torch.stack([nn.functional.cross_entropy(beta * ratios, labels, reduction="none") for beta in TRUST])
    excess = losses - losses[int((losses @ weights).argmin())]  # (betas, images)
    mean = excess @ weights
    error = ((weights * (excess - mean[:, None])) ** 2).sum(1).sqrt()
    return TRUST[int((mean <= error).int().argmax())]
