"""Encoders: networks from a batch of images `(batch, c, h, w)` to features `(batch, d)`.

A registered encoder is a function or class `(channels, *, options)` that returns such a module. The weights that it
draws come from torch's global generator, which is seeded around the call, so every client starts from the same network.
The built-in ones take 1 or 3 channels and images of 8 to 64 pixels. Their size grows with `width`, and `dim` adds a
linear projection to d features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oneflare.core.registry import Registry
from oneflare.errors import ConfigError
from oneflare.nn.given import CUSTOM, given

ENCODERS: Registry[nn.Module] = Registry("encoder")
ON_FEATURES = ("mlp",)
"""encoders that take a backbone's features"""
BUILT_IN = ("conv4", "resnet8", "resnet18", *ON_FEATURES)
WIDEST = 1 << 16
"""features of an encoder"""
MOST_NUMBERS = 1 << 28
"""of a network, 1 GiB as float32: as much as an upload may hold"""


def build_encoder(spec: Mapping[str, Any], channels: int) -> nn.Module:
    """The encoder that `spec` names, with fresh weights, or a copy of the module that a Python caller gave.

    channels: of its images, 1 or 3
    """
    if spec["name"] == CUSTOM:
        return copy.deepcopy(given("encoder", spec.get("digest")))
    return ENCODERS.build(spec, channels)


