"""The contract of a fusion, the registry of fusions, and the set of uploads that they receive."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from oneflare import _version
from oneflare.core.config import UploadConfig
from oneflare.core.files import digest_of
from oneflare.core.registry import Registry, parts_named, sources_used
from oneflare.core.schedules import SCHEDULES
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.base import BATCH, PROCESSOR, GlobalModel, Task
from oneflare.models.members import Member, MemberModel, Rule
from oneflare.nn import ENCODERS, PrototypeNetwork
from oneflare.nn.encoders import Features, both_features
from oneflare.upload import Contract, Upload
from oneflare.upload.class_statistics import ClassStatistics
from oneflare.upload.evidence import EVIDENCE
from oneflare.upload.evidence import offers as evidence_offers
from oneflare.upload.statistics import DEFAULT_PARTS, ClassMeans, Plan, Statistics
from oneflare.upload.statistics import offers as statistics_offer


@dataclass(frozen=True)
class UploadSet:
    """The uploads of one federation, ordered by client, with the network they fill."""

    uploads: tuple[Upload, ...]
    contract: Contract
    template: PrototypeNetwork
    """the start that all clients shared; never written to"""
    public: Tensor | None = None
    """`(n, c, h, w)` images that belong to nobody, without labels"""
    total: Statistics | None = None
    """the statistics of all uploads together, where they are masked and only their total can be read"""
    device: torch.device = PROCESSOR
    """where networks compute: those of clients, and those that a fusion trains. All else is done by the processor."""

    def __post_init__(self) -> None:
        if not self.uploads:
            raise UploadError("there is no upload to fuse; train or collect at least one")

    def __len__(self) -> int:
        return len(self.uploads)

    def __iter__(self) -> Iterator[Upload]:
        return iter(self.uploads)

    def without(self, clients: Collection[int]) -> UploadSet:
        """The same federation without some of its clients; of masked statistics there is then no total."""
        kept = tuple(upload for upload in self.uploads if upload.client not in clients)
        return self if len(kept) == len(self) else dataclasses.replace(self, uploads=kept, total=None)

    @property
    def offered(self) -> frozenset[str]:
        """The fields that every upload holds, and `public` where there are public images: what `needs` may ask for."""
        own = frozenset.intersection(*(upload.fields for upload in self.uploads))
        if self.total is not None and self.contract.statistics is not None:
            own |= statistics_offer(self.contract.statistics.parts)
        return own if self.public is None else own | {"public"}

    @property
    def task(self) -> Task:
        """What the fused model does: its classes, the images that it takes, and the encoder of its members."""
        return Task(self.contract.encoder, self.contract.image, self.contract.classes, self.contract.dim)

    @property
    def size_weights(self) -> Tensor:
        """`(N,)` share of each client in all samples, float64"""
        samples = torch.tensor([upload.samples for upload in self.uploads], dtype=torch.float64)
        return samples / samples.sum()

    @property
    def prototypes(self) -> Tensor:
        """`(N, C, d)` prototypes of all clients, in the order of the uploads"""
        return self._stacked("prototypes", "holds no trained network; use a fusion of statistics")

    @property
    def counts(self) -> Tensor:
        """`(N, C)` samples of each class at each client, float64"""
        return self._stacked("counts", "class counts were withheld; use a fusion that does not need them")

    def _stacked(self, field: str, otherwise: str) -> Tensor:
        """A field of all uploads as one tensor; otherwise: what is said of an upload without it"""
        rows = []
        for upload in self.uploads:
            row: Tensor | None = getattr(upload, field)
            if row is None:
                raise UploadError(f"{upload.path}: {otherwise}")
            rows.append(row)
        return torch.stack(rows)

    def statistics(self) -> Statistics:
        """The statistics of all clients, added up with one upload in memory at a time."""
        plan = self.plan
        if self.total is not None:
            return self.total
        if self.contract.masked:
            raise UploadError(
                "the sums are masked, and only the total of everybody in the round can be read; to leave members out, "
                "sign a new roster without them: `oneflare server roster`"
            )
        return sum((upload.statistics() for upload in self), Statistics.zeros(plan.dim, len(self.contract.classes)))

    def class_means(self) -> ClassMeans:
        """The sums and counts of each class over all clients."""
        if self.contract.masked:
            total = self.statistics()
            return ClassMeans(total.sums, total.counts)
        parts = [upload.class_means() for upload in self]
        return sum(parts[1:], parts[0])

    def class_statistics(self) -> ClassStatistics:
        """The statistics of each class over all clients, one upload in memory at a time."""
        total = self.uploads[0].class_statistics()
        for upload in self.uploads[1:]:
            total = total + upload.class_statistics()
        return total

    @property
    def plan(self) -> Plan:
        """Which statistics the uploads hold; an UploadError where they hold none."""
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
        return MemberModel(self.task, members, rule, self.scratch).to(self.device)

    def encoders(self) -> Iterator[nn.Module]:
        """Each client's encoder in turn, in one module that is refilled: never two in memory."""
        encoder = self.scratch.to(self.device)
        for upload in self.uploads:
            encoder.load_state_dict(upload.weights())
            yield encoder.eval()

    @torch.no_grad()
    def features(self, images: Tensor, batch_size: int = BATCH) -> Iterator[Features]:
        """What each client's encoder in turn makes of prepared images `(n, c, h, w)`, in the processor's memory."""
        for encoder in self.encoders():
            parts = [both_features(encoder, part.to(self.device)).cpu() for part in images.split(batch_size)]
            yield Features.together(parts)


