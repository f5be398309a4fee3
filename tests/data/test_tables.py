"""Tables of files: every spelling that is read, everything that is wrong told at once, and no way out of the folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from hospitals import tiny_charter, typed
from oneflare.core.config import DataConfig
from oneflare.data import ImageSpec, load
from oneflare.data.labelled import LabelledFile, LabelledImages
from oneflare.data.local import find_files, read_local
from oneflare.data.tables import Columns, TableProblems, listed_paths
from oneflare.errors import DataError
from oneflare.federation.charter import read_charter
from oneflare.federation.member import member_data, upload_notes

GREY = ImageSpec.default(1, 8)
CLASSES = ("cat", "dog")


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8), dtype=np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Forty images; the label and the patient are not in their names."""
    for number in range(40):
        picture(tmp_path / "set" / "scans" / f"{number:02d}.png", number)
    return tmp_path / "set"


def rows(number: int = 40) -> list[tuple[str, str, str]]:
    """file, label, patient: five images each, half of them of either class"""
    return [(f"scans/{n:02d}.png", CLASSES[n % 2], f"P{n // 5}") for n in range(number)]


def csv_text(cells, header=("file", "label", "patient"), between=",") -> str:
    return "\n".join(between.join(row) for row in [header, *cells]) + "\n"


def as_comma(path: Path) -> None:
    (path / "labels.csv").write_text(csv_text(rows()))


def as_semicolon_with_mark(path: Path) -> None:
    (path / "labels.csv").write_bytes(b"\xef\xbb\xbf" + csv_text(rows(), between=";").replace("\n", "\r\n").encode())


def as_tabs(path: Path) -> None:
    (path / "labels.tsv").write_text(csv_text(rows(), between="\t"))


def as_unicode_text(path: Path) -> None:
    (path / "labels.csv").write_bytes(csv_text(rows(), between="\t").encode("utf-16"))


def as_windows(path: Path) -> None:
    cells = [(f'"{file}"'.replace("/", "\\"), f" {label} ", patient) for file, label, patient in rows()]
    (path / "labels.csv").write_text(csv_text([*cells[:7], ("", "", ""), *cells[7:]], (" File", "LABEL", "Patient_ID")))


def as_parquet(path: Path) -> None:
    file, label, patient = zip(*rows(), strict=True)
    pq.write_table(pa.table({"file_name": file, "label": label, "patient": patient}), path / "labels.parquet")


