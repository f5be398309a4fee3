"""Fusion whose global prototypes are optimised on the server."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.rules.sums import FeatureSum
from oneflare.nn import ANCHORS
from oneflare.nn.optimisers import SGD, StepSettings

LARGEST_MARGIN = 100.0
"""tau of FedTGP"""


def plain_logits(clients: Tensor, prototypes: Tensor) -> Tensor:
    """unit(P_ic) P^T: client prototypes as if they were features. `(n, d)`, `(C, d)` -> `(n, C)`"""
    return F.normalize(clients, dim=1) @ prototypes.T


def margin_logits(clients: Tensor, labels: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """-(|P_ic - P_k| + margin [k = c]): the own prototype must be nearer than any other by the margin (FedTGP)"""
    return -torch.cdist(clients, prototypes) - margin * F.one_hot(labels, len(prototypes))


def adaptive_margin(clients: Tensor, labels: Tensor, weights: Tensor) -> float:
    """delta = min(max_{c,k} |Q_c - Q_k|, tau), with Q_c the mean of the client prototypes of class c"""
    present = labels.unique()
    centres = torch.stack(
        [(weights[labels == c, None] * clients[labels == c]).sum(0) / weights[labels == c].sum() for c in present]
    )
    return min(float(torch.cdist(centres, centres).max()), LARGEST_MARGIN)


def server_loss(
    logits: Tensor, labels: Tensor, weights: Tensor, prototypes: Tensor, target: Tensor, gamma: float
) -> Tensor:
    """CE(logits, labels) + gamma MSE(P, A)"""
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (weights * losses).sum() / weights.sum() + gamma * F.mse_loss(prototypes, target)


@FUSIONS.register("trainable_prototypes")
class TrainablePrototypes(Fusion):
    """plan B: global prototypes optimised on the server to tell the clients' prototypes apart, near an ETF

    P starts at the mean prototype and takes `steps` steps down CE(client prototypes against P) + gamma MSE(P, A), with
    A the federation's own anchors where they are an ETF. margin=adaptive: FedTGP's distances and margin instead of
    products. seen_only: classes a client never saw have no say.
    """

    def __init__(
        self,
        *,
        steps: int = 30,
        lr: float = 1.0,
        gamma: float = 1.0,
        margin: Literal["none", "adaptive"] = "none",
        seen_only: bool = False,
    ) -> None:
        if steps < 0 or not lr > 0 or gamma < 0:
            raise ConfigError(
                "fusion trainable_prototypes: steps and gamma must be at least 0, lr greater than 0 "
                f"(got {steps}, {gamma}, {lr})"
            )
        self.steps, self.lr, self.gamma, self.margin, self.seen_only = steps, lr, gamma, margin, seen_only
        if seen_only:
            self.needs = self.needs | {"counts"}

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        clients = uploads.prototypes
        counts = (uploads.counts > 0).float() if self.seen_only else torch.ones(clients.shape[:2])
        prototypes = self.optimise(clients, counts, etf_of(uploads))
        return Fused(uploads.members(FeatureSum(uploads.size_weights.float(), prototypes)))

    def optimise(self, clients: Tensor, say: Tensor, target: Tensor) -> Tensor:
        """clients `(N, C, d)`, say `(N, C)`, target `(C, d)` -> `(C, d)`"""
        number, classes, dim = clients.shape
        rows, labels, weights = clients.reshape(-1, dim), torch.arange(classes).repeat(number), say.flatten()
        prototypes = clients.mean(0).clone().requires_grad_()
        optimiser = SGD([prototypes], StepSettings(momentum=0.9))
        margin = adaptive_margin(rows[weights > 0], labels[weights > 0], weights[weights > 0])
        with torch.enable_grad():
            for _ in range(self.steps):
                if self.margin == "adaptive":
                    logits = margin_logits(rows, labels, prototypes, margin)
                else:
                    logits = plain_logits(rows, prototypes)
                server_loss(logits, labels, weights, prototypes, target, self.gamma).backward()
                optimiser.step(self.lr)
        return prototypes.detach()


def etf_of(uploads: UploadSet) -> Tensor:
    """The anchors clients trained with where they are an ETF or packed alike, else a seeded one. `(C, d)`"""
    spec = uploads.contract.anchors
    if spec.get("name") not in ("etf", "packing"):
        spec = {"name": "packing"}
    anchors = ANCHORS.build(spec, len(uploads.contract.classes), uploads.contract.dim)
    assert anchors is not None
    return anchors.matrix