Treatment = Literal["kept", "capped", "left out"]


@dataclass(frozen=True)
class Suspect:
    """A member whose upload is well-formed and does not fit the others."""

    client: int
    reason: str
    """what does not fit, as a clause without a full stop"""
    treatment: Treatment
    """what the fusion does about it; capped: the member's claim to many images is ignored, the rest counts"""

    @property
    def left_out(self) -> bool:
        return self.treatment == "left out"

    def __str__(self) -> str:
        what = {
            "kept": "",
            "capped": " and counts as a member of median size",
            "left out": " and is left out",
        }[self.treatment]
        return f"client {self.client} is suspect{what}: {self.reason}"

    def warning(self, name: str) -> str:
        """A line for the coordinator, who knows the member by `name` and decides whether it takes part."""
        return f"{name} is suspect: {self.reason}; ask them, or fuse with --remove {name}"


@dataclass(frozen=True)
class Fused:
    """What a fusion returns."""

    model: GlobalModel
    notes: Mapping[str, Any] = field(default_factory=dict)
    """what the fusion has to say about its work, for example the last loss; plain JSON, kept as `training`"""
    suspects: tuple[Suspect, ...] = ()
    """members that do not fit the others, and what was done about each"""
    seconds_before: float = 0.0
    """spent in attempts that were interrupted, where this one went on from their checkpoint"""


class Fusion(ABC):
    """A way to make one model of many uploads.

    A fusion is registered under a name (`@FUSIONS.register("mine")`) and chosen by it. Its options are the keyword-only
    parameters of its constructor, which stores them. The first line of its docstring is shown by
    `oneflare methods --parts`.
    """

    needs: frozenset[str] = frozenset({"weights", "prototypes"})
    """fields that every upload must have (`UploadSet.offered`); a constructor may add those that its options need"""
    single_network: ClassVar[bool] = False
    """whether the model is one network (`SingleModel`), which costs one pass per image and is the cheapest to export"""
    trains: ClassVar[bool] = False
    """whether it takes many optimisation steps, so that it runs only where somebody asked for it"""
    teacher: Mapping[str, Any] | None = None
    """name and options of the fusion it learns from; None where it learns from none"""
    revision: ClassVar[int] = 0
    """to be raised whenever this fusion alone gives other figures from the same uploads than before; what concerns all
    fusions is counted by `FUSION_ARITHMETIC`"""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "workspace" not in inspect.signature(cls.fuse).parameters:
            raise ConfigError(
                f"{cls.__module__}.{cls.__name__}: fuse must take (self, uploads, workspace) and return Fused(model)"
            )

    @abstractmethod
    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        """Make one model of the uploads.

        uploads: of one federation, at least one, ordered by client, each verified against the federation's contract
        (names, shapes, finite numbers) and offering every field in `needs`. They are read-only: weights are read from
        the file at each access, and `uploads.template` must be copied before it is changed. That numbers are honest or
        plausible may not be assumed.

        workspace: where to keep a checkpoint and whom to tell how far the work is. A fusion that does not train
        ignores it; one that does hands it to `oneflare.fusion.workspace.carry_out`.

        Returns the model, together with notes and suspects where there are any. The result depends on nothing but the
        uploads and the options: the same ones give the same model on every call, and random numbers come from a seed
        among the options. Nothing is stored on the fusion.

        Raises `MemberFault` where one upload alone is of no use, which `with upload.blamed():` does: the fusion is then
        repeated without that member. Raises `UploadError` where the uploads together cannot be fused.
        """


