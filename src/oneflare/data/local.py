"""A member's own images against the terms of its federation: class folders, or parquet with image bytes and labels."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneflare.data.dataset import ImageSpec, Split
from oneflare.data.sources import IMAGE_SUFFIXES, decode
from oneflare.errors import DataError, did_you_mean

BLOCK = 1024
"""encoded images in memory at a time"""
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "class", "fine_label")


@dataclass(frozen=True)
class LocalData:
    """Images that fit the terms, and what had to be done to make them fit."""

    split: Split
    notes: tuple[str, ...]
    """in plain words, for whoever owns the data"""


@dataclass
class _Fit:
    """How the images differ from what the network is fed."""

    image: ImageSpec
    images: int = 0
    smaller: int = 0
    oblong: int = 0
    colour: int = 0
    grey: int = 0

    def look(self, content: bytes) -> None:
        from PIL import Image

        self.images += 1
        try:
            with Image.open(io.BytesIO(content)) as image:
                (width, height), mode = image.size, image.mode
        except Exception:  # foreign bytes; decoding will name them
            return
        self.smaller += min(width, height) < self.image.size
        self.oblong += width != height
        is_grey = mode in ("1", "L", "LA", "I", "I;16", "F")
        self.colour += self.image.channels == 1 and not is_grey
        self.grey += self.image.channels == 3 and is_grey

    def notes(self) -> Iterator[str]:
        size = self.image.size
        if self.smaller:
            yield f"{self.smaller} of {self.images} images are smaller than {size}x{size} and were enlarged"
        if self.oblong:
            yield f"{self.oblong} of {self.images} images are not square and were squeezed; crop them if that matters"
        if self.colour:
            yield f"{self.colour} of {self.images} images are in colour and were turned grey"
        if self.grey:
            yield f"{self.grey} of {self.images} images are grey and were given three equal channels"


def read_local(
    path: Path,
    classes: Sequence[str],
    image: ImageSpec,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
) -> LocalData:
    """Images and labels of a class folder, a parquet file, or a folder of parquet files."""
    if not path.exists():
        raise DataError(f"no data at {path}; give a folder with one folder per class, or a parquet file")
    if path.is_file():
        return _parquet([path], classes, image, image_column, label_column)
    tables = sorted(path.glob("*.parquet"))
    if tables:
        return _parquet(tables, classes, image, image_column, label_column)
    return _folder(path, classes, image)


def _folder(root: Path, classes: Sequence[str], image: ImageSpec) -> LocalData:
    entries = sorted(entry for entry in root.iterdir() if entry.name[0] != ".")
    for entry in entries:
        if entry.is_dir() and entry.name not in classes:
            raise DataError(
                f"{entry} is not a class of this federation{did_you_mean(entry.name, classes)}; "
                "rename the folder, or give the one that holds the class folders"
            )
    files: list[tuple[Path, int]] = []
    strange = sum(entry.is_file() for entry in entries)
    for label, name in enumerate(classes):
        for path in sorted((root / name).rglob("*")) if (root / name).is_dir() else ():
            if path.is_file() and path.name[0] != ".":
                if path.suffix.lower() in IMAGE_SUFFIXES:
                    files.append((path, label))
                else:
                    strange += 1
    if not files:
        raise DataError(f"no images below {root}; expected {root}/CLASS/*.png (or jpg, bmp, webp, tif)")
    fit = _Fit(image)

    def blocks() -> Iterator[tuple[list[bytes], list[str]]]:
        for start in range(0, len(files), BLOCK):
            paths = [path for path, _ in files[start : start + BLOCK]]
            yield [_bytes(path) for path in paths], [str(path) for path in paths]

    images = _decode(blocks(), image, fit)
    notes = [f"{strange} files are not images in a class folder and were left out"] if strange else []
    return LocalData(Split(images, torch.tensor([label for _, label in files])), (*notes, *fit.notes()))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read image {path}: {error.strerror}") from None


def _decode(blocks: Iterator[tuple[list[bytes], list[str]]], image: ImageSpec, fit: _Fit) -> Tensor:
    parts = []
    for contents, names in blocks:
        for content in contents:
            fit.look(content)
        parts.append(decode(contents, names, image.size, image.channels))
    return torch.cat(parts)


def _parquet(
    files: Sequence[Path],
    classes: Sequence[str],
    image: ImageSpec,
    image_column: str | None,
    label_column: str | None,
) -> LocalData:
    import pyarrow as pa
    import pyarrow.parquet as pq

    fit = _Fit(image)
    labels: list[int] = []
    parts: list[Tensor] = []
    for file in files:
        try:
            table = pq.ParquetFile(file)
            schema = table.schema_arrow
            pixels = _column(file, schema, image_column, IMAGE_COLUMNS, "--image-column")
            target = _column(file, schema, label_column, LABEL_COLUMNS, "--label-column")
            names = _label_names(schema, target)
            row = 0
            for batch in table.iter_batches(BLOCK, columns=[pixels, target]):
                contents = _contents(file, batch.column(pixels), row)
                found = batch.column(target).to_pylist()
                labels += [_label(file, row + k, value, names, classes) for k, value in enumerate(found)]
                places = [f"{file} row {row + k}" for k in range(len(contents))]
                if contents:
                    parts.append(_decode(iter([(contents, places)]), image, fit))
                row += len(contents)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{file} is not a parquet file that can be read ({reason:.120})") from None
    if not labels:
        raise DataError(f"{files[0]} holds no rows; at least one image is needed")
    return LocalData(Split(torch.cat(parts), torch.tensor(labels)), tuple(fit.notes()))


def _column(file: Path, schema: Any, wanted: str | None, usual: Sequence[str], option: str) -> str:
    if wanted is not None:
        if wanted not in schema.names:
            raise DataError(f"{file} has no column '{wanted}'{did_you_mean(wanted, schema.names)}")
        return wanted
    for name in usual:
        if name in schema.names:
            return name
    raise DataError(f"{file} has no column {' or '.join(usual)}; name it with {option} ({', '.join(schema.names)})")


def _contents(file: Path, column: Any, row: int) -> list[bytes]:
    """Encoded images: a binary column, or the hub's struct of bytes and path."""
    import pyarrow as pa

    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.field("bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise DataError(f"{file}: the image column holds {column.type}, not the bytes of encoded images (png, jpg)")
    contents = column.to_pylist()
    for k, content in enumerate(contents):
        if content is None:
            raise DataError(f"{file} row {row + k} has no image; drop the row")
    return list(contents)


def _label_names(schema: Any, column: str) -> Sequence[str] | None:
    """Hub files carry the names of numbered classes in the schema's metadata."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    try:
        return list(json.loads(metadata)["info"]["features"][column]["names"]) if metadata else None
    except (KeyError, TypeError, ValueError):
        return None


def _label(file: Path, row: int, value: Any, names: Sequence[str] | None, classes: Sequence[str]) -> int:
    """A class by name; by number, it counts in the file's own names or else in the federation's order."""
    if isinstance(value, int) and not isinstance(value, bool):
        known = classes if names is None else names
        if not 0 <= value < len(known):
            raise DataError(f"{file} row {row}: label {value} is not between 0 and {len(known) - 1}")
        value = known[value]
    if not isinstance(value, str):
        raise DataError(f"{file} row {row}: label {value!r} is neither a class name nor its number")
    if value not in classes:
        raise DataError(
            f"{file} row {row}: '{value:.80}' is not a class of this federation{did_you_mean(value, classes)}"
        )
    return list(classes).index(value)


def class_table(labels: Tensor, classes: Sequence[str]) -> dict[str, int]:
    """Images of each class, in the federation's order."""
    found = Counter(labels.tolist())
    return {name: found.get(label, 0) for label, name in enumerate(classes)}
