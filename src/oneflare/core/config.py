"""The experiment: every option that a run depends on, checked before any work.

Values come from layers (defaults, a method's recipe, a YAML file, `key=value` overrides, keyword arguments), later
ones winning. Components that are chosen by name (encoder, anchors, controller, fusions) are `{name: ..., option: ...}`
and are checked against the signature of what they name, where that lives.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from oneflare import _version
from oneflare.core.files import digest_of
from oneflare.core.pixel_settings import Pixels, Section

LARGEST_SIDE = 1024
"""of images as networks are fed them, in pixels"""


def named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _has_name(value: Any) -> Any:
    value = named(value)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("must be a name or a mapping with a 'name'")
    return value


def named_or_none(value: Any) -> Any:
    """A component as a mapping with its name; None where there is none."""
    value = None if value in ("none", None) else _has_name(value)
    return None if value is not None and value["name"] == "none" else value


def _name_list(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [value] if isinstance(value, dict) else value


Component = Annotated[dict[str, Any], BeforeValidator(_has_name)]
Names = Annotated[tuple[str, ...], BeforeValidator(_name_list), AfterValidator(lambda names: tuple(sorted(set(names))))]
Components = Annotated[tuple[Component, ...], BeforeValidator(_name_list)]


class DataConfig(Section):
    """Which images: a known name, `folder`, or arrays given in Python."""

    name: str = "digits"
    path: str | None = Field(None, description="folder with the files; default: $ONEFLARE_DATA, then the hub")
    train_size: int | None = Field(None, ge=1, description="seeded subset of the training images")
    test_size: int | None = Field(None, ge=1, description="seeded subset of the test images")
    image_size: int | None = Field(
        None,
        ge=8,
        le=LARGEST_SIDE,
        description="side to which images are brought; default: the data set's own, 32 for a folder, and with a "
        "backbone the backbone's own, but at most four times the data set's",
    )
    pixels: Pixels | None = Field(
        None, description="what the numbers in image files of a folder mean; default: 8 bits, see Pixels"
    )
    skip_damaged: bool | None = Field(
        None, description="leave out images of a folder that cannot be used, and note how many; default: refuse them"
    )
    test_fraction: float = Field(0.2, gt=0, lt=1, description="held out where a folder has no test part")
    patients: bool | None = Field(
        None,
        description="false: ignore the patients that a table or the folders below class folders name; default: their "
        "images stay together",
    )
    seed: int = Field(0, ge=0, description="seed of the subsets, shared by all runs")
    public: int | None = Field(
        None, ge=1, description="training images set aside as a public split, which no client owns; default: none"
    )
    digest: str | None = Field(None, description="fingerprint of arrays given in Python")


class PartitionConfig(Section):
    """Who owns what."""

    kind: str = "dirichlet"
    clients: int = Field(5, ge=1, le=100_000)
    alpha: float = Field(0.05, gt=0, description="Dirichlet concentration: small is badly skewed")
    shards: int = Field(2, ge=1, le=100_000, description="shards per client for kind=shards")
    min_samples: int = Field(1, ge=0, description="redraw (a bounded number of times) until clients have this")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments for kind=flwr:NAME")
    label_noise: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of wrong labels at the first `noisy_clients` clients; default: none",
    )
    noisy_clients: int | None = Field(None, ge=1, description="how many clients have wrong labels; default: 1")

    @model_validator(mode="after")
    def _noise_has_clients(self) -> PartitionConfig:
        if self.noisy_clients is not None and self.label_noise is None:
            raise ValueError("noisy_clients does nothing alone; set label_noise, the share of wrong labels, too")
        if (self.noisy_clients or 0) > self.clients:
            raise ValueError(f"noisy_clients={self.noisy_clients} is more than the {self.clients} clients")
        return self


class AugmentConfig(Section):
    """Two independent random views per image."""

    kind: Literal["auto", "crop", "affine", "none"] = "auto"
    flip: bool | None = Field(None, description="mirror images; default: as the data allow")
    min_scale: float = Field(0.4, gt=0, le=1, description="smallest area of a random crop")
    jitter: float = Field(0.4, ge=0, le=1, description="brightness, contrast and saturation")
    hue: float = Field(0.1, ge=0, le=0.5)
    grayscale: float = Field(0.2, ge=0, le=1, description="probability")
    degrees: float = Field(10.0, ge=0, le=180, description="rotation for kind=affine")
    shift: float = Field(0.1, ge=0, le=0.5, description="translation for kind=affine, as a part of the side")


class ObjectiveConfig(Section):
    """Weights of the named terms of the local loss, and their temperatures."""

    terms: dict[str, float] = Field(
        default_factory=lambda: {"cls": 1.0, "supcon": 1.0, "proto_feature": 1.0, "proto_separation": 1.0}
    )
    supcon_temperature: float = Field(0.07, gt=0)
    proto_temperature: float = Field(1.0, gt=0)
    pcgrad: bool = Field(False, description="where the pull of the anchors opposes the local gradient, project it out")
    align_classes: Literal["all", "seen"] | None = Field(
        None,
        description="prototypes that the anchors pull: of all classes, or of those in the current batch; default: all",
    )
    align_reduction: Literal["mean", "per_prototype"] | None = Field(
        None,
        description="what lambda weighs: the mean over all C d entries, whose pull on one prototype falls with C "
        "and d; or per prototype, the pull that the mean has at 10 classes and 512 features; default: mean",
    )
    bank: Component | None = Field(None, description="features to contrast with: memory or public; default: none")
    alignment_epochs: int | None = Field(
        None, ge=1, description="first epochs that contrast with the public bank only; then the local loss without it"
    )
    proximal: float | None = Field(None, gt=0, description="mu of the pull back to the shared start (FedProx)")
    freeze_prototypes: bool | None = Field(None, description="prototypes are the anchors and stay there")

    def without_additions(self) -> ObjectiveConfig:
        """The terms without bank, stages and proximal term."""
        return self.model_copy(update={"bank": None, "alignment_epochs": None, "proximal": None})

    @property
    def public_bank(self) -> bool:
        return self.bank is not None and self.bank["name"] == "public"

    @property
    def open_set(self) -> bool:
        """Whether there is a class "unknown", which has a prototype of its own and outliers to train it."""
        return bool(self.terms.get("open_set"))

    @property
    def has_additions(self) -> bool:
        """Whether a client uses outliers, a bank, stages, a proximal term or frozen prototypes beside its terms."""
        return bool(self.open_set or self.bank or self.alignment_epochs or self.proximal or self.freeze_prototypes)


class TrainConfig(Section):
    """The local training budget of each client."""

    epochs: int = Field(40, ge=1, le=1_000_000)
    batch_size: int = Field(32, ge=1, le=1_000_000)
    lr: float = Field(0.05, gt=0)
    schedule: Component = {"name": "constant"}
    lr_scale_batch: int | None = Field(
        None, ge=1, description="batch size for which lr was chosen; the rate follows batch_size in proportion"
    )
    check_lr: bool = Field(False, description="estimate 2/L at the start and warn where the peak rate exceeds it")
    optimiser: Component | None = Field(None, description="sgd, adam, adamw or one of your own; default: sgd")
    momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    momentum_reset: bool = Field(False, description="velocity to zero where the schedule restarts")
    thermostat: float = Field(
        0.0,
        ge=0,
        description="adds noise so that the squared size of an update stays at this fraction of its size in the first "
        "epoch; 0 adds none",
    )
    weight_decay: float = Field(0.0, ge=0)
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    holdout: float = Field(0.0, ge=0, lt=1, description="part of a client's images kept back to calibrate its model")
    snapshots: int = Field(4, ge=0, le=1_000_000, description="moments before the end at which fusion is simulated")
    tail: int | None = Field(None, ge=1, description="fusion is also simulated after so many epochs before the last")
    cohort: int | None = Field(None, ge=1, description="most clients trained as one batch of models; default: a rule")
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    checkpoint_seconds: float = Field(20.0, ge=0, description="least time between two checkpoints of a client")


def _switched(value: Any) -> Any:
    """`true` stands for all defaults, `false` for none."""
    return ({} if value else None) if isinstance(value, bool) else value


class MaskedConfig(Section):
    """Sums of which only the total over members can be read."""

    bits: int = Field(16, ge=4, le=22, description="features are rounded to multiples of 2^-bits")
    clip: float | None = Field(
        None, gt=0, description="larger features are cut; default: a power of two that no feature exceeds"
    )
    threshold: int | None = Field(
        None, ge=2, description="members that are needed to open a total; default: more than half of the roster"
    )


def _bytes(value: Any) -> Any:
    """10000, "500kB", "10MB" or "1GB" in bytes; a megabyte has a million."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kMG]?)B?\s*", value)
    if found is None:
        raise ValueError("must be a size such as 500kB or 10MB")
    return int(float(found[1]) * {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}[found[2]])


