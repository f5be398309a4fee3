"""Feature banks: features of earlier batches or other images, which a client contrasts with its own.

Both are systems of the research log that lost against training without them; they are here so that anybody can see it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from oneflare.core.registry import Registry
from oneflare.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(gt=0)]
Pairs = tuple[Tensor, Tensor]
"""unit features `(m, d)` and their labels `(m,)`"""


class Bank(ABC):
    """What a client holds beside its batch; the loop asks before every step and shows it the batch afterwards."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move to where the features are."""

    def pairs(self) -> Pairs | None:
        """Extra pairs for the supervised contrastive term; None if there are none."""
        return None

    def contrast(self, features: Tensor, temperature: float) -> Tensor | None:
        """A term of its own, weighted; None if the bank has none."""
        del features, temperature
        return None

    def push(self, features: Tensor, labels: Tensor) -> None:  # noqa: B027  (a fixed bank takes nothing in)
        """See what a step saw: unit features `(2B, d)` and labels `(2B,)`."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


BANKS: Registry[Bank] = Registry("feature bank")


def build_bank(spec: Mapping[str, Any] | None, dim: int, public: Tensor | None) -> Bank | None:
    """dim: d. public: the teacher's features of the public images, where a bank wants them."""
    return None if spec is None else BANKS.build(spec, dim, public)


@BANKS.register("memory")
class MemoryBank(Bank):
    """a queue of the client's latest features and labels, as extra pairs of the supervised contrastive term

    In supcon the sums over p and a also run over the queue, whose features are constants. First in, first out.
    """

    def __init__(self, dim: int, public: Tensor | None, *, size: Count = 4096) -> None:
        """size: features it holds"""
        del public
        self.size = size
        self.features = torch.zeros(0, dim)
        """oldest first"""
        self.labels = torch.zeros(0, dtype=torch.int64)

    def to(self, device: torch.device) -> None:
        self.features, self.labels = self.features.to(device), self.labels.to(device)

    def pairs(self) -> Pairs:
        return self.features, self.labels

    @torch.no_grad()
    def push(self, features: Tensor, labels: Tensor) -> None:
        self.features = torch.cat([self.features, features.detach()])[-self.size :]
        self.labels = torch.cat([self.labels, labels])[-self.size :]

    def state_dict(self) -> dict[str, Any]:
        return {"features": self.features, "labels": self.labels}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self.features.device
        self.features, self.labels = state["features"].to(device), state["labels"].to(device)


@BANKS.register("public")
class PublicBank(Bank):
    """a teacher's features b of public images, from which a client pushes its own away

    L_bank = weight mean_i -log( exp(z_i z_i'/t) / (exp(z_i z_i'/t) + sum_b exp(z_i b/t)) ), with z_i' the other view
    of the same image. The server trains the teacher for `epochs` epochs on the public split (`data.public`), with the
    method's own terms and from the start that clients share.
    """

    def __init__(self, dim: int, public: Tensor | None, *, weight: Weight = 1.0, epochs: Count = 10) -> None:
        if public is None or public.shape[1] != dim:
            raise ConfigError("objective.bank=public: the teacher's features are missing; only engine=local makes them")
        self.weight = weight
        self.epochs = epochs
        self.features = public

    def to(self, device: torch.device) -> None:
        self.features = self.features.to(device)

    def contrast(self, features: Tensor, temperature: float) -> Tensor:
        return self.weight * push_away(features, self.features, temperature)


def push_away(features: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """The loss of `PublicBank` at weight 1. features: both views `(2B, d)`, first all first ones; bank: `(m, d)`"""
    other = features.roll(len(features) // 2, 0)
    positive = (features * other).sum(1, keepdim=True) / temperature
    negative = features @ bank.T / temperature
    return (torch.cat([positive, negative], dim=1).logsumexp(1) - positive.squeeze(1)).mean()
