"""Reads tables that say which image file has which label: CSV or parquet with the columns file, label, patient, split.

Paths are relative to the table's folder and may not leave it. All rows that are wrong are told at once.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from oneflare.core.files import read_regular
from oneflare.data.images import is_image_file
from oneflare.data.labelled import LabelledFile, ListedProblems, Problem
from oneflare.data.patients import check_apart
from oneflare.errors import DataError, did_you_mean

Part = Literal["train", "test"]
TABLE_NAMES = ("labels.csv", "labels.tsv", "labels.parquet")
TEXT_SUFFIXES = (".csv", ".tsv")
TABLE_BYTES = 1 << 28
DELIMITERS = ",;\t|"
FILE_COLUMNS = ("file", "file_name", "filename", "path")
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "class", "fine_label")
PATIENT_COLUMNS = ("patient", "patient_id", "subject", "subject_id")
SPLIT_COLUMNS = ("split",)
TRAIN_WORDS = ("train", "training")
TEST_WORDS = ("test", "testing")
VALIDATION_WORDS = ("valid", "val", "validation")


MOST_NAMED = 20
"""rows that an error tells one by one"""


class TableProblems(ListedProblems):
    """Rows of a table that cannot be used; the message tells what is wrong with each of them."""

    def __str__(self) -> str:
        more = len(self.problems) - MOST_NAMED
        told = "; ".join(str(problem) for problem in self.problems[:MOST_NAMED])
        return f"{self.summary}: {told}" + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Columns:
    """Names of columns in a table of files, or in parquet with images; None: one of the usual names."""

    image: str | None = None
    label: str | None = None
    patient: str | None = None


class TableRow(NamedTuple):
    """One row as it stands in the table."""

    place: str
    """such as "labels.csv line 3" """
    file: str
    label: str | int | None
    patient: str | None
    split: str
    wrong: str | None = None


class Listing(NamedTuple):
    """The files of a table, sorted by the part that they belong to."""

    table: Path
    classes: tuple[str, ...]
    train: list[LabelledFile]
    test: list[LabelledFile] | None
    """None where the table does not divide its files"""
    notes: tuple[str, ...]

    def part(self, wanted: Part) -> tuple[list[LabelledFile], tuple[str, ...]]:
        """The files of one part, and a note about those of the other; all files where the table has no parts."""
        if self.test is None:
            return self.train, self.notes
        check_apart(
            (file.patient for file in self.train), (file.patient for file in self.test), "move them to one side"
        )
        mine, others = (self.train, self.test) if wanted == "train" else (self.test, self.train)
        other = "test" if wanted == "train" else "train"
        if not mine:
            raise DataError(f"{self.table} has no row whose split is {wanted}; at least one image is needed")
        return mine, (*self.notes, f"{len(others)} images of the split {other} were left out")


def find_table(path: Path, columns: Columns) -> Path | None:
    """The table that a path stands for: itself, or labels.csv, labels.tsv or labels.parquet in that folder."""
    if path.is_file():
        return path if _is_table(path, columns) else None
    found = [path / name for name in TABLE_NAMES if (path / name).is_file() and _is_table(path / name, columns)]
    if len(found) > 1:
        raise DataError(f"{path} holds {found[0].name} and {found[1].name}; keep the one that counts")
    return found[0] if found else None


def _is_table(path: Path, columns: Columns) -> bool:
    """Parquet files that hold images instead of names are no tables of files."""
    if path.suffix.lower() != ".parquet":
        return path.suffix.lower() in TEXT_SUFFIXES
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError):
        return False
    wanted = [columns.image] if columns.image else [*IMAGE_COLUMNS, *FILE_COLUMNS]
    name = next((name for name in wanted if name in schema.names), None)
    if name is None:
        return False
    kind = schema.field(name).type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def read_listing(table: Path, classes: Sequence[str] | None, columns: Columns) -> Listing:
    """The files of a table with their labels; without `classes` they are the labels that occur, sorted."""
    rows = list(_rows(table, columns, labels=True))
    if not rows:
        raise DataError(f"{table} has no rows; at least one image is needed")
    if classes is None:
        rows = [row._replace(label=None if row.label is None else str(row.label)) for row in rows]
    names = tuple(classes) if classes is not None else _sorted_labels(rows)
    if len(names) < 2:
        raise DataError(f"{table} names {len(names)} classes; at least two are needed")
    problems: list[Problem] = []
    train, test, others = [], [], 0
    has_test = any(row.split in TEST_WORDS for row in rows)
    paths = _Paths(table)
    for row in rows:
        found = _labelled(row, paths, names, problems)
        if found is None:
            continue
        if row.split in ("", *TRAIN_WORDS):
            train.append(found)
        elif row.split in TEST_WORDS or not has_test:
            test.append(found)
        else:
            others += 1
    if problems:
        raise TableProblems(f"{len(problems)} of {len(rows)} rows of {table} cannot be used", problems)
    notes = [f"{others} images of the split for validation were left out"] if others else []
    unlisted = paths.unlisted()
    if unlisted:
        notes.append(f"{unlisted} image files are not in {table.name} and were left out")
    return Listing(table, names, train, test if any(row.split for row in rows) else None, tuple(notes))


def label_names(table: Path) -> tuple[str, ...]:
    """The labels that occur in a table, sorted."""
    return _sorted_labels(list(_rows(table, Columns(), labels=True)))


def listed_paths(table: Path) -> list[Path]:
    """The files of a table that may lack labels, in its order."""
    problems: list[Problem] = []
    paths = _Paths(table)
    rows = list(_rows(table, Columns(), labels=False))
    found = [path for row in rows if (path := paths.resolve(row, problems)) is not None]
    if problems:
        raise TableProblems(f"{len(problems)} of {len(rows)} rows of {table} cannot be used", problems)
    return found


def _labelled(row: TableRow, paths: _Paths, classes: Sequence[str], problems: list[Problem]) -> LabelledFile | None:
    """The row's file, or None after its problems were noted."""
    before = len(problems)
    path = paths.resolve(row, problems)
    if row.wrong:
        return None
    label = row.label
    if isinstance(label, int):
        label = classes[label] if 0 <= label < len(classes) else str(label)
    if not label:
        problems.append(Problem(row.place, "it has no label"))
    elif label not in classes:
        problems.append(Problem(row.place, f"'{label:.80}' is not a class here{did_you_mean(label, classes)}"))
    if row.patient == "":
        problems.append(Problem(row.place, "it has no patient, and the table has a column for them"))
    if row.split not in ("", *TRAIN_WORDS, *TEST_WORDS, *VALIDATION_WORDS):
        problems.append(Problem(row.place, f"the split '{row.split:.40}' is neither train nor test"))
    if path is None or label is None or len(problems) > before:
        return None
    return LabelledFile(path, list(classes).index(label), row.patient)


