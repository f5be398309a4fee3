"""What a client writes beside its network, statistics and evidence, and the writing of its upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from oneflare.client.evidence import measure_evidence
from oneflare.client.statistics import measure, measure_on_lattice, privatise
from oneflare.core.config import Experiment
from oneflare.core.noise import Words, noise_words
from oneflare.core.seeds import torch_generator
from oneflare.data import ClientData, Split, prepare
from oneflare.nn import PrototypeNetwork, build_feature_map
from oneflare.upload import KNOWN, Contract, write_upload
from oneflare.upload.statistics import pack

CALIBRATION_BATCH = 256
TRUST: tuple[float, ...] = (0.0, *(2.0 ** (e / 4) for e in range(-16, 17)))


@dataclass(frozen=True)
class ClientJob:
    """Everything one client needs to know, apart from its data."""

    experiment: Experiment
    contract: Contract
    client: int
    folder: Path
    flip: bool
    encoder: nn.Module | None = None
    bank: Path | None = None
    """the teacher's features of the public images, where the objective has a public bank"""
    precision: str | None = None
    """float32 or bfloat16, as the run decided for all its clients; None: the machine that trains decides"""


@dataclass(frozen=True)
class Companions:
    """What an upload may hold beside the network."""

    statistics: Mapping[str, Tensor] | None = None
    """packed"""
    held_out: ClientData | None = None
    """kept back from training, to calibrate the network"""


def client_statistics(job: ClientJob, data: ClientData) -> dict[str, Tensor] | None:
    """The packed statistics of a client's images, noised if the federation agreed on that; None if it sends none."""
    plan = job.contract.statistics
    if plan is None:
        return None
    image, classes = job.contract.image, len(job.contract.classes)
    features = build_feature_map(plan.feature_map, image.channels, image.size, plan.bound)
    if plan.privacy is None:
        return pack(measure(features, data.images, data.labels, classes), plan.dtype)
    exact = measure_on_lattice(features, data.images, data.labels, classes, plan.privacy)
    return pack(privatise(exact, plan.privacy, _noise(job, "statistics")), plan.dtype)


def _noise(job: ClientJob, purpose: str) -> Words:
    return noise_words(job.experiment.upload.statistics_noise_seed, job.client, purpose)


def hold_out(data: ClientData, share: float, stream: tuple[int, int]) -> tuple[ClientData, ClientData | None]:
    """What a client trains on, and the part of each class that it keeps back; None if nothing is kept back."""
    order = torch.randperm(len(data), generator=torch_generator(*stream, "hold-out"))
    labels = data.labels[order]
    held = torch.zeros(len(data), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero().squeeze(1)
        held[rows[: int(share * len(rows))]] = True
    if not bool(held.any()):
        return data, None
    kept, back = (
        ClientData.of(Split(data.images[rows], data.labels[rows]), len(data.counts))
        for rows in (order[~held].sort().values, order[held].sort().values)
    )
    return kept, back


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


def send(
    path: Path,
    job: ClientJob,
    network: PrototypeNetwork | None,
    data: ClientData,
    epoch: int,
    companions: Companions | None = None,
) -> None:
    """Write the client's message, with what its switches let out."""
    companions = companions or Companions()
    upload = job.experiment.upload
    trust = None
    if network is not None and job.experiment.train.holdout > 0:
        trust = 0.0
        if companions.held_out is not None:
            trust = calibrate(network, data.counts, companions.held_out, job.contract)
    evidence = None
    if network is not None and upload.evidence:
        evidence = measure_evidence(network, data, job.contract.image, upload.evidence)
    write_upload(
        path,
        network,
        job.contract,
        client=job.client,
        counts=data.counts,
        epoch=epoch,
        words=_noise(job, "counts"),
        counts_mode=upload.counts,
        counts_epsilon=upload.counts_epsilon,
        dtype=upload.dtype,
        statistics=companions.statistics,
        trust=trust,
        evidence=evidence,
    )
