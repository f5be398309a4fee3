"""Reads folders of labelled image files, and sets aside what cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from oneflare.data.dataset import ImageSpec, Split
from oneflare.data.images import IMAGE_SUFFIXES, Damaged, Source, Tally
from oneflare.data.reading import PIXELS, Reader
from oneflare.errors import DataError

BLOCK = 1024
"""images that are decoded together"""
NAMED = 5
"""damaged images that an error names"""


class DamagedImages(DataError):
    """Images that cannot be used, every one of them with its reason."""

    def __init__(self, damaged: Sequence[Damaged], images: int) -> None:
        self.damaged = tuple(damaged)
        more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
        others = ", ".join(name for name, _ in damaged[1:NAMED])
        self.summary = f"{len(damaged)} of {images} images cannot be used"
        super().__init__(str(damaged[0]) if len(damaged) == 1 else f"{self.summary}; {damaged[0]}; also {others}{more}")


def class_files(root: Path, classes: Sequence[str]) -> tuple[list[tuple[Path, int]], int]:
    """Images at any depth below root/CLASS with their labels, and how many other files are there."""
    files: list[tuple[Path, int]] = []
    strange = 0
    for label, name in enumerate(classes):
        for path in sorted((root / name).rglob("*")) if (root / name).is_dir() else ():
            if path.is_file() and path.name[0] != ".":
                if path.suffix.lower() in IMAGE_SUFFIXES:
                    files.append((path, label))
                else:
                    strange += 1
    if not files:
        raise DataError(f"no images below {root}; expected {root}/CLASS/*.png (or jpg, bmp, webp, tif)")
    return files, strange


@dataclass
class Gathering:
    """Images and labels as they are decoded, block by block. A constant image shows nothing and counts as damaged."""

    image: ImageSpec
    classes: Sequence[str]
    reader: Reader = PIXELS
    tally: Tally = field(init=False)
    damaged: list[Damaged] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tally = Tally(self.image.decoded)

    def add(self, sources: Sequence[Source], names: Sequence[str], labels: Sequence[int]) -> None:
        images, damaged = self.reader.read(sources, names, self.image, self.tally, refuse_constant=True)
        self.parts.append(images)
        self.labels += [label for row, label in enumerate(labels) if row not in damaged]
        self.damaged += [damaged[row] for row in sorted(damaged)]

    def add_files(self, files: Sequence[tuple[Path, int]]) -> None:
        for start in range(0, len(files), self.reader.block):
            block = files[start : start + self.reader.block]
            paths = [path for path, _ in block]
            self.add(paths, [str(path) for path in paths], [label for _, label in block])

    def split(self, *, skip_damaged: bool = False) -> Split:
        """The images that can be used; without `skip_damaged`, all of them must be."""
        total = len(self.damaged) + len(self.labels)
        if self.damaged and (not skip_damaged or not self.labels):
            raise DamagedImages(self.damaged, total)
        split = Split(torch.cat(self.parts), torch.tensor(self.labels))
        for label, name in enumerate(self.classes):
            members = split.images[split.labels == label]
            if len(members) > 1 and bool((members == members[0]).all()):
                raise DataError(
                    f"all {len(members)} images of class '{name}' are equal once they are {self.tally.image.size}x"
                    f"{self.tally.image.size}; look at the files, and at the pixels rule if they differ"
                )
        return split

    def notes(self) -> tuple[str, ...]:
        total = len(self.damaged) + len(self.labels)
        left_out = (left_out_note(len(self.damaged), total),) if self.damaged else ()
        return (*left_out, *self.tally.notes())


def left_out_note(damaged: int, total: int | None) -> str:
    """Without the total, no number is told at all."""
    number = "some" if total is None else f"{damaged} of {total}"
    return f"{number} images could not be used and were left out"
