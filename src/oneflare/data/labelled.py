"""Lists labelled image files, decodes them in blocks, and sets aside what cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oneflare.data.dataset import ImageSpec, Split
from oneflare.data.images import KINDS, Damaged, ImageFiles, Source, Tally, is_image_file
from oneflare.data.patients import numbered
from oneflare.data.reading import PIXELS, Reader, read_all
from oneflare.data.store import ImageStore
from oneflare.errors import DataError

BLOCK = 1024
"""images that are decoded together"""
NAMED = 5
"""damaged images that an error names"""


class LabelledFile(NamedTuple):
    """An image that was found and not yet read."""

    path: Path
    label: int
    patient: str | None = None
    """whose image it is, as the table or the folder's name says; it is used to keep images together and is not kept"""


class Inventory(NamedTuple):
    """What was found, for whoever owns the images."""

    kinds: Mapping[str, int]
    """images by kind of file"""
    sizes: tuple[tuple[int, int], tuple[int, int]] | None
    """the smallest and the largest, width and height"""
    patients: int | None
    damaged: int

    def words(self) -> str:
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.kinds.items()) or "no image that can be used"
        patients = "no patients named" if self.patients is None else f"{self.patients} patients"
        sizes = ""
        if self.sizes is not None:
            least, most = (f"{width}x{height}" for width, height in self.sizes)
            sizes = f"; {least} pixels" if least == most else f"; {least} to {most} pixels"
        return f"found: {kinds}; {patients}{sizes}; {self.damaged} damaged"

    def to_dict(self) -> dict[str, Any]:
        sizes = None if self.sizes is None else [list(size) for size in self.sizes]
        return {"kinds": dict(self.kinds), "sizes": sizes, "patients": self.patients, "damaged": self.damaged}


class Problem(NamedTuple):
    """Something that is wrong with one row of a table."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class ListedProblems(DataError):
    """Several things that are wrong, every one of them with its reason; the message names the first few."""

    def __init__(self, summary: str, problems: Sequence[Damaged | Problem], found: Inventory | None = None) -> None:
        self.problems, self.summary, self.found = tuple(problems), summary, found
        more = f" and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        others = ", ".join(problem.name for problem in problems[1:NAMED])
        super().__init__(str(problems[0]) if len(problems) == 1 else f"{summary}; {problems[0]}; also {others}{more}")


class DamagedImages(ListedProblems):
    """Images that cannot be used."""


def class_files(root: Path, classes: Sequence[str]) -> tuple[list[LabelledFile], int]:
    """Images at any depth below root/CLASS with their labels, and how many other files are there.

    The folder below the class folder names the patient, unless there is only one such name.
    """
    files: list[LabelledFile] = []
    strange = 0
    for label, name in enumerate(classes):
        folder = root / name
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if is_image_file(path):
                places = path.relative_to(folder).parts
                files.append(LabelledFile(path, label, places[0] if len(places) > 1 else None))
            else:
                strange += path.is_file() and path.name[0] != "."
    if not files:
        raise DataError(f"no images below {root}; expected {root}/CLASS/*.png (or {KINDS}), or a table labels.csv")
    if len({file.patient for file in files} - {None}) <= 1:
        files = [file._replace(patient=None) for file in files]
    return files, strange


@dataclass(frozen=True)
class LabelledImages:
    """Labelled files that are decoded when they are asked for; nothing is held. torch's DataLoader takes it."""

    files: Sequence[LabelledFile]
    image: ImageSpec

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        """One image `(channels, size, size)` uint8 and its label; one that cannot be used is a DataError."""
        file = self.files[row]
        return read_all([file.path], [str(file.path)], self.image)[0], file.label

    def blocks(self, size: int = BLOCK) -> Iterator[tuple[list[LabelledFile], Tensor]]:
        """All images in blocks of at most `size`, `(n, channels, size, size)` uint8, with their files."""
        for start in range(0, len(self.files), size):
            block = list(self.files[start : start + size])
            yield block, read_all([file.path for file in block], [str(file.path) for file in block], self.image)


@dataclass
class Gathering:
    """Images and labels as they are decoded, block by block. A constant image shows nothing and counts as damaged."""

    image: ImageSpec
    classes: Sequence[str]
    reader: Reader = PIXELS
    tally: Tally = field(init=False)
    damaged: list[Damaged] = field(default_factory=list)
    images: ImageStore = field(default_factory=ImageStore)
    labels: list[int] = field(default_factory=list)
    patients: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tally = Tally(self.image.decoded)

    def add(
        self,
        sources: Sequence[Source],
        names: Sequence[str],
        labels: Sequence[int],
        patients: Sequence[str | None] | None = None,
    ) -> None:
        images, damaged = self.reader.read(ImageFiles(sources, names, refuse_constant=True), self.image, self.tally)
        kept = [row for row in range(len(labels)) if row not in damaged]
        self.images.add(images)
        self.labels += [labels[row] for row in kept]
        self.patients += [None if patients is None else patients[row] for row in kept]
        self.damaged += [damaged[row] for row in sorted(damaged)]

    def add_files(self, files: Sequence[LabelledFile]) -> None:
        for start in range(0, len(files), self.reader.block):
            paths, labels, patients = zip(*files[start : start + self.reader.block], strict=True)
            self.add(paths, [str(path) for path in paths], labels, patients)

    def split(self, *, skip_damaged: bool = False) -> Split:
        """The images that can be used; without `skip_damaged`, all of them must be."""
        total = len(self.damaged) + len(self.labels)
        if self.damaged and (not skip_damaged or not self.labels):
            summary = f"{len(self.damaged)} of {total} images cannot be used"
            raise DamagedImages(summary, self.damaged, self.inventory())
        split = Split(self.images.tensor(), torch.tensor(self.labels), numbered(self.patients))
        for label, name in enumerate(self.classes):
            members = (split.labels == label).nonzero().flatten()
            if len(members) > 1 and _all_equal(split.images, members):
                raise DataError(
                    f"all {len(members)} images of class '{name}' are equal once they are {self.tally.image.size}x"
                    f"{self.tally.image.size}; look at the files, and at the pixels rule if they differ"
                )
        return split

    def inventory(self) -> Inventory:
        patients = numbered(self.patients)
        number = None if patients is None else len(patients.unique())
        return Inventory(self.tally.kinds, self.tally.span(), number, len(self.damaged))

    def notes(self) -> tuple[str, ...]:
        total = len(self.damaged) + len(self.labels)
        left_out = (left_out_note(len(self.damaged), total),) if self.damaged else ()
        return (*left_out, *self.tally.notes())


def _all_equal(images: Tensor, rows: Tensor) -> bool:
    """Whether some images are all the same; they are looked at in blocks, and mostly the first two decide."""
    first = images[rows[0]]
    return all(bool((images[block] == first).all()) for block in (rows[1:2], *rows[2:].split(BLOCK)))


def left_out_note(damaged: int, total: int | None) -> str:
    """Without the total, no number is told at all."""
    number = "some" if total is None else f"{damaged} of {total}"
    return f"{number} images could not be used and were left out"
