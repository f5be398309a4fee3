"""Images and labels in memory, and the pixel convention that training, fusion and prediction share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from oneflare.core.config import LARGEST_SIDE, Pixels
from oneflare.core.registry import one_line
from oneflare.core.seeds import torch_generator
from oneflare.data.patients import held_out_rows
from oneflare.errors import ConfigError, DataError, did_you_mean

GREY_STATISTICS = ((0.5,), (0.25,))
EIGHT_BITS = Pixels()
"""the rule that needs no agreement"""
Copies = Literal["none", "mirror"]
COLOUR_STATISTICS = ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


@dataclass(frozen=True)
class Crop:
    """Cuts a square out of an image's middle: its shorter side becomes size / part pixels, of which size are kept."""

    part: float
    """of the shorter side that is kept, above 0 and at most 1"""
    resample: Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class BackboneTerms:
    """Which frozen network turns images into features; everybody has it, and nobody uploads it."""

    name: str
    digest: str
    """SHA-256 of its weights"""
    image: ImageSpec
    """what it is fed"""
    copies: Copies = "none"
    """what else of an image it is fed: mirror, the mirror image; the features are then the mean over both"""
    tune: str | None = None
    """the module from which on clients train it; features are then what that module is fed. None: all is frozen"""

    def to_dict(self) -> dict[str, Any]:
        content = {"name": self.name, "digest": self.digest, "image": self.image.to_dict()}
        chosen = {"copies": None if self.copies == "none" else self.copies, "tune": self.tune}
        return content | {key: value for key, value in chosen.items() if value is not None}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> BackboneTerms:
        tune = None if value.get("tune") is None else str(value["tune"])
        image = ImageSpec.from_dict(value["image"])
        return cls(str(value["name"]), str(value["digest"]), image, value.get("copies", "none"), tune)


@dataclass(frozen=True)
class ImageSpec:
    """What a network is fed: `(channels, size, size)`, pixels in [0, 1] shifted and scaled by fixed constants.

    The constants are agreed beforehand, never measured on anybody's data, so nothing leaks and train equals test.
    Behind a backbone, a network is fed features: images of one pixel with as many channels as there are features,
    without constants.
    """

    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pixels: Pixels | None = EIGHT_BITS
    """what the numbers in image files mean; None for models from before there was such a rule, whose images are
    decoded as they were then"""
    crop: Crop | None = None
    """how an image becomes a square; None: it is squeezed"""
    backbone: BackboneTerms | None = None
    """what computes the features that the network is fed; None: it is fed pixels"""

    @classmethod
    def of_features(cls, dim: int, backbone: BackboneTerms) -> ImageSpec:
        return cls(dim, 1, (), (), backbone=backbone)

    @property
    def decoded(self) -> ImageSpec:
        """What image files are decoded to: this, or what the backbone is fed."""
        return self if self.backbone is None else self.backbone.image

    @classmethod
    def default(cls, channels: int, size: int, pixels: Pixels | None = None) -> ImageSpec:
        mean, std = GREY_STATISTICS if channels == 1 else COLOUR_STATISTICS
        return cls(channels, size, mean, std, pixels or EIGHT_BITS)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> ImageSpec:
        try:
            pixels = Pixels.model_validate(value.get("pixels", {}))
        except ValidationError as error:
            raise TypeError(one_line(error, Pixels, "pixels")) from None
        crop = None if value.get("crop") is None else Crop(float(value["crop"]["part"]), value["crop"]["resample"])
        backbone = None if value.get("backbone") is None else BackboneTerms.from_dict(value["backbone"])
        mean, std = tuple(value["mean"]), tuple(value["std"])
        return cls(int(value["channels"]), int(value["size"]), mean, std, pixels, crop, backbone)

    def to_dict(self) -> dict[str, Any]:
        """What members agree on. The default rule for pixels is left out, so older terms keep their digest."""
        content: dict[str, Any] = {"channels": self.channels, "size": self.size}
        content |= {"mean": list(self.mean), "std": list(self.std)}
        if self.crop is not None:
            content["crop"] = asdict(self.crop)
        if self.backbone is not None:
            content["backbone"] = self.backbone.to_dict()
        if self.pixels is None or self.pixels == EIGHT_BITS:
            return content
        return content | {"pixels": self.pixels.model_dump(mode="json", exclude_none=True)}


class Split(NamedTuple):
    """images: `(n, channels, size, size)`, uint8 or float32 in [0, 1]; labels: `(n,)` int64.

    patients: `(n,)` int64, where it is known whose images they are; the numbers mean nothing elsewhere
    """

    images: Tensor
    labels: Tensor
    patients: Tensor | None = None

    def take(self, indices: Tensor) -> Split:
        patients = None if self.patients is None else self.patients[indices]
        return Split(self.images[indices], self.labels[indices], patients)


