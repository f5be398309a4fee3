"""EfficientNet-Lite (Tan and Le 2019; the Lite variant has no attention and ReLU6), as a frozen encoder of photographs.

Batch normalisation in evaluation mode is an affine map of a convolution's output, so it is folded into the weights:

    w' = w g / sqrt(v + eps)        b' = b - m g / sqrt(v + eps)

with scale g, shift b, running mean m and running variance v. Nothing is left in the network that training could move.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-3
STEM, HEAD = 32, 1280


class Stage(NamedTuple):
    """Blocks that follow each other with the same shape; the first one has the stride."""

    repeats: int
    kernel: int
    stride: int
    expansion: int
    outputs: int


LITE0 = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)


class SameConv(nn.Conv2d):
    """A convolution whose output has ceil(side / stride) pixels; an odd pixel of padding lies right and below."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = self._padding(x.shape[3])
        above, below = self._padding(x.shape[2])
        if (left, above) == (right, below):
            return F.conv2d(x, self.weight, self.bias, self.stride, (above, left), groups=self.groups)
        return F.conv2d(F.pad(x, (left, right, above, below)), self.weight, self.bias, self.stride, groups=self.groups)

    def _padding(self, side: int) -> tuple[int, int]:
        kernel, stride = self.kernel_size[0], self.stride[0]
        whole = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
        return whole // 2, whole - whole // 2


class InvertedBottleneck(nn.Module):
    """Mobile inverted bottleneck: expand, filter every channel by itself, project, and add the input if it fits."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        wide = inputs * stage.expansion
        self.expand = SameConv(inputs, wide, 1) if stage.expansion > 1 else None
        self.depthwise = SameConv(wide, wide, stage.kernel, stride, groups=wide)
        self.project = SameConv(wide, stage.outputs, 1)
        self.adds = stride == 1 and inputs == stage.outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        y = self.project(F.relu6(self.depthwise(y), inplace=True))
        result: Tensor = x + y if self.adds else y
        return result


class EfficientNetLite(nn.Module):
    """Images `(n, 3, h, w)` -> the mean over all places of the last convolution's channels, `(n, 1280)`."""

    def __init__(self, stages: tuple[Stage, ...] = LITE0) -> None:
        super().__init__()
        self.stem = SameConv(3, STEM, 3, 2)
        blocks, inputs = [], STEM
        for stage in stages:
            for number in range(stage.repeats):
                blocks.append(InvertedBottleneck(inputs, stage, stage.stride if number == 0 else 1))
                inputs = stage.outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = SameConv(inputs, HEAD, 1)

    def forward(self, images: Tensor) -> Tensor:
        y = self.blocks(F.relu6(self.stem(images), inplace=True))
        return F.relu6(self.head(y), inplace=True).mean((2, 3))


def folded(network: EfficientNetLite, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network's weights from a published state dictionary, whose convolutions are followed by normalisations.

    A name that is missing raises a KeyError, and a shape that does not fit fails when the weights are loaded.
    """
    result: dict[str, Tensor] = {}
    for own, (convolution, norm) in _published_names(network).items():
        scale = state[f"{norm}.weight"] / (state[f"{norm}.running_var"] + EPSILON).sqrt()
        result[f"{own}.weight"] = state[f"{convolution}.weight"] * scale[:, None, None, None]
        result[f"{own}.bias"] = state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * scale
    return result


def _published_names(network: EfficientNetLite) -> dict[str, tuple[str, str]]:
    """Our convolutions -> the published names of the convolution and of its normalisation."""
    names = {"stem": ("_conv_stem", "_bn0"), "head": ("_conv_head", "_bn1")}
    parts = {"expand": ("_expand_conv", "_bn0"), "depthwise": ("_depthwise_conv", "_bn1")}
    parts["project"] = ("_project_conv", "_bn2")
    for index, block in enumerate(network.blocks):
        for own, published in parts.items():
            if getattr(block, own) is not None:
                convolution, norm = (f"_blocks.{index}.{name}" for name in published)
                names[f"blocks.{index}.{own}"] = (convolution, norm)
    return names


def efficientnet_lite(state: Mapping[str, Tensor], stages: tuple[Stage, ...] = LITE0) -> EfficientNetLite:
    """The frozen network with published weights."""
    network = EfficientNetLite(stages)
    network.load_state_dict(folded(network, state))
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.eval()
    return network
