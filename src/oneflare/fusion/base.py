"""What a fusion is: a pure function from verified uploads to a global model, which declares what it needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from oneflare.config import UploadConfig
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion.model import GlobalModel, Member, MemberModel, Rule, Task
from oneflare.nn import PrototypeNetwork
from oneflare.registry import Registry
from oneflare.statistics import Plan, Statistics
from oneflare.upload import Contract, Upload


@dataclass(frozen=True)
class UploadSet:
    """The uploads of one federation, ordered by client, with the network they fill."""

    uploads: tuple[Upload, ...]
    contract: Contract
    template: PrototypeNetwork

    def __post_init__(self) -> None:
        if not self.uploads:
            raise UploadError("there is no upload to fuse; train or collect at least one")

    def __len__(self) -> int:
        return len(self.uploads)

    def __iter__(self) -> Iterator[Upload]:
        return iter(self.uploads)

    @property
    def task(self) -> Task:
        return Task(self.contract.encoder, self.contract.image, self.contract.classes, self.contract.dim)

    @property
    def size_weights(self) -> Tensor:
        """`(N,)` share of each client in all samples, float64"""
        samples = torch.tensor([upload.samples for upload in self.uploads], dtype=torch.float64)
        return samples / samples.sum()

    @property
    def prototypes(self) -> Tensor:
        """`(N, C, d)`"""
        rows = []
        for upload in self.uploads:
            if upload.prototypes is None:
                raise UploadError(f"{upload.path}: holds no trained network; use a fusion of statistics")
            rows.append(upload.prototypes)
        return torch.stack(rows)

    @property
    def counts(self) -> Tensor:
        """`(N, C)` samples of each class at each client, float64"""
        rows = []
        for upload in self.uploads:
            if upload.counts is None:
                raise UploadError(f"{upload.path}: class counts were withheld; use a fusion that does not need them")
            rows.append(upload.counts)
        return torch.stack(rows)

    def statistics(self) -> Statistics:
        """The sum over clients, one upload in memory at a time."""
        plan = self.plan
        return sum((upload.statistics() for upload in self), Statistics.zeros(plan.dim, len(self.contract.classes)))

    @property
    def plan(self) -> Plan:
        if self.contract.statistics is None:
            raise UploadError("this federation's uploads hold no statistics; set analytic=random_conv for all clients")
        return self.contract.statistics

    def members(self, rule: Rule) -> MemberModel:
        """A model that asks every client's encoder and combines the answers by `rule`."""
        members = tuple(Member(upload.path, upload.digest, upload.weights) for upload in self.uploads)
        return MemberModel(self.task, members, rule, self.template.encoder)

    def encoders(self) -> Iterator[nn.Module]:
        """Each client's encoder in turn, in one module that is refilled: never two in memory."""
        encoder = self.template.encoder
        for upload in self.uploads:
            encoder.load_state_dict(upload.weights())
            yield encoder.eval()


class Fusion(ABC):
    """Chosen by name; options are the keyword-only parameters of the constructor."""

    needs: ClassVar[frozenset[str]] = frozenset({"weights", "prototypes"})
    remarks: tuple[str, ...] = ()
    """what the user should know about the last `fuse`: members it does not trust, and why"""

    @abstractmethod
    def fuse(self, uploads: UploadSet) -> GlobalModel: ...


FUSIONS: Registry[Fusion] = Registry("fusion")


def build_fusion(spec: Mapping[str, Any]) -> Fusion:
    return FUSIONS.build(spec)


def offered_fields(
    config: UploadConfig, *, deep: bool = True, statistics: bool = False, holdout: float = 0
) -> frozenset[str]:
    """What uploads written under these switches will hold."""
    offers = {
        "weights": deep,
        "prototypes": deep,
        "counts": config.counts != "withheld",
        "statistics": statistics,
        "calibration": deep and holdout > 0,
    }
    return frozenset(name for name, offered in offers.items() if offered)


def check_needs(specs: Sequence[Mapping[str, Any]], offered: frozenset[str], remedy: str = "") -> None:
    for spec in specs:
        missing = sorted(build_fusion(spec).needs - offered)
        if missing:
            raise ConfigError(
                f"fusion {spec['name']} needs {' and '.join(missing)}, which the uploads withhold{remedy}"
            )