Bytes = Annotated[int, BeforeValidator(_bytes)]


class UploadConfig(Section):
    """What leaves a client."""

    counts: Literal["exact", "noised", "withheld"] = "exact"
    counts_epsilon: float = Field(1.0, ge=1e-6, description="privacy budget of noised counts")
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    factors: bool | None = Field(
        None,
        description="whether a client with at most half as many images as features sends a factor of its sums of "
        "products, which is shorter and says the same; default: no",
    )
    limit: Bytes | None = Field(
        None,
        gt=0,
        description="the most bytes that an upload of statistics may have, for example 10MB; the map is as large as "
        "fits (analytic=paired), in as many blocks of features as suit the size (analytic.blocks)",
    )
    statistics: Names | None = Field(
        None,
        description="what statistics hold beside the sums and counts of classes: covariance, class_covariances, "
        "mixtures; default: what the fusions need",
    )
    statistics_components: int | None = Field(
        None, ge=1, le=1000, description="Gaussians in the mixture of a class; default: 10"
    )
    statistics_dtype: Literal["float32", "int16", "int12", "fine", "coarse", "whole"] = Field(
        "float32",
        description="how sums of products are sent: as they are (float32), rounded relative to deviations (int16, "
        "int12), or decorrelated, rounded and coded in about 9 (fine) or 5 (coarse) bits; whole: decorrelated, rounded "
        "for each image and then added up exactly, in about 10 bits, so that every split has the same answers",
    )
    statistics_epsilon: float | None = Field(
        None, ge=1e-6, description="privacy budget of noised statistics; default: exact"
    )
    statistics_delta: float = Field(1e-5, gt=0, lt=1)
    statistics_clip: float = Field(1.0, gt=0, description="largest norm of an image's features in noised statistics")
    statistics_noise_seed: int | None = Field(
        None,
        ge=0,
        description="seed of the noise on statistics and counts, for simulations that are to be repeated: such noise "
        "hides nothing; default: noise from the operating system, which nobody can draw again",
    )
    evidence: Names = Field((), description="what clients measure of their networks for fusions that need it")
    masked: Annotated[MaskedConfig | None, BeforeValidator(_switched)] = Field(
        None, description="sums in fixed point that real members mask, so that only their total can be read"
    )

    @model_validator(mode="after")
    def _masked_fits(self) -> UploadConfig:
        """Counts are in the masked sums, so beside these they are withheld unless somebody asks for them."""
        if self.masked is None:
            return self
        if self.statistics_epsilon is not None or self.statistics_dtype != "float32":
            raise ValueError("masked sums take neither statistics_epsilon nor statistics_dtype; remove one of the two")
        if "counts" not in self.model_fields_set:
            object.__setattr__(self, "counts", "withheld")
        return self


