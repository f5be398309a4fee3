"""How far clients disagree and how collapsed their features are, from uploads and test images."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.data import prepare
from oneflare.fusion import UploadSet
from oneflare.nn import simplex_etf

MOST_IMAGES = 1000
MOST_CLIENTS = 16
"""What NC1, NC2 and CKA look at: the first test images, the first clients. A thousand clients cost no more."""


@dataclass(frozen=True)
class Diagnostics:
    """One federation's geometry. None where a value is not defined (one client, d < C-1, ...)."""

    g_protos_std: float
    """std of all entries of the mean prototype: a scale, not a dispersion"""
    inter_client_proto_std: float | None
    """std over clients, averaged over entries"""
    proto_cosine_per_class: list[float] | None
    """mean cosine between two clients' prototypes of a class"""
    parameter_variance: float | None
    """variance of encoder parameters over clients, averaged"""
    etf_distance: float | None
    """|| P P^T/|P P^T| - ETF Gram || of the mean prototype"""
    nc1: float | None
    """tr(Sigma_W Sigma_B^+)/C of unit(sum_i w_i f_i), the features that `feature_mean` classifies"""
    nc2: float | None
    """mean | cos(mu_c - mu, mu_k - mu) + 1/(C-1) | over pairs of classes"""
    cka: float | None
    """mean linear CKA between the unit features of two clients"""
    client_entropy: list[float] | None
    """H(p_i)/log C of each client's class counts"""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def diagnose(uploads: UploadSet, images: Tensor, labels: Tensor) -> Diagnostics:
    """images, labels: held out; nothing is chosen by them."""
    inputs, labels = prepare(images[:MOST_IMAGES], uploads.contract.image), labels[:MOST_IMAGES]
    seen = [features.projected for features in itertools.islice(uploads.features(inputs), MOST_CLIENTS)]
    weights = uploads.size_weights[: len(seen)].float()
    features = F.normalize(torch.einsum("n,nbd->bd", weights, torch.stack(seen)), dim=1)
    prototypes = uploads.prototypes
    several = len(uploads) > 1
    mean = prototypes.mean(0)
    disclosed = all(upload.counts is not None for upload in uploads)
    return Diagnostics(
        g_protos_std=float(mean.std()),
        inter_client_proto_std=float(prototypes.std(0).mean()) if several else None,
        proto_cosine_per_class=cross_client_cosine(prototypes).tolist() if several else None,
        parameter_variance=parameter_variance(uploads) if several else None,
        etf_distance=etf_distance(mean) if len(mean) > 1 and mean.shape[1] >= len(mean) - 1 else None,
        nc1=nc1(features, labels),
        nc2=nc2(features, labels),
        cka=mean_cka([F.normalize(raw, dim=1) for raw in seen]) if several else None,
        client_entropy=normalised_entropy(uploads.counts).tolist() if disclosed else None,
    )


def cross_client_cosine(prototypes: Tensor) -> Tensor:
    """`(N, C, d)` -> `(C,)`: mean cosine over pairs of different clients"""
    unit = F.normalize(prototypes, dim=2)
    clients = len(unit)
    gram = torch.einsum("ncd,mcd->cnm", unit, unit)
    return (gram.sum((1, 2)) - gram.diagonal(dim1=1, dim2=2).sum(1)) / (clients * (clients - 1))


def parameter_variance(uploads: UploadSet) -> float:
    """Mean over parameters of the unbiased variance over clients, one client in memory at a time (Welford)."""
    names = {name for name, _ in uploads.template.encoder.named_parameters()}
    mean: Tensor | None = None
    squares: Tensor | None = None
    for number, upload in enumerate(uploads, start=1):
        flat = torch.cat([t.double().flatten() for name, t in sorted(upload.weights().items()) if name in names])
        if mean is None or squares is None:
            mean, squares = flat, torch.zeros_like(flat)
            continue
        delta = flat - mean
        mean = mean + delta / number
        squares = squares + delta * (flat - mean)
    return 0.0 if squares is None or len(uploads) < 2 else float(squares.mean() / (len(uploads) - 1))


def etf_distance(prototypes: Tensor) -> float:
    """Frobenius distance of the normalised Gram matrix from the simplex ETF's; 0 at collapse."""
    gram = prototypes.double() @ prototypes.double().T
    target = simplex_etf(len(gram), len(gram) - 1, seed=0)
    wanted = target @ target.T
    return float((gram / gram.norm() - wanted / wanted.norm()).norm())


def _class_means(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    present = labels.unique()
    return torch.stack([features[labels == label].mean(0) for label in present]), present


def nc1(features: Tensor, labels: Tensor) -> float | None:
    """tr(Sigma_W pinv(Sigma_B))/C: spread within classes against spread between them (Papyan et al. 2020)"""
    features = features.double()
    means, present = _class_means(features, labels)
    if len(present) < 2:
        return None
    position = torch.searchsorted(present, labels)
    within = features - means[position]
    centred = means - means.mean(0)
    sigma_w = within.T @ within / len(features)
    sigma_b = centred.T @ centred / len(present)
    return float(torch.trace(sigma_w @ torch.linalg.pinv(sigma_b, rtol=1e-9)) / len(present))


def nc2(features: Tensor, labels: Tensor) -> float | None:
    """Mean distance of the centred class means' cosines from -1/(C-1)."""
    means, present = _class_means(features.double(), labels)
    if len(present) < 2:
        return None
    unit = F.normalize(means - means.mean(0), dim=1)
    cosines = unit @ unit.T
    number = len(present)
    off_diagonal = cosines[~torch.eye(number, dtype=torch.bool)]
    return float((off_diagonal + 1 / (number - 1)).abs().mean())


def linear_cka(x: Tensor, y: Tensor) -> float:
    """|Y^T X|_F^2 / (|X^T X|_F |Y^T Y|_F) for centred features `(n, d)` (Kornblith et al. 2019)"""
    x, y = x.double() - x.double().mean(0), y.double() - y.double().mean(0)
    scale = (x.T @ x).norm() * (y.T @ y).norm()
    return float((y.T @ x).norm() ** 2 / scale) if scale > 0 else 0.0


def mean_cka(features: list[Tensor]) -> float:
    pairs = [(i, j) for i in range(len(features)) for j in range(i)]
    return sum(linear_cka(features[i], features[j]) for i, j in pairs) / len(pairs)


def normalised_entropy(counts: Tensor) -> Tensor:
    """`(N, C)` -> `(N,)` in [0, 1]"""
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1e-12)
    logs = torch.where(shares > 0, shares.log(), torch.zeros_like(shares))
    return -(shares * logs).sum(1) / torch.tensor(float(counts.shape[1])).log()