@dataclass(frozen=True)
class Dataset:
    """Training and test images of one task, with the names of its classes."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    image: ImageSpec
    flip: bool
    """Whether a mirrored image keeps its label (false for digits)."""
    public: Split | None = None
    """Images that belong to nobody; `train` does not hold them."""
    notes: tuple[str, ...] = ()
    """What was done to the images as they were read, in whole sentences."""
    owners: tuple[np.ndarray[Any, Any], ...] | None = None
    """The rows of `train` that each client owns, where the data come with owners; else a partition divides them."""

    def subset(self, train_size: int | None, test_size: int | None, seed: int) -> Dataset:
        """Seeded subsets, the same for every run with this data seed; of data without owners."""
        if self.owners is not None:
            raise DataError("images that have owners cannot be drawn from; draw from each client's images instead")
        return replace(
            self,
            train=self.train.take(draw_rows(len(self.train.labels), train_size, seed, "train")),
            test=self.test.take(draw_rows(len(self.test.labels), test_size, seed, "test")),
        )

    def set_aside(self, public: int | None, seed: int) -> Dataset:
        """A seeded public split of this many images, taken out of the training images before anybody owns them."""
        if public is None or self.public is not None:
            return self
        if self.owners is not None:
            raise ConfigError("data.public: images that have owners cannot be set aside; give a Dataset with `public`")
        available = len(self.train.labels)
        if public >= available:
            raise DataError(f"data.public={public} leaves none of the {available} training images; set aside fewer")
        order = torch.randperm(available, generator=torch_generator(seed, "public"))
        rest, taken = order[public:].sort().values, order[:public].sort().values
        return replace(self, train=self.train.take(rest), public=self.train.take(taken))


@dataclass(frozen=True)
class ClientData:
    """What one client owns."""

    images: Tensor
    labels: Tensor
    counts: Tensor
    """`(C,)` samples of each class"""
    patients: Tensor | None = None
    """`(n,)` whose image each is, in numbers, where that is known"""

    @classmethod
    def of(cls, split: Split, classes: int) -> ClientData:
        counts = torch.bincount(split.labels, minlength=classes)
        return cls(split.images, split.labels, counts, split.patients)

    def take(self, rows: Tensor) -> ClientData:
        return ClientData.of(Split(self.images, self.labels, self.patients).take(rows), len(self.counts))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        """how many it has seen"""
        return int((self.counts > 0).sum())


def draw_rows(available: int, size: int | None, seed: int, purpose: str) -> Tensor:
    """Which rows a seeded subset keeps, in their old order."""
    if size is None or size == available:
        return torch.arange(available)
    if size > available:
        raise DataError(
            f"data.{purpose}_size={size} is more than the {available} {purpose} images there are; "
            f"set data.{purpose}_size={available} or less, or point ONEFLARE_DATA at the whole data set"
        )
    return torch.randperm(available, generator=torch_generator(seed, "subset", purpose))[:size].sort().values


def prepare(images: Tensor, spec: ImageSpec) -> Tensor:
    """Stored pixels -> network input, the same for training and prediction. `(n, c, h, w)` float32."""
    return normalise(to_unit(images), spec)


def to_unit(images: Tensor) -> Tensor:
    return images.float().div_(255.0) if images.dtype == torch.uint8 else images.float()


def normalise(images: Tensor, spec: ImageSpec) -> Tensor:
    if spec.backbone is not None:
        return images
    mean = torch.tensor(spec.mean).to(images.device).view(1, -1, 1, 1)
    std = torch.tensor(spec.std).to(images.device).view(1, -1, 1, 1)
    return (images - mean) / std


def from_arrays(
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    *,
    classes: Sequence[str] | None = None,
    flip: bool = False,
    test_fraction: float = 0.2,
    name: str = "arrays",
) -> Dataset:
    """A data set from arrays: images `(n, h, w)`, `(n, h, w, c)` or `(n, c, h, w)`, uint8 or floats in [0, 1].

    Labels are whole numbers from 0 to C-1, or class names. Names count in the order of `classes`, or else sorted.
    """
    given = [np.asarray(labels) for _, labels in (train, *((test,) if test is not None else ()))]
    if any(_are_names(labels) for labels in given):
        given, classes = _numbered(given, classes)
    split = _split(train[0], given[0])
    held_out = None if test is None else _split(test[0], given[1])
    lowest, highest = (int(edge(labels)) for edge, labels in ((np.min, np.hstack(given)), (np.max, np.hstack(given))))
    if lowest >= 1 and (classes is None or highest == len(classes)):
        raise DataError(
            f"labels go from {lowest} to {highest}, but classes count from 0, so class 0 would be empty; give "
            f"labels - {lowest}, or name every class with from_arrays(..., classes=[...])"
        )
    names = tuple(classes) if classes is not None else tuple(str(c) for c in range(max(highest + 1, 2)))
    if highest >= len(names):
        raise DataError(f"label {highest} has no name among the {len(names)} classes; name every class")
    if held_out is None:
        split, held_out = hold_out(split, test_fraction)
    if split.images.shape[1:] != held_out.images.shape[1:]:
        raise DataError(f"train images are {tuple(split.images.shape[1:])}, test {tuple(held_out.images.shape[1:])}")
    channels, size = split.images.shape[1], split.images.shape[2]
    return Dataset(name, split, held_out, names, ImageSpec.default(channels, size), flip)


def _are_names(labels: np.ndarray[Any, Any]) -> bool:
    if labels.dtype.kind == "O" and not all(isinstance(label, str | int | np.integer) for label in labels.flat):
        raise DataError("labels must be whole numbers from 0 to C-1, or class names")
    return labels.dtype.kind in "UO"


def _numbered(
    given: list[np.ndarray[Any, Any]], classes: Sequence[str] | None
) -> tuple[list[np.ndarray[Any, Any]], Sequence[str]]:
    """Class names as numbers."""
    for label in (label for labels in given for label in labels.flat):
        if not isinstance(label, str):
            raise DataError(f"some labels are class names, but {label!r:.40} is not; give all of them as names")
    found = sorted({str(label) for labels in given for label in labels.flat})
    names = found if classes is None else list(classes)
    for label in found:
        if label not in names:
            raise DataError(f"label '{label:.80}' is not among the classes{did_you_mean(label, names)}")
    numbers = {label: number for number, label in enumerate(names)}
    return [np.vectorize(numbers.__getitem__, otypes=[np.int64])(labels) for labels in given], names


def hold_out(split: Split, fraction: float, seed: int = 0) -> tuple[Split, Split]:
    """A fixed split into training and test images: class by class, or by whole patients where they are known."""
    generator = torch_generator(seed, "hold-out")
    if split.patients is not None:
        test = held_out_rows(split.labels, split.patients, fraction, generator)
    else:
        test = torch.zeros(len(split.labels), dtype=torch.bool)
        for label in split.labels.unique():
            members = (split.labels == label).nonzero().squeeze(1)
            order = members[torch.randperm(len(members), generator=generator)]
            test[order[: round(len(members) * fraction)]] = True
    if not bool(test.any()) or bool(test.all()):
        whose, remedy = "", "bring a test part of your own"
        if split.patients is not None:
            whose = f" of {len(split.patients.unique())} patients"
            remedy += ", or set data.patients=false if these are not patients"
        raise DataError(
            f"{len(split.labels)} images{whose} are too few to hold out a {fraction:.0%} test part; {remedy}"
        )
    return split.take((~test).nonzero().squeeze(1)), split.take(test.nonzero().squeeze(1))


def _split(images: Any, labels: Any) -> Split:
    x = torch.as_tensor(np.asarray(images))
    y = torch.as_tensor(np.asarray(labels))
    if x.ndim == 3:
        x = x.unsqueeze(1)
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[1] not in (1, 3) or x.shape[2] != x.shape[3]:
        raise DataError(
            f"images of shape {tuple(x.shape)} do not fit; give (n, h, w), (n, h, w, c) or (n, c, h, w) "
            "with h = w and 1 or 3 channels"
        )
    if not 8 <= x.shape[2] <= LARGEST_SIDE:
        raise DataError(f"images of {x.shape[2]} pixels do not fit; resize them to between 8 and {LARGEST_SIDE}")
    if y.ndim != 1 or len(y) != len(x) or len(y) == 0:
        raise DataError(f"{len(x)} images but labels of shape {tuple(y.shape)}; give one label per image")
    if y.is_floating_point() or int(y.min()) < 0:
        raise DataError("labels must be whole numbers from 0 to C-1, or class names")
    if x.dtype != torch.uint8:
        x = x.float()
        if not bool(torch.isfinite(x).all()) or float(x.min()) < 0 or float(x.max()) > 1:
            raise DataError("float images must be finite and lie in [0, 1]; divide by their largest value")
    return Split(x.contiguous(), y.long())