FUSIONS: Registry[Fusion] = Registry("fusion")


def single_network_fusions() -> list[str]:
    """Fusions whose model is one network, the cheapest to export and to run."""
    return [name for name in FUSIONS if getattr(FUSIONS[name].factory, "single_network", False)]


def build_fusion(spec: Mapping[str, Any]) -> Fusion:
    """The fusion that `spec` names, `{name: ..., option: ...}`."""
    return FUSIONS.build(spec)


def code_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Which code the figures of a fusion come from: our arithmetic, the revisions of this fusion and of its teacher,
    and the source of the user's own modules."""
    revisions = {name: getattr(part, "revision", 0) for name, part in parts_named(FUSIONS, spec).items()}
    return {
        "arithmetic": _version.FUSION_ARITHMETIC,
        "revisions": {name: revision for name, revision in sorted(revisions.items()) if revision},
        "plugins": sources_used((FUSIONS, ENCODERS, SCHEDULES), spec),
    }


def made_by(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What figures of this fusion depend on beside the uploads; it is written beside them."""
    return {"options": {key: value for key, value in spec.items() if key != "name"}, "code": code_of(spec)}


def outdated(metrics: Mapping[str, Any], spec: Mapping[str, Any]) -> str | None:
    """Why these figures are not those of the fusion `spec` as it is computed today; None where they are.

    Figures that do not name their code come from the first release; those that do not name their options are made anew.
    """
    now, code = made_by(spec), recorded_code(metrics)
    if digest_of(_given(metrics.get("options"))) != digest_of(_given(now["options"])):
        return "with other options"
    changed = _changed(code["plugins"], now["code"]["plugins"])
    return older_code(metrics, spec) or (
        f"with another version of the plugin {' and '.join(changed)}" if changed else None
    )


def older_code(metrics: Mapping[str, Any], spec: Mapping[str, Any]) -> str | None:
    """How OneFlare computed these figures otherwise than it does today; None where it does not, whatever plugins do."""
    now, code = code_of(spec), recorded_code(metrics)
    if code["arithmetic"] != now["arithmetic"]:
        return f"with version {code['arithmetic']} of OneFlare's fusion arithmetic (today: {now['arithmetic']})"
    changed = _changed(code["revisions"], now["revisions"])
    return f"with another revision of the fusion {' and '.join(changed)}" if changed else None


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same in both."""
    return sorted(name for name in {**before, **after} if before.get(name) != after.get(name))


def _given(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Options that have a value; those that were added later are None by default."""
    return None if options is None else {name: value for name, value in options.items() if value is not None}


def recorded_code(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {"arithmetic": 1, "revisions": {}, "plugins": {}} | dict(metrics.get("code") or {})


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
        "calibration": deep and holdout > 0,
        "public": public is not None,
    }
    measured = evidence_offers(config.evidence) if deep else frozenset()
    if statistics:
        measured |= statistics_offer(DEFAULT_PARTS if config.statistics is None else config.statistics)
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