class _Paths:
    """Finds the files of a table's rows, inside its folder and each one once."""

    def __init__(self, table: Path) -> None:
        self.root = table.parent
        self.inside = self.root.resolve()
        self.seen: dict[Path, str] = {}

    def resolve(self, row: TableRow, problems: list[Problem]) -> Path | None:
        path = self.root / row.file
        wrong = self._wrong(row, path)
        if wrong:
            problems.append(Problem(row.place, wrong))
            return None
        self.seen[path.resolve()] = row.place
        return path

    def _wrong(self, row: TableRow, path: Path) -> str | None:
        if row.wrong:
            return row.wrong
        if not row.file or "\0" in row.file:
            return "it names no file"
        shown = f"'{row.file:.120}'"
        if PurePosixPath(row.file).is_absolute() or ":" in row.file[:2] or ".." in PurePosixPath(row.file).parts:
            return f"{shown} is not a path inside the table's folder; give it relative to {self.root}"
        try:
            real = path.resolve()
            if not real.is_file():
                return f"there is no file {shown} in {self.root}"
        except OSError:
            return f"there is no file {shown} in {self.root}"
        if not real.is_relative_to(self.inside):
            return f"{shown} is a link that leaves the table's folder; copy the file"
        if real in self.seen:
            return f"{shown} is already in {self.seen[real]}"
        return None

    def unlisted(self) -> int:
        return sum(is_image_file(path) and path.resolve() not in self.seen for path in self.root.rglob("*"))


def _sorted_labels(rows: Sequence[TableRow]) -> tuple[str, ...]:
    """In alphabetical order; whole numbers in their own."""
    found = {str(row.label) for row in rows if row.label not in (None, "")}
    if all(name.isdecimal() for name in found):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def _rows(table: Path, columns: Columns, *, labels: bool) -> Iterator[TableRow]:
    """The rows of a table as they stand there."""
    names, lines = _parquet(table) if table.suffix.lower() == ".parquet" else _text(table)
    usual = {name.strip().lower(): position for position, name in reversed(list(enumerate(names)))}

    def place(wanted: str | None, known: Sequence[str]) -> int | None:
        if wanted is not None:
            if wanted not in names:
                raise DataError(f"{table} has no column '{wanted}'{did_you_mean(wanted, names)}")
            return list(names).index(wanted)
        return next((usual[name] for name in known if name in usual), None)

    file = place(columns.image, (*FILE_COLUMNS, *IMAGE_COLUMNS))
    label, patient = place(columns.label, LABEL_COLUMNS), place(columns.patient, PATIENT_COLUMNS)
    split = place(None, SPLIT_COLUMNS)
    wanting = [kind for kind, at in (("file", file), ("label", label)) if at is None and (labels or kind == "file")]
    if wanting:
        raise DataError(
            f"{table} has no column {' and no column '.join(wanting)} in its first row ({', '.join(names):.120})"
        )

    def cell(cells: Sequence[Any], at: int | None) -> Any:
        return None if at is None else cells[at]

    for where, given in lines:
        cells = [*given, *[""] * (len(names) - len(given))]
        value = cell(cells, label)
        many = any(_word(extra) for extra in cells[len(names) :])
        yield TableRow(
            where,
            _word(cell(cells, file)).replace("\\", "/"),
            value if isinstance(value, int) and not isinstance(value, bool) else _word(value),
            None if patient is None else _word(cell(cells, patient)),
            _word(cell(cells, split)).lower(),
            f"it has {len(cells)} cells, but the first row has {len(names)}" if many else None,
        )


def _word(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _text(table: Path) -> tuple[list[str], Iterator[tuple[str, list[str]]]]:
    """Column names and lines of a CSV file, whatever its delimiter is and whether or not it has a byte order mark."""
    content = read_regular(table, TABLE_BYTES)
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        raise DataError(f"{table} is not text in UTF-8; save it as CSV UTF-8") from None
    first = text.split("\n", 1)[0]
    delimiter = max(DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)

    def lines() -> Iterator[tuple[str, list[str]]]:
        try:
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    yield f"{table.name} line {reader.line_num}", cells
        except csv.Error as error:
            raise DataError(f"{table} line {reader.line_num} is not CSV ({error})") from None

    found = lines()
    _, names = next(found, ("", []))
    return names, found


def _parquet(table: Path) -> tuple[list[str], Iterator[tuple[str, list[Any]]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        content = pq.read_table(table)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{table} is not a parquet file that can be read ({reason:.120})") from None
    columns = [column.to_pylist() for column in content.columns]
    rows = ((f"{table.name} row {number}", list(cells)) for number, cells in enumerate(zip(*columns, strict=True)))
    return content.column_names, rows