class CodeConfig(Section):
    """Which code made the uploads. It is recorded, never chosen: whoever runs an experiment has today's code."""

    arithmetic: int = Field(
        default_factory=lambda: _version.TRAINING_ARITHMETIC, description="version of the arithmetic of training"
    )
    plugins: dict[str, str] = Field(
        default_factory=dict, description="digest of the source of every module of your own that training uses"
    )

    @classmethod
    def recorded(cls, content: Any) -> CodeConfig:
        """As a file says it; files that say nothing come from the first release."""
        return cls.model_validate(content or {"arithmetic": 1})

    def differences(self, before: CodeConfig) -> list[str]:
        """What is another one than `before`, in words that follow "another"."""
        modules = sorted(set(self.plugins) | set(before.plugins))
        changed = [name for name in modules if self.plugins.get(name) != before.plugins.get(name)]
        words = [f"version of the plugin {name}" for name in changed]
        return words if self.arithmetic == before.arithmetic else [*words, "version of OneFlare's training arithmetic"]


class Experiment(Section):
    """One federation, from data to metrics. The resolved form is saved with every result."""

    method: str = "flare"
    data: Annotated[DataConfig, BeforeValidator(named)] = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    augment: AugmentConfig = AugmentConfig()
    backbone: Annotated[dict[str, Any] | None, BeforeValidator(named_or_none)] = Field(
        None, description="frozen pretrained network whose features of the images are the clients' data; default: none"
    )
    encoder: Component = {"name": "resnet8"}
    objective: ObjectiveConfig = ObjectiveConfig()
    anchors: Component = {"name": "none"}
    controller: Component = {"name": "none"}
    analytic: Component = {"name": "none"}
    train: TrainConfig = TrainConfig()
    upload: UploadConfig = UploadConfig()
    fusions: Components = ({"name": "feature_mean"},)
    seed: int = Field(0, ge=0)
    engine: Literal["local", "flower"] = "local"
    workers: int | None = Field(None, ge=1, description="worker processes; default: one per core")
    code: CodeConfig = Field(default_factory=CodeConfig)

    @field_validator("fusions")
    @classmethod
    def _some_fusion(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if not value:
            raise ValueError("name at least one fusion")
        return value

    @model_validator(mode="after")
    def _snapshots_fit(self) -> Experiment:
        train = self.train
        fitting = {"snapshots": min(train.snapshots, train.epochs - 1), "tail": train.tail if self.trains else None}
        if fitting != {"snapshots": train.snapshots, "tail": train.tail}:
            object.__setattr__(self, "train", train.model_copy(update=fitting))
        return self

    @property
    def trains(self) -> bool:
        """Whether clients train a network; without a loss term they only measure statistics."""
        return any(self.objective.terms.values())

    @property
    def epochs(self) -> int:
        return self.train.epochs if self.trains else 0

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def training_digest(self) -> str:
        """Identifies what the uploads depend on: not the fusions, nor where and how fast clients run.

        What is absent (None, empty) does not count, so a new option that is off leaves old runs their name; the
        first arithmetic counts as absent.
        """
        code = self.code.model_dump(mode="json")
        if code["arithmetic"] == 1:
            code["arithmetic"] = None
        return digest_of(_present(self._settings() | {"code": code}))

    def settings_digest(self) -> str:
        """The same without the code: what the user has chosen."""
        return digest_of(_present(self._settings()))

    def _settings(self) -> dict[str, Any]:
        content = self.model_dump(mode="json", exclude={"fusions", "engine", "workers", "code"})
        content["train"].pop("checkpoint_seconds")
        if content["backbone"] is not None:  # the digest counts, wherever its file is
            content["backbone"].pop("weights", None)
        return content

    def partition_digest(self) -> str:
        """Identifies who owns what; shared by all methods that are compared."""
        absent = {key for key in ("public", "pixels", "skip_damaged", "patients") if getattr(self.data, key) is None}
        quiet = {key for key in ("label_noise", "noisy_clients") if getattr(self.partition, key) is None}
        return digest_of([self.data.model_dump(exclude=absent), self.partition.model_dump(exclude=quiet), self.seed])


def _present(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {key: _present(item) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item not in (None, {}, [])}
