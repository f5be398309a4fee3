"""The scales at which any study runs.

`smoke`: the embedded digits, seconds per cell. `small`: real images on two cores, about a minute per cell.
`decisive`: small real images and a training long enough to judge by, minutes per cell on one core; seeds are added
until a verdict is clear. `paper`: the log's own settings (ResNet-18, all images, batches of 512), for a GPU. The log's
rounds are checkpoints of one isolated training, so its rounds x local epochs are our epochs. Its split gave some images
to several clients; here every image has one owner at every scale (`partition.kind=dirichlet_overlap` on the command
line is the log's).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oneflare.core.layers import Layer, merge
from oneflare.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Scale:
    name: str
    summary: str
    """in words; `{epochs}` stands for what a plan's cells really train"""
    base: Layer
    by_data: Mapping[str, Layer] = field(default_factory=dict)
    """what one data set needs beside the base"""
    looks: tuple[int, ...] = (3,)
    """numbers of seeds at which verdicts are looked for; seeds are added up to the next while a claim is undecided"""

    def looks_until(self, seeds: int | None) -> tuple[int, ...]:
        """The looks; a number of seeds that a user asks for is the last of several, or the only one."""
        if seeds is None:
            return self.looks
        return (*(look for look in self.looks[:-1] if look < seeds), seeds)

    def layer(self, data: str, alpha: float, clients: int) -> dict[str, Any]:
        """The shared settings of all methods at one place."""
        place = {"data": {"name": data}, "partition": {"clients": clients, "alpha": alpha}}
        return merge(self.base, self.by_data.get(data, {}), place)


def _whole(train: int, test: int, **settings: Any) -> Layer:
    """All images of a data set, by number: a part of it must not pass for the whole."""
    return {"data": {"train_size": train, "test_size": test}, "train": settings}


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            "the embedded digits stand in for all data, a small network, {epochs}: to try things out, not to judge",
            {"encoder": {"name": "conv4", "width": 8}, "train": {"epochs": 6}},
        ),
        Scale(
            "small",
            "10,000 images (Tiny-ImageNet: 8,000 at 32 x 32), 2,000 test images, a strided ResNet-8, {epochs}",
            {
                "data": {"train_size": 10000, "test_size": 2000},
                "encoder": {"name": "resnet8", "width": 16, "stem_stride": 2},
                "train": {"epochs": 5},
            },
            {"tiny-imagenet": {"data": {"train_size": 8000, "image_size": 32}}},
        ),
        Scale(
            "decisive",
            "10,000 real images at 16 x 16, all test images, ResNet-8 of width 16, {epochs} in batches of {batch}",
            {
                "data": {"train_size": 10000, "image_size": 16},
                "encoder": {"name": "resnet8", "width": 16},
                "train": {"epochs": 25, "batch_size": 64, "snapshots": 0, "tail": 4},
                "upload": {"evidence": ["density", "moments", "class_means"]},
            },
            looks=(5, 10, 20),
        ),
        Scale(
            "paper",
            "all images, ResNet-18, batches of 512, the log's number of epochs",
            {
                "encoder": {"name": "resnet18", "width": 64},
                "train": {"batch_size": 512, "lr": 0.05, "momentum": 0.9, "clip": 1.0, "epochs": 50, "snapshots": 9},
            },
            {
                "cifar10": _whole(50000, 10000),
                "cifar100": _whole(50000, 10000, epochs=100),
                "svhn": _whole(73257, 26032),
                "tiny-imagenet": _whole(100000, 10000, epochs=100),
            },
        ),
    )
}


def find_scale(name: str) -> Scale:
    if name not in SCALES:
        raise ConfigError(f"--scale: unknown scale '{name}'{did_you_mean(name, SCALES)}")
    return SCALES[name]
