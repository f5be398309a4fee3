"""Reads a member's own images (class folders or parquet) and checks them against the terms of its federation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from oneflare.data.dataset import ImageSpec, Split
from oneflare.data.images import Damaged
from oneflare.data.labelled import BLOCK, Gathering, class_files
from oneflare.data.reading import PIXELS, Reader
from oneflare.errors import DataError, did_you_mean

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "class", "fine_label")


@dataclass(frozen=True)
class LocalData:
    """Images that fit the terms, and what had to be done to make them fit."""

    split: Split
    notes: tuple[str, ...]
    """in plain words, for whoever owns the data"""
    damaged: tuple[Damaged, ...] = ()
    """what was left out because it cannot be used"""


@dataclass(frozen=True)
class Columns:
    """Where a parquet file keeps images and labels; None: under one of the usual names."""

    image: str | None = None
    label: str | None = None


def read_local(
    path: Path,
    classes: Sequence[str],
    image: ImageSpec,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    skip_damaged: bool = False,
    reader: Reader = PIXELS,
) -> LocalData:
    """Images and labels of a class folder, a parquet file, or a folder of parquet files.

    Images that cannot be used are a `DamagedImages` error that knows all of them; with `skip_damaged` they are left
    out, and a note says how many.
    """
    if not path.exists():
        raise DataError(f"no data at {path}; give a folder with one folder per class, or a parquet file")
    gathering = Gathering(image, classes, reader)
    tables = [path] if path.is_file() else sorted(path.glob("*.parquet"))
    notes: list[str] = []
    if tables:
        _parquet(tables, gathering, Columns(image_column, label_column))
    else:
        strange = _folder(path, gathering)
        if strange:
            notes.append(f"{strange} files are not images in a class folder and were left out")
    split = gathering.split(skip_damaged=skip_damaged)
    return LocalData(split, (*notes, *gathering.notes()), tuple(gathering.damaged))


def _folder(root: Path, gathering: Gathering) -> int:
    """Gathers the images; returns how many other files there are."""
    classes = gathering.classes
    entries = sorted(entry for entry in root.iterdir() if entry.name[0] != ".")
    for entry in entries:
        if entry.is_dir() and entry.name not in classes:
            raise DataError(
                f"{entry} is not a class of this federation{did_you_mean(entry.name, classes)}; "
                "rename the folder, or give the one that holds the class folders"
            )
    files, strange = class_files(root, classes)
    gathering.add_files(files)
    return strange + sum(entry.is_file() for entry in entries)


def _parquet(files: Sequence[Path], gathering: Gathering, columns: Columns) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = 0
    for file in files:
        try:
            table = pq.ParquetFile(file)
            schema = table.schema_arrow
            pixels = _column(file, schema, columns.image, IMAGE_COLUMNS, "--image-column")
            target = _column(file, schema, columns.label, LABEL_COLUMNS, "--label-column")
            names = _label_names(schema, target)
            row = 0
            for batch in table.iter_batches(BLOCK, columns=[pixels, target]):
                contents = _contents(file, batch.column(pixels))
                found = batch.column(target).to_pylist()
                labels = [_label(file, row + k, value, names, gathering.classes) for k, value in enumerate(found)]
                if contents:
                    gathering.add(contents, [f"{file} row {row + k}" for k in range(len(contents))], labels)
                row += len(contents)
        except (pa.ArrowException, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{file} is not a parquet file that can be read ({reason:.120})") from None
        rows += row
    if not rows:
        raise DataError(f"{files[0]} holds no rows; at least one image is needed")


def _column(file: Path, schema: Any, wanted: str | None, usual: Sequence[str], option: str) -> str:
    if wanted is not None:
        if wanted not in schema.names:
            raise DataError(f"{file} has no column '{wanted}'{did_you_mean(wanted, schema.names)}")
        return wanted
    for name in usual:
        if name in schema.names:
            return name
    raise DataError(f"{file} has no column {' or '.join(usual)}; name it with {option} ({', '.join(schema.names)})")


def _contents(file: Path, column: Any) -> list[bytes]:
    """Encoded images: a binary column, or the hub's struct of bytes and path. A row without one is empty."""
    import pyarrow as pa

    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.field("bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise DataError(f"{file}: the image column holds {column.type}, not the bytes of encoded images (png, jpg)")
    return [content or b"" for content in column.to_pylist()]


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