@pytest.mark.parametrize(
    "write",
    [as_comma, as_semicolon_with_mark, as_tabs, as_unicode_text, as_windows, as_parquet],
    ids=lambda f: f.__name__,
)
def test_every_spelling_gives_the_same_images(write, folder):
    write(folder)
    local = read_local(folder, CLASSES, GREY)
    assert local.split.labels.tolist() == [0, 1] * 20
    assert local.split.patients.tolist() == [n // 5 for n in range(40)]
    by_hand = np.stack([np.asarray(Image.open(folder / file)) for file, *_ in rows()])
    assert np.array_equal(local.split.images[:, 0], by_hand)
    table = next(folder.glob("labels.*"))
    assert torch.equal(read_local(table, CLASSES, GREY).split.images, local.split.images)
    reordered = read_local(folder, ("yak", "dog", "cat"), GREY)
    assert reordered.split.labels.tolist() == [2, 1] * 20
    assert listed_paths(table) == [folder / file for file, *_ in rows()]


def test_a_run_holds_out_whole_patients(folder):
    as_comma(folder)
    dataset = load(DataConfig(name="folder", path=str(folder), image_size=8))
    assert dataset.classes == CLASSES
    train, test = (set(part.patients.tolist()) for part in (dataset.train, dataset.test))
    assert not train & test
    assert (len(train), len(test)) in ((6, 2), (7, 1))
    assert any("belong to 8 patients, none of whom is in both" in note for note in dataset.notes)
    mixed = load(DataConfig(name="folder", path=str(folder / "labels.csv"), image_size=8, patients=False))
    assert mixed.train.patients is None
    assert len(mixed.test.labels) == 8


def test_a_given_split_is_kept_and_patients_may_not_be_on_both_sides(folder):
    cells = [(file, label, patient, "test" if int(patient[1:]) >= 6 else "train") for file, label, patient in rows()]
    header = ("file", "label", "patient", "split")
    (folder / "labels.csv").write_text(csv_text(cells, header))
    dataset = load(DataConfig(name="folder", path=str(folder), image_size=8))
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (30, 10)
    assert len(read_local(folder, CLASSES, GREY, part="test").split.labels) == 10
    local = read_local(folder, CLASSES, GREY)
    assert len(local.split.labels) == 30
    assert "10 images of the split test were left out" in local.notes
    cells[2] = (*cells[2][:3], "Test")
    cells[7] = (*cells[7][:3], "test")
    (folder / "labels.csv").write_text(csv_text(cells, header))
    wanted = r"2 patients have images in both the training and the test part \(for example 'P0'\)"
    with pytest.raises(DataError, match=wanted):
        load(DataConfig(name="folder", path=str(folder), image_size=8))
    with pytest.raises(DataError, match=wanted):
        read_local(folder, CLASSES, GREY)
    load(DataConfig(name="folder", path=str(folder), image_size=8, patients=False))
    cells = [(*row[:3], "val" if row[3] == "train" and number < 5 else row[3]) for number, row in enumerate(cells)]
    (folder / "labels.csv").write_text(csv_text([row for row in cells if row[3] != "Test"], header))
    notes = load(DataConfig(name="folder", path=str(folder), image_size=8, patients=False)).notes
    assert "4 images of the split for validation were left out" in notes
    assert "1 image files are not in labels.csv and were left out" in notes


def test_everything_that_is_wrong_is_told_at_once(folder, tmp_path, capsys):
    picture(tmp_path / "secret.png", 99)
    (folder / "scans" / "link.png").symlink_to(tmp_path / "secret.png")
    cells = [
        *rows(4),
        ("scans/00.png", "cat", "P1"),
        ("scans/absent.png", "cat", "P1"),
        ("../secret.png", "cat", "P1"),
        (str(tmp_path / "secret.png"), "cat", "P1"),
        ("scans/link.png", "cat", "P1"),
        ("scans/10.png", "cta", "P1"),
        ("scans/11.png", "", ""),
        ("", "dog", "P1"),
        ("scans/12.png", "dog", "P1", "and more"),
        ("C:\\scans\\13.png", "dog", "P1"),
    ]
    (folder / "labels.csv").write_text(csv_text(cells))
    with pytest.raises(TableProblems) as caught:
        read_local(folder, CLASSES, GREY)
    text = str(caught.value)
    assert "\n" not in text
    for said in (
        "11 of 14 rows of",
        "line 6: 'scans/00.png' is already in labels.csv line 2",
        "line 7: there is no file 'scans/absent.png'",
        "line 8: '../secret.png' is not a path inside the table's folder",
        "line 9: '/",
        "line 10: 'scans/link.png' is a link that leaves the table's folder",
        "line 11: 'cta' is not a class here; did you mean 'cat'",
        "line 12: it has no label",
        "line 12: it has no patient",
        "line 13: it names no file",
        "line 14: it has 4 cells, but the first row has 3",
        "line 15: 'C:/scans/13.png' is not a path inside",
    ):
        assert said in text, said
    charter = tiny_charter(classes=list(CLASSES))
    charter.write(tmp_path / "federation.yaml")
    words = ["client", "train", str(tmp_path / "federation.yaml"), "--data", str(folder), "--dry-run"]
    code, out, err = typed(capsys, *words)
    assert code == 2
    assert len(out.splitlines()) == 11
    assert "cannot be used; repair or remove them" in err
    assert "--skip-damaged" not in err
    code, out, _ = typed(capsys, *words, "--json")
    assert len(json.loads(out)["damaged"]) == 11


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column file and no column label"),
        ("file,label\n", "has no rows"),
        ("picture,label\nscans/00.png,cat\n", "has no column file in its first row"),
        ("file,kind\nscans/00.png,cat\n", "no column label"),
        ("file,label\nscans/00.png,cat\n", "names 1 classes"),
        ("file,label,split\nscans/00.png,cat,train\nscans/01.png,dog,later\n", "'later' is neither train nor test"),
        ('file,label\n"scans/00.png,cat\n', "is not CSV"),
        ("file,label\nscans/00.png,cat\x00\n".encode("latin-1") + b"\xff\n", "not text in UTF-8"),
    ],
)
def test_tables_that_cannot_be_used_are_one_line(content, message, folder):
    (folder / "labels.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message) as caught:
        load(DataConfig(name="folder", path=str(folder), image_size=8))
    assert "\n" not in str(caught.value)


def test_two_tables_and_wrong_columns(folder):
    as_comma(folder)
    with pytest.raises(DataError, match="no column 'lable'; did you mean 'label'"):
        read_local(folder, CLASSES, GREY, columns=Columns(label="lable"))
    other = read_local(folder, CLASSES, GREY, columns=Columns("file", "label", "label"))
    assert other.found.patients == 2
    as_tabs(folder)
    with pytest.raises(DataError, match=r"holds labels\.csv and labels\.tsv; keep the one that counts"):
        read_local(folder, CLASSES, GREY)


def test_a_table_names_the_classes_of_a_federation(folder, tmp_path, capsys):
    as_semicolon_with_mark(folder)
    code, _, err = typed(capsys, "server", "init", str(tmp_path / "f"), "--classes", str(folder / "labels.csv"))
    assert code == 0, err
    assert read_charter(tmp_path / "f").classes == CLASSES


def test_numbers_as_labels(folder):
    cells = [(f"scans/{n:02d}.png", str(n % 12)) for n in range(40)]
    (folder / "labels.csv").write_text(csv_text(cells, ("file", "label")))
    dataset = load(DataConfig(name="folder", path=str(folder), image_size=8))
    assert dataset.classes == tuple(str(number) for number in range(12))
    (folder / "labels.csv").unlink()
    table = pa.table({"file": [file for file, _ in cells], "label": [1 + n % 2 for n in range(40)]})
    pq.write_table(table, folder / "labels.parquet")
    assert load(DataConfig(name="folder", path=str(folder), image_size=8)).classes == ("1", "2")
    by_place = read_local(folder, ("none", "cat", "dog"), GREY)
    assert by_place.split.labels.tolist() == [1, 2] * 20


def test_parquet_with_images_may_name_patients(folder):
    contents = [(folder / file).read_bytes() for file, *_ in rows()]
    _, label, patient = zip(*rows(), strict=True)
    pq.write_table(pa.table({"image": contents, "label": label, "whose": patient}), folder / "all.parquet")
    assert read_local(folder / "all.parquet", CLASSES, GREY).split.patients is None
    local = read_local(folder / "all.parquet", CLASSES, GREY, columns=Columns(patient="whose"))
    assert local.found.patients == 8


def test_files_are_listed_and_decoded_one_at_a_time(folder):
    as_comma(folder)
    files, _ = find_files(folder, CLASSES, Columns())
    assert files[7] == LabelledFile(folder / "scans/07.png", 1, "P1")
    lazy = LabelledImages(files, GREY)
    together = read_local(folder, CLASSES, GREY).split
    image, label = lazy[7]
    assert torch.equal(image, together.images[7])
    assert label == 1
    assert torch.equal(torch.cat([images for _, images in lazy.blocks(16)]), together.images)
    loaded = torch.utils.data.DataLoader(lazy, batch_size=16)
    assert torch.equal(torch.cat([images for images, _ in loaded]), together.images)


def test_patients_are_nowhere_in_what_leaves(folder):
    as_comma(folder)
    (folder / "scans" / "03.png").write_bytes(b"junk")
    charter = tiny_charter(classes=list(CLASSES))
    found = member_data(charter, folder, skip_damaged=True)
    assert upload_notes(charter, found) == ("1 of 40 images could not be used and were left out",)
    assert "patients" not in " ".join(upload_notes(charter, found))
    assert found.found.words() == "found: 39 PNG; 8 patients; 8x8 pixels; 1 damaged"
