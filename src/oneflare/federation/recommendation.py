"""Which method a new federation should use: the best measured one for its privacy level, with the figures behind it.

`MEASURED` repeats figures of `results/`; a test compares them with those files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from oneflare.errors import ConfigError

Privacy = Literal["open", "masked", "private"]
EPSILON = 10.0
FEW_IMAGES = 1000
DECIDES = (
    "method",
    "encoder",
    "objective",
    "anchors",
    "controller",
    "analytic",
    "train",
    "epochs",
    "fusions",
    "recipe",
)
"""settings by which a user has decided on a method already"""


@dataclass(frozen=True)
class Measurement:
    """Accuracy in per cent of one method with one fusion, the mean over the seeds in its file.

    Most classes are with one member (alpha 0.05) except in the rows on privacy (alpha 0.5); the split does not change
    analytic figures."""

    data: str
    images: int
    method: str
    fusion: str
    accuracy: float
    deviation: float | None
    """standard deviation over the seeds, in points; None where there is one seed"""
    file: str
    """in `results/`"""


MEASURED = (
    Measurement("digits", 1438, "analytic", "analytic", 100.0, 0.0, "analytic/compared.json"),
    Measurement("digits", 1438, "fedavg", "density_ratio", 96.3, 1.1, "density/digits.json"),
    Measurement("digits", 1438, "flare", "density_ratio", 94.7, 2.5, "density/digits.json"),
    Measurement("svhn at 16 pixels", 10000, "analytic", "analytic", 84.6, 0.2, "analytic/compared.json"),
    Measurement("svhn at 16 pixels", 10000, "fafi", "density_ratio", 78.8, 2.2, "density/svhn_16.json"),
    Measurement("cifar10 at 16 pixels", 10000, "analytic", "analytic", 66.8, 0.2, "analytic/compared.json"),
    Measurement("cifar10 at 16 pixels", 10000, "fafi", "density_ratio", 51.0, 0.4, "density/cifar10_16.json"),
    Measurement("cifar10, backbone", 10000, "analytic", "analytic", 85.4, None, "photographs/cifar10.json"),
    Measurement("cifar10, backbone", 10000, "flare", "density_ratio", 77.9, 0.9, "photographs/cifar10.json"),
    Measurement("cifar10", 50000, "analytic", "analytic", 72.0, 0.1, "analytic/accuracy.json"),
    Measurement("cifar100", 50000, "analytic", "analytic", 43.1, 0.3, "analytic/accuracy.json"),
    Measurement("cifar10, epsilon 10, 12 filters", 50000, "analytic", "analytic", 45.2, 0.5, "analytic/privacy.json"),
    Measurement("cifar10, epsilon 3, 12 filters", 50000, "analytic", "analytic", 36.2, 2.4, "analytic/privacy.json"),
    Measurement("cifar10, exact, 12 filters", 50000, "analytic", "analytic", 60.9, 0.1, "analytic/privacy.json"),
)


@dataclass(frozen=True)
class Situation:
    """What is known of a federation before it starts."""

    classes: int
    size: int | None
    """side of the images in pixels; None: the backbone's own"""
    channels: int
    members: int = 0
    """0: not known yet"""
    images: int | None = None
    """images of a typical member; None: not known"""
    backbone: bool = False


@dataclass(frozen=True)
class Recommendation:
    """Settings for a new federation, and why."""

    settings: Mapping[str, Any]
    why: tuple[str, ...]
    """two lines"""
    warnings: tuple[str, ...] = field(default=())


def recommend(situation: Situation, privacy: str = "open") -> Recommendation:
    """The best measured method for a privacy level.

    open: the coordinator may read every member's sums. masked: it reads their total only. private: noise hides every
    single image from everybody who reads an upload.
    """
    if privacy not in get_args(Privacy):
        raise ConfigError(f"--privacy {privacy}: say {', '.join(get_args(Privacy))}")
    if privacy == "private":
        return _private(situation)
    upload = {"upload": {"masked": True}} if privacy == "masked" else {}
    first, second = _reasons(situation)
    if privacy == "masked":
        first = f"masked sums: you see the total of all members and no member's own, at the same accuracy. {first}"
    warnings = []
    if privacy == "masked" and 0 < situation.members < 3:
        warnings.append(
            "of two members whoever learns the total knows the other's sums; masked sums need three or more"
        )
    return Recommendation({"method": "analytic"} | upload, (first, second), tuple(warnings))


def _reasons(situation: Situation) -> tuple[str, str]:
    """The measured table in two lines, as far as it is about this situation."""
    if situation.backbone:
        return (
            "method analytic, because on a pretrained network's features it was best: cifar10 with 10,000 images "
            f"{_versus('cifar10, backbone')}",
            "It takes one pass over the images, no training, and the split over members does not change the model.",
        )
    rows = ", ".join(f"{data} {_versus(data)}" for data in ("digits", "svhn at 16 pixels", "cifar10 at 16 pixels"))
    first = f"method analytic, because it was best where most classes have one owner: {rows}"
    if situation.channels == 3 and (situation.size or 0) >= 32:
        with_backbone, without = _best("cifar10, backbone"), _best("cifar10")
        return first, (
            f"For photographs a pretrained network helps most: cifar10 {with_backbone:g} % with "
            f"backbone=efficientnet_lite0 and 10,000 images, {without:g} % without it and 50,000."
        )
    many = (
        f" With many classes it needs more images: cifar100 {_best('cifar100'):g} %." if situation.classes > 50 else ""
    )
    return (
        first,
        "It takes one pass over the images, no training, and minutes; the split over members is no loss." + many,
    )


def _private(situation: Situation) -> Recommendation:
    exact, ten, three = (_best(f"cifar10, {level}, 12 filters") for level in ("exact", "epsilon 10", "epsilon 3"))
    settings = {
        "method": "analytic",
        "upload": {"statistics_epsilon": EPSILON, "counts": "withheld"},
    } | ({} if situation.backbone else {"analytic": {"name": "random_conv", "filters": 12}})
    why = (
        f"method analytic with noise of epsilon {EPSILON:g} (delta 1e-5) for every image: the only method here that "
        "promises this",
        f"The price, measured on cifar10 with 50,000 images: {exact:g} % exact, {ten:g} % at epsilon 10, "
        f"{three:g} % at epsilon 3; upload.statistics_epsilon chooses.",
    )
    few = situation.images is not None and situation.images < FEW_IMAGES
    text = f"{situation.images} images at a member are few under noise: expect much less than with masked sums"
    return Recommendation(settings, why, (text,) if few else ())


def _best(data: str) -> float:
    return max(row.accuracy for row in MEASURED if row.data == data)


def _versus(data: str) -> str:
    """The best figure against the next."""
    first, second, *_ = sorted((row for row in MEASURED if row.data == data), key=lambda row: -row.accuracy)
    return f"{_told(first)} ({second.method} with {second.fusion} {_told(second)})"


def _told(row: Measurement) -> str:
    """`84.6 ± 0.2 %`, as far as there is more than one seed"""
    spread = "" if row.deviation is None else f" ± {row.deviation:g}"
    return f"{row.accuracy:g}{spread} %"


def undecided(settings: Mapping[str, Any]) -> bool:
    """Whether a user's settings leave the method open."""
    return not any(name in DECIDES for name in settings)
