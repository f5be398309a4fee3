"""The named terms of the local objective L_local (FAFI).

A term is a function of a `Batch`; similarity matrices are computed once and shared between terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.registry import Registry

Term = Callable[["Batch"], Tensor]
TERMS: Registry[Tensor] = Registry("loss term")


@dataclass(frozen=True)
class Outliers:
    """Unit features `(m, d)` of what no class is like, for objectives with a class "unknown"."""

    unknown: Tensor
    """`(d,)` the prototype of that class"""
    destroyed: Tensor
    """of destroyed images"""
    moved: Tensor
    """of destroyed images that were moved toward the classes"""
    mixed: Tensor
    """between two classes; may have no rows"""


@dataclass(frozen=True)
class Batch:
    """Both views of a batch: unit features z `(2B, d)`, labels `(2B,)`, prototypes P `(C, d)`."""

    features: Tensor
    labels: Tensor
    prototypes: Tensor
    supcon_temperature: float = 0.07
    proto_temperature: float = 1.0
    bank: tuple[Tensor, Tensor] | None = None
    """features `(m, d)` and labels `(m,)` of earlier batches"""
    outliers: Outliers | None = None

    @cached_property
    def logits(self) -> Tensor:
        """z P^T `(2B, C)`"""
        return self.features @ self.prototypes.T

    @cached_property
    def cross_entropy(self) -> Tensor:
        return F.cross_entropy(self.logits, self.labels)


def local_terms(weights: Mapping[str, float], batch: Batch) -> dict[str, Tensor]:
    """Every wanted term by name, unweighted."""
    return {name: TERMS[name].factory(batch) for name, weight in weights.items() if weight != 0}


@TERMS.register("cls")
def cls(batch: Batch) -> Tensor:
    """cross-entropy of z P^T"""
    return batch.cross_entropy


@TERMS.register("proto_feature")
def proto_feature(batch: Batch) -> Tensor:
    """cross-entropy of z P^T / t"""
    if batch.proto_temperature == 1.0:
        return batch.cross_entropy
    return F.cross_entropy(batch.logits / batch.proto_temperature, batch.labels)


@TERMS.register("proto_separation")
def proto_separation(batch: Batch) -> Tensor:
    """cross-entropy of P P^T / t against 0..C-1"""
    similarity = batch.prototypes @ batch.prototypes.T / batch.proto_temperature
    return F.cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))


@TERMS.register("proto_cosine")
def proto_cosine(batch: Batch) -> Tensor:
    """mean of 1 - cos(z_i, P_y): how far features are from the direction of their own class"""
    own = F.normalize(batch.prototypes, dim=1)[batch.labels]
    return (1 - (batch.features * own).sum(1)).mean()


@TERMS.register("supcon")
def supcon(batch: Batch) -> Tensor:
    """supervised contrastive loss over the 2B views (Khosla et al. 2020)

    L = mean_i -1/|P(i)| sum_{p in P(i)} log( exp(z_i z_p / t) / sum_{a != i} exp(z_i z_a / t) )
    """
    return supervised_contrastive(batch.features, batch.labels, batch.supcon_temperature, batch.bank)


def supervised_contrastive(
    features: Tensor, labels: Tensor, temperature: float, bank: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """features: `(n, d)` of unit norm; anchors without a positive do not count.

    bank: features and labels that the sums over p and a also run over.
    """
    others, their_labels = features, labels
    if bank is not None:
        others, their_labels = torch.cat([features, bank[0]]), torch.cat([labels, bank[1]])
    similarity = features @ others.T / temperature
    diagonal = torch.eye(len(labels), len(their_labels), dtype=torch.bool, device=labels.device)
    similarity = similarity.masked_fill(diagonal, -torch.inf)
    log_probability = similarity - similarity.logsumexp(dim=1, keepdim=True)
    positive = (labels[:, None] == their_labels[None, :]) & ~diagonal
    number = positive.sum(1)
    total = torch.where(positive, log_probability, 0.0).sum(1)
    return -(total / number.clamp(min=1)).sum() / (number > 0).sum().clamp(min=1)
