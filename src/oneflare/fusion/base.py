"""The contract of a fusion, the registry of fusions, and the set of uploads that they receive."""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from oneflare import _version
from oneflare.core.config import UploadConfig
from oneflare.core.files import digest_of
from oneflare.core.registry import Registry, sources_used
from oneflare.core.schedules import SCHEDULES
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion.workspace import Workspace
from oneflare.models.base import GlobalModel, Task
from oneflare.models.members import Member, MemberModel, Rule
from oneflare.nn import ENCODERS, PrototypeNetwork
from oneflare.upload import Contract, Upload
from oneflare.upload.evidence import EVIDENCE
from oneflare.upload.evidence import offers as evidence_offers
from oneflare.upload.statistics import Plan, Statistics


@dataclass(frozen=True)
class UploadSet:
    """The uploads of one federation, ordered by client, with the network they fill."""

    uploads: tuple[Upload, ...]
    contract: Contract
    template: PrototypeNetwork
    """the start that all clients shared; never written to"""
    public: Tensor | None = None
    """`(n, c, h, w)` images that belong to nobody, without labels"""

    def __post_init__(self) -> None:
        if not self.uploads:
            raise UploadError("there is no upload to fuse; train or collect at least one")

    def __len__(self) -> int:
        return len(self.uploads)

    def __iter__(self) -> Iterator[Upload]:
        return iter(self.uploads)

    def without(self, clients: Collection[int]) -> UploadSet:
        """The same federation without some of its clients."""
        kept = tuple(upload for upload in self.uploads if upload.client not in clients)
        return self if len(kept) == len(self) else dataclasses.replace(self, uploads=kept)

    @property
    def offered(self) -> frozenset[str]:
        """What a fusion can have."""
        own = frozenset.intersection(*(upload.fields for upload in self.uploads))
        return own if self.public is None else own | {"public"}

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

    @cached_property
    def scratch(self) -> nn.Module:
        """An encoder to fill with one client's weights after another."""
        return copy.deepcopy(self.template.encoder)

    def members(self, rule: Rule) -> MemberModel:
        """A model that asks every client's encoder and combines the answers by `rule`."""
        members = tuple(Member(upload.path, upload.digest, upload.weights) for upload in self.uploads)
        return MemberModel(self.task, members, rule, self.scratch)

    def encoders(self) -> Iterator[nn.Module]:
        """Each client's encoder in turn, in one module that is refilled: never two in memory."""
        encoder = self.scratch
        for upload in self.uploads:
            encoder.load_state_dict(upload.weights())
            yield encoder.eval()


class Fusion(ABC):
    """Chosen by name; options are the keyword-only parameters of the constructor."""

    needs: frozenset[str] = frozenset({"weights", "prototypes"})
    """fields of the uploads; a constructor may ask for more where an option does"""
    single_network: ClassVar[bool] = False
    """whether its model is one network, which costs one pass and is the cheapest to export"""
    trains: ClassVar[bool] = False
    """whether it takes many optimisation steps, so that nobody starts it unasked"""
    teacher: Mapping[str, Any] | None = None
    """the fusion it learns from, if it learns from one"""
    remarks: tuple[str, ...] = ()
    """what the user should know about the last `fuse`: members it does not trust, and why"""

    @abstractmethod
    def fuse(self, uploads: UploadSet) -> GlobalModel: ...

    def fuse_in(self, uploads: UploadSet, workspace: Workspace) -> GlobalModel:
        """The same, saying how far it is and resuming where it was stopped, if it takes that long."""
        del workspace
        return self.fuse(uploads)


FUSIONS: Registry[Fusion] = Registry("fusion")


def single_network_fusions() -> list[str]:
    """Fusions whose model is one network, the cheapest to export and to run."""
    return [name for name in FUSIONS if getattr(FUSIONS[name].factory, "single_network", False)]


def build_fusion(spec: Mapping[str, Any]) -> Fusion:
    return FUSIONS.build(spec)


def code_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Which code the figures of a fusion come from: our arithmetic, and the source of the user's own modules."""
    return {"arithmetic": _version.FUSION_ARITHMETIC, "plugins": sources_used((FUSIONS, ENCODERS, SCHEDULES), spec)}


def made_by(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What figures of this fusion depend on beside the uploads; it is written beside them."""
    return {"options": {key: value for key, value in spec.items() if key != "name"}, "code": code_of(spec)}


def outdated(metrics: Mapping[str, Any], spec: Mapping[str, Any]) -> str | None:
    """Why these figures are not those of the fusion `spec` as it is computed today; None where they are.

    Figures that do not name their code come from the first release; those that do not name their options are made anew.
    """
    now, code = made_by(spec), recorded_code(metrics)
    if digest_of(metrics.get("options")) != digest_of(now["options"]):
        return "with other options"
    if code["arithmetic"] != now["code"]["arithmetic"]:
        return (
            f"with version {code['arithmetic']} of OneFlare's fusion arithmetic (today: {_version.FUSION_ARITHMETIC})"
        )
    before, after = code["plugins"], now["code"]["plugins"]
    changed = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
    return f"with another version of the plugin {' and '.join(changed)}" if changed else None


def recorded_code(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"arithmetic": 1, "plugins": {}} | dict(metrics.get("code") or {})


def made_with(metrics: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    """Whether these figures are those of the fusion `spec`, with its options and with today's code."""
    return outdated(metrics, spec) is None


def offered_fields(
    config: UploadConfig,
    *,
    deep: bool = True,
    statistics: bool = False,
    holdout: float = 0,
    public: int | None = None,
) -> frozenset[str]:
    """What uploads written under these switches will hold, and what the server has beside them."""
    offers = {
        "weights": deep,
        "prototypes": deep,
        "counts": config.counts != "withheld",
        "statistics": statistics,
        "calibration": deep and holdout > 0,
        "public": public is not None,
    }
    measured = evidence_offers(config.evidence) if deep else frozenset()
    return frozenset(name for name, offered in offers.items() if offered) | measured


def check_needs(
    specs: Sequence[Mapping[str, Any]],
    offered: frozenset[str],
    remedy: str = "",
    *,
    before_training: bool = False,
) -> None:
    """Refuse fusions that these uploads cannot feed; before training, what clients measure can still be chosen."""
    for spec in specs:
        missing = sorted(build_fusion(spec).needs - offered)
        if missing and before_training and set(missing) <= set(EVIDENCE):
            wanted = {name for one in specs for name in build_fusion(one).needs & set(EVIDENCE)} - offered
            remedy = f"; set upload.evidence={','.join(sorted(wanted | (offered & set(EVIDENCE))))}"
        if "public" in missing:
            raise ConfigError(
                f"fusion {spec['name']} needs public images, and none are set aside; run with data.public=NUMBER"
            )
        if missing:
            raise ConfigError(
                f"fusion {spec['name']} needs {' and '.join(missing)}, which the uploads withhold{remedy}"
            )
