"""Reads a member's own images (class folders, a table or parquet) and checks them against its federation's terms."""

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
from oneflare.data.labelled import BLOCK, Gathering, Inventory, LabelledFile, class_files
from oneflare.data.tables import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    PATIENT_COLUMNS,
    Columns,
    Part,
    find_table,
    read_listing,
)
from oneflare.errors import DataError, did_you_mean


@dataclass(frozen=True)
class LocalData:
    """Images that fit the terms, and what had to be done to make them fit."""

    split: Split
    notes: tuple[str, ...]
    """in plain words, for whoever owns the data"""
    found: Inventory
    """files by kind, sizes and patients, for whoever owns the data"""
    damaged: tuple[Damaged, ...] = ()
    """what was left out because it cannot be used"""


def read_local(
    path: Path,
    classes: Sequence[str],
    image: ImageSpec,
    *,
    columns: Columns | None = None,
    part: Part = "train",
    skip_damaged: bool = False,
) -> LocalData:
    """Images and labels of class folders, of a table of files, of a parquet file, or of a folder of parquet files.

    A table with a column `split` gives the rows of `part`. Images that cannot be used are a `DamagedImages` error that
    knows all of them; with `skip_damaged` they are left out, and a note says how many.
    """
    columns, notes = columns or Columns(), tuple[str, ...]()
    gathering = Gathering(image, classes)
    tables = _image_tables(path, columns)
    if tables:
        _parquet(tables, gathering, columns)
    else:
        files, notes = find_files(path, classes, columns, part)
        gathering.add_files(files)
    split = gathering.split(skip_damaged=skip_damaged)
    return LocalData(split, (*notes, *gathering.notes()), gathering.inventory(), tuple(gathering.damaged))


def find_files(
    path: Path, classes: Sequence[str], columns: Columns, part: Part = "train"
) -> tuple[list[LabelledFile], tuple[str, ...]]:
    """The files of class folders or of a table, not yet read, and what should be known of those that were left out."""
    table = find_table(path, columns)
    if table is not None:
        return read_listing(table, classes, columns).part(part)
    files, strange = _folder(path, classes)
    return files, (f"{strange} files are not images in a class folder and were left out",) if strange else ()


def _image_tables(path: Path, columns: Columns) -> list[Path]:
    """Parquet files that hold images; none where a table names the files."""
    if not path.exists():
        raise DataError(f"no data at {path}; give a folder with one folder per class, a table of files, or parquet")
    if find_table(path, columns) is not None:
        return []
    return [path] if path.is_file() else sorted(path.glob("*.parquet"))


def _folder(root: Path, classes: Sequence[str]) -> tuple[list[LabelledFile], int]:
    """The images, and how many other files there are."""
    entries = sorted(entry for entry in root.iterdir() if entry.name[0] != ".")
    for entry in entries:
        if entry.is_dir() and entry.name not in classes:
            raise DataError(
                f"{entry} is not a class of this federation{did_you_mean(entry.name, classes)}; "
                "rename the folder, give the one that holds the class folders, or list the files in labels.csv"
            )
    files, strange = class_files(root, classes)
    return files, strange + sum(entry.is_file() for entry in entries)


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
            whose = columns.patient or next((name for name in PATIENT_COLUMNS if name in schema.names), None)
            if whose is not None:
                _column(file, schema, whose, PATIENT_COLUMNS, "--patient-column")
            names = _label_names(schema, target)
            row = 0
            for batch in table.iter_batches(BLOCK, columns=[pixels, target, *([whose] if whose else [])]):
                contents = _contents(file, batch.column(pixels))
                found = batch.column(target).to_pylist()
                labels = [_label(file, row + k, value, names, gathering.classes) for k, value in enumerate(found)]
                patients = _patients(batch.column(whose)) if whose else None
                if contents:
                    gathering.add(contents, [f"{file} row {row + k}" for k in range(len(contents))], labels, patients)
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


def _patients(column: Any) -> list[str | None]:
    return [None if value is None else str(value) for value in column.to_pylist()]


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