def complete_encoder(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with every option checked; a name that does not exist is a ConfigError."""
    return dict(spec) if spec["name"] == CUSTOM else ENCODERS.complete(spec, "encoder")


def encoder_spec(spec: Mapping[str, Any], classes: int) -> dict[str, Any]:
    """The spec with `dim` decided: the encoder's own size, or a projection wide enough for C-1 directions."""
    complete = complete_encoder(spec)
    if "dim" in complete and complete["dim"] is None:
        own = native_dim(complete)
        complete["dim"] = own if own >= classes - 1 else 32 * ((classes + 31) // 32)
    return complete


def check_size(what: str, numbers: int, remedy: str) -> None:
    """Refuse what is larger than an upload may be, before memory is taken for it."""
    if numbers > MOST_NUMBERS:
        raise ConfigError(
            f"{what} would hold {numbers:,} numbers, more than the {MOST_NUMBERS:,} that fit into an upload; {remedy}"
        )


def _affordable(what: str, build: Callable[[], nn.Module]) -> nn.Module:
    """The module, once a copy without any memory has shown that it is not too large."""
    with torch.device("meta"):
        numbers = sum(parameter.numel() for parameter in build().parameters())
    check_size(what, numbers, "choose a smaller encoder.width or encoder.dim")
    return build()


def native_dim(spec: Mapping[str, Any]) -> int:
    """d without a projection; encoders from elsewhere are asked."""
    per_width = {"conv4": 4, "resnet8": 4, "resnet18": 8, "mlp": 1}
    if spec["name"] in per_width:
        return int(spec["width"]) * per_width[spec["name"]]
    return feature_dim(build_encoder(spec, 3), 3, 32)


class Projecting(nn.Module):
    """An encoder f(x) = project(h(x)): its own features h, and a linear layer, or nothing, that brings them to d."""

    project: nn.Module

    def trunk(self, x: Tensor) -> Tensor:
        """h(x) `(batch, own d)`"""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.project(self.trunk(x))
        return features


class Features(NamedTuple):
    """What an encoder says of images."""

    own: Tensor
    """`(batch, own d)` h(x), before a projection that widens them; else the same as f"""
    projected: Tensor
    """`(batch, d)` f(x)"""

    def cpu(self) -> Features:
        """The same in the processor's memory; what was one tensor stays one."""
        own = self.own.cpu()
        return Features(own, own if self.projected is self.own else self.projected.cpu())

    @classmethod
    def together(cls, parts: Sequence[Features]) -> Features:
        """Those of several batches as one."""
        own = torch.cat([part.own for part in parts])
        same = all(part.projected is part.own for part in parts)
        return cls(own, own if same else torch.cat([part.projected for part in parts]))

    @classmethod
    def stacked(cls, parts: Sequence[Features]) -> Features:
        """Those of several encoders, `(N, batch, d)`."""
        own = torch.stack([part.own for part in parts])
        same = all(part.projected is part.own for part in parts)
        return cls(own, own if same else torch.stack([part.projected for part in parts]))


def widened(encoder: nn.Module) -> nn.Linear | None:
    """The projection of an encoder whose own features are fewer than d; None where it has none."""
    project = encoder.project if isinstance(encoder, Projecting) else None
    wide = isinstance(project, nn.Linear) and project.out_features > project.in_features
    return project if wide else None  # type: ignore[return-value]


def own_dim(encoder: nn.Module, dim: int) -> int:
    """How many features there are before a widening projection to `dim`."""
    project = widened(encoder)
    return dim if project is None else project.in_features


def both_features(encoder: nn.Module, images: Tensor) -> Features:
    """f(x), and h(x) where a projection widens it: d numbers that only own-d dimensions fill have no density."""
    if widened(encoder) is None:
        features = encoder(images).float()
        return Features(features, features)
    assert isinstance(encoder, Projecting)
    own = encoder.trunk(images)
    return Features(own.float(), encoder.project(own).float())


class Block(nn.Module):
    """Basic residual block (He et al. 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


class ResNet(Projecting):
    """3x3 stem, stages of basic blocks with doubling width, average pooling, optional projection.

    stem_stride: 2 halves the image at once, for a quarter of the cost; default 1
    """

    def __init__(
        self, channels: int, blocks: tuple[int, ...], width: int, dim: int | None, stem_stride: int | None
    ) -> None:
        super().__init__()
        if stem_stride not in (None, 1, 2):
            raise ConfigError(f"encoder.stem_stride: must be 1 or 2 (got {stem_stride})")
        self.stem = nn.Conv2d(channels, width, 3, stem_stride or 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        inputs = width
        for stage, number in enumerate(blocks):
            outputs = width * 2**stage
            for index in range(number):
                layers.append(Block(inputs, outputs, 2 if stage > 0 and index == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*layers)
        self.project = _projection(inputs, dim)

    def trunk(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.blocks(F.relu(self.norm(self.stem(x)), inplace=True)).mean((2, 3))
        return pooled


class Conv4(Projecting):
    """Four 3x3 convolutions with batch normalisation; the last three halve the image."""

    def __init__(self, channels: int, width: int, dim: int | None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for outputs, stride in ((width, 1), (width, 2), (2 * width, 2), (4 * width, 2)):
            layers += [
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            ]
            inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.project = _projection(inputs, dim)

    def trunk(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.layers(x).mean((2, 3))
        return pooled


class Perceptron(Projecting):
    """One hidden layer: h(x) = relu(A x' + b), with x' = (x - mean(x)) / std(x) over an image's own features."""

    def __init__(self, inputs: int, width: int, dim: int | None) -> None:
        super().__init__()
        self.inputs = inputs
        self.hidden = nn.Linear(inputs, width)
        self.project = _projection(width, dim)

    def trunk(self, x: Tensor) -> Tensor:
        return F.relu(self.hidden(F.layer_norm(x.flatten(1), (self.inputs,))))


def _projection(inputs: int, dim: int | None) -> nn.Module:
    if dim is not None and not 1 <= dim <= WIDEST:
        raise ConfigError(f"encoder.dim: must lie between 1 and {WIDEST} (got {dim})")
    return nn.Identity() if dim in (None, inputs) else nn.Linear(inputs, dim)


def _check_width(width: int) -> int:
    if not 1 <= width <= 1024:
        raise ConfigError(f"encoder.width: must lie between 1 and 1024 (got {width})")
    return width


@ENCODERS.register("conv4")
def conv4(channels: int, *, width: int = 16, dim: int | None = None) -> nn.Module:
    """four convolutions, d = 4 width"""
    return _affordable("encoder conv4", lambda: Conv4(channels, _check_width(width), dim))


@ENCODERS.register("resnet8")
def resnet8(channels: int, *, width: int = 16, dim: int | None = None, stem_stride: int | None = None) -> nn.Module:
    """three residual blocks, d = 4 width"""
    return _affordable("encoder resnet8", lambda: ResNet(channels, (1, 1, 1), _check_width(width), dim, stem_stride))


@ENCODERS.register("resnet18")
def resnet18(channels: int, *, width: int = 64, dim: int | None = None, stem_stride: int | None = None) -> nn.Module:
    """ResNet-18 with a 3x3 stem, d = 8 width (the log's encoder)"""
    return _affordable(
        "encoder resnet18", lambda: ResNet(channels, (2, 2, 2, 2), _check_width(width), dim, stem_stride)
    )


@ENCODERS.register("mlp")
def mlp(features: int, *, width: int = 256, dim: int | None = None) -> nn.Module:
    """one hidden layer on a backbone's features, d = width"""
    return _affordable("encoder mlp", lambda: Perceptron(features, _check_width(width), dim))


def feature_dim(encoder: nn.Module, channels: int, size: int) -> int:
    """d of any encoder, by asking it; says clearly when the module does not return `(batch, d)`."""
    was_training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            features = encoder(torch.zeros(2, channels, size, size))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the encoder does not take images of shape (batch, {channels}, {size}, {size}): "
            f"{str(error).splitlines()[0]}"
        ) from None
    finally:
        encoder.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"the encoder must return features of shape (batch, d), not {shape}")
    return features.shape[1]
