"""Reads images as a backbone's features: each image goes through the backbone once, on all cores or on a GPU.

Images are decoded a few at a time and never held. Features that were computed before, in any run or federation of this
user, are found by the content of the image file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.core.seeds import torch_generator
from oneflare.data import Dataset, ImageSpec, load
from oneflare.data.images import Damaged, Decoded, ImageFiles, Source, Tally, decode_all
from oneflare.data.reading import PIXELS, Reader
from oneflare.data.sources import read_again
from oneflare.nn.backbones import frozen, input_spec
from oneflare.nn.hardware import choose_device, one_thread
from oneflare.simulation.engines import default_workers, map_tasks
from oneflare.simulation.feature_cache import FeatureCache, Kept

CHUNK = 128
"""images whose features are written together; a kill loses at most so many per worker"""
DECODED = 16
"""images that a worker holds as pixels at a time"""


@dataclass
class FeatureReader:
    """A reader of image files as features; see `oneflare.data.reading.Reader`."""

    backbone: Mapping[str, Any]
    """its pinned spec"""
    device: str = "cpu"
    workers: int = 1
    observer: Observer = field(default_factory=Observer)
    block: int = 1 << 20
    done: int = 0
    total: int = 0

    def image(self, default: ImageSpec, chosen: int | None, native: int | None = None) -> ImageSpec:
        return input_spec(self.backbone, default.pixels, chosen, native)

    def check(self, image: ImageSpec) -> None:
        """Refuse a backbone whose weights are missing or others than was agreed, before any work."""
        assert image.backbone is not None
        frozen(image.backbone, self.device, self.backbone.get("weights"))

    def read(
        self, files: ImageFiles, image: ImageSpec, tally: Tally | None = None
    ) -> tuple[torch.Tensor, dict[int, Damaged]]:
        """Features `(n, D, 1, 1)` of the images that can be used, in their order, and the others by row."""
        with one_thread():
            self.check(image)
            cache = FeatureCache.of(image, refuse_constant=files.refuse_constant)
            digests = [_digest(source) for source in files.sources]
            damaged = self._compute(_Work(files, digests, image, cache))
            good = [digest for row, digest in enumerate(digests) if row not in damaged]
            features, kept = cache.read(good, image.channels)
        if tally is not None:
            nothing = torch.empty(0, dtype=torch.uint8)
            for one in kept:
                tally.add(one.as_decoded(nothing))
        return features, damaged

    def _compute(self, work: _Work) -> dict[int, Damaged]:
        """Have the features computed that are not there yet; returns the images that cannot be used, by row."""
        first = {digest: row for row, digest in reversed(list(enumerate(work.digests)))}
        missing = sorted(row for digest, row in first.items() if digest not in work.cache.places)
        self.total += len(missing)
        if missing:
            there = len(work.files.sources) - len(missing)
            found = f" ({there} were found in {work.cache.folder})" if there else ""
            self.observer.stage(f"computing features of {len(missing)} images by {self.backbone['name']}{found}")
            self.observer.features(self.done, self.total)
        refused: dict[bytes, str] = {}

        def on_result(chunk: _Chunk) -> None:
            if chunk.name is not None:
                work.cache.enter(chunk.name)
            refused.update({work.digests[row]: reason for row, reason in chunk.refused.items()})
            self.done += chunk.images
            self.observer.features(self.done, self.total)

        chunk = max(1, min(CHUNK, -(-len(missing) // max(1, self.workers))))  # few images are divided over all workers
        tasks = [missing[start : start + chunk] for start in range(0, len(missing), chunk)]
        task = partial(_extract, work, self.device, self.backbone.get("weights"))
        map_tasks(task, tasks, workers=self.workers, observer=self.observer, on_result=on_result)
        return {
            row: Damaged(work.files.names[row], refused[digest])
            for row, digest in enumerate(work.digests)
            if digest in refused
        }


@dataclass
class Rehearsal(FeatureReader):
    """Checks images as `FeatureReader` does and times the backbone on a few; the features that it gives are random."""

    block: int = 256
    seconds: float = 0.0
    """that computing all features would take"""

    def read(
        self, files: ImageFiles, image: ImageSpec, tally: Tally | None = None
    ) -> tuple[torch.Tensor, dict[int, Damaged]]:
        with one_thread():
            self.check(image)
            assert image.backbone is not None
            pixels, damaged = decode_all(files, image.decoded, tally)
            some, started = pixels[:DECODED], time.monotonic()
            frozen(image.backbone, self.device)(some)
            each = (time.monotonic() - started) / max(1, len(some))
            self.seconds += each * len(pixels) / self.workers
            generator = torch_generator(0, "rehearsal", self.done)
        self.done += len(pixels)
        return torch.rand(len(pixels), image.channels, 1, 1, generator=generator), damaged


@dataclass(frozen=True)
class _Work:
    files: ImageFiles
    digests: Sequence[bytes]
    image: ImageSpec
    cache: FeatureCache

    def some(self, rows: Sequence[int]) -> ImageFiles:
        """The files of these rows."""
        files = self.files
        return replace(files, sources=[files.sources[row] for row in rows], names=[files.names[row] for row in rows])


@dataclass(frozen=True)
class _Chunk:
    name: str | None
    """of the file in the cache; None where no image could be used"""
    images: int
    refused: dict[int, str]
    """rows of images that cannot be used, and why"""


class _Record(Tally):
    """Keeps what was done to every image instead of counting it."""

    def __init__(self, image: ImageSpec) -> None:
        super().__init__(image)
        self.kept: list[Kept] = []

    def add(self, decoded: Decoded) -> None:
        self.kept.append(Kept(decoded.size, decoded.grey, decoded.changes, decoded.kind))


def _extract(work: _Work, device: str, weights: str | None, rows: Sequence[int], observer: Observer) -> _Chunk:
    """Decode and send through the backbone some images, a few at a time, and keep their features."""
    del observer
    assert work.image.backbone is not None
    backbone = frozen(work.image.backbone, device, weights)
    record, refused = _Record(work.image.decoded), dict[int, str]()
    parts: list[torch.Tensor] = []
    for start in range(0, len(rows), DECODED):
        some = rows[start : start + DECODED]
        pixels, damaged = decode_all(work.some(some), work.image.decoded, record)
        refused.update({some[place]: one.reason for place, one in damaged.items()})
        parts.append(backbone(pixels))
    good = [work.digests[row] for row in rows if row not in refused]
    name = work.cache.write(good, torch.cat(parts), record.kept) if good else None
    return _Chunk(name, len(rows), refused)


def _digest(source: Source) -> bytes:
    """SHA-256 of an encoded image. A file that cannot be read gets that of its name; decoding says what is wrong."""
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
    except OSError:
        content = str(source).encode()
    return hashlib.sha256(content).digest()


def reader_for(experiment: Experiment, observer: Observer | None = None) -> Reader:
    """How the images of an experiment are read: as pixels, or as its backbone's features."""
    if experiment.backbone is None:
        return PIXELS
    device = choose_device(experiment.train.device).type
    workers = 1 if device != "cpu" else experiment.workers or default_workers()
    return FeatureReader(experiment.backbone, device, workers, observer or Observer())


def load_data(experiment: Experiment, observer: Observer | None = None, given: Dataset | None = None) -> Dataset:
    """The data of an experiment: images, or their features where it has a backbone.

    given: a data set of a Python session, instead of the one that the experiment names
    """
    reader = reader_for(experiment, observer)
    if given is not None:
        return read_again(given, experiment.data.image_size, reader)
    return load(experiment.data, reader)


def reader_of(
    image: ImageSpec, device: str = "cpu", observer: Observer | None = None, kind: type[FeatureReader] | None = None
) -> Reader:
    """How the images of a federation or of a finished model are read.

    image: what its networks are fed; kind: `Rehearsal` where features are not to be computed
    """
    if image.backbone is None:
        return PIXELS
    spec = {"name": image.backbone.name, "digest": image.backbone.digest, "dim": image.channels}
    return (kind or FeatureReader)(spec, device, default_workers() if device == "cpu" else 1, observer or Observer())
