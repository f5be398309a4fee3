"""A member's own data against the terms, its training, resume, and the terms themselves."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from hospitals import DIGITS, TINY, digits, make, rows_of, tiny_charter, typed, write_pngs
from oneflare.client.observer import Observer, Relay
from oneflare.data.local import read_local
from oneflare.data.tables import Columns
from oneflare.errors import ConfigError, DataError, RunError
from oneflare.federation.charter import new_charter, read_charter, revised
from oneflare.federation.intake import take_in
from oneflare.federation.member import estimate, make_upload, member_data, upload_size, work_folder
from oneflare.upload import read_manifest, read_upload
from oneflare.upload.signing import generate, public_key_of


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_pngs(folder, digits()[0], rows_of(0))
    return folder


@pytest.fixture(scope="module")
def charter():
    return tiny_charter()


def png(array) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def table(folder: Path, images: list, labels: list, names=("image", "label")) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(zip(names, (images, labels), strict=True))), folder / "data.parquet")
    return folder / "data.parquet"


def test_folder_and_parquet_are_the_same_data(charter, images, tmp_path):
    by_folder, notes, *_ = member_data(charter, images)
    assert notes == ()
    train = digits()[0]
    assert len(by_folder) == 60
    assert torch.equal(by_folder.counts, torch.bincount(train.labels[:60], minlength=10))
    order = sorted(range(60), key=lambda row: (int(train.labels[row]), row))
    assert torch.equal(by_folder.images, train.images[order])
    encoded = [png(train.images[row, 0].numpy()) for row in order]
    for contents, labels in (
        (encoded, [int(train.labels[row]) for row in order]),
        (encoded, [str(int(train.labels[row])) for row in order]),
        ([{"bytes": content, "path": None} for content in encoded], [int(train.labels[row]) for row in order]),
    ):
        by_table = member_data(charter, table(tmp_path / "t", contents, labels)).data
        assert torch.equal(by_table.images, by_folder.images)
        assert torch.equal(by_table.labels, by_folder.labels)
    in_folder = member_data(charter, tmp_path / "t").data
    assert torch.equal(in_folder.images, by_folder.images)


def test_named_columns_and_the_files_own_class_names(tmp_path):
    charter = tiny_charter(classes=["cat", "dog"])
    content = png(digits()[0].images[0, 0].numpy())
    path = table(tmp_path, [content] * 2, [0, 1], ("scan", "kind"))
    names = b'{"info": {"features": {"kind": {"names": ["dog", "cat"]}}}}'
    pq.write_table(pq.read_table(path).replace_schema_metadata({b"huggingface": names}), path)
    local = read_local(path, charter.classes, charter.image.spec(), columns=Columns("scan", "kind"))
    assert local.split.labels.tolist() == [1, 0]


def test_images_of_any_shape_are_brought_to_the_terms_and_it_is_said(charter, tmp_path):
    for name, size, mode in (("a", (4, 4), "L"), ("b", (30, 20), "RGB"), ("c", (16, 16), "RGB")):
        (tmp_path / "3").mkdir(exist_ok=True)
        image = Image.new(mode, size)
        image.paste("white", (0, 0, size[0] // 2, size[1]))
        image.save(tmp_path / "3" / f"{name}.png")
    (tmp_path / "3" / "readme.txt").write_text("x")
    data, notes, *_ = member_data(charter, tmp_path)
    assert data.images.shape == (3, 1, 8, 8)
    said = " ".join(notes)
    for text in (
        "1 files are not images",
        "1 of 3 images are smaller",
        "1 of 3 images are not square",
        "2 of 3 images",
    ):
        assert text in said


def write_one(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "x.png").write_bytes(content)
    return folder


GOOD = png(digits()[0].images[0, 0].numpy())


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path / "nowhere", "no data at"),
        (lambda path: path, "no images below"),
        (lambda path: write_one(path, "11", GOOD), "11 is not a class of this federation"),
        (lambda path: write_one(path, "3", b"junk"), "damaged or not an image"),
        (lambda path: write_one(path, "3", GOOD[:60]), "cannot read image"),
        (lambda path: table(path, [GOOD], [10]), "label 10 is not between 0 and 9"),
        (lambda path: table(path, [GOOD], [-1]), "label -1"),
        (lambda path: table(path, [GOOD], ["x"]), "'x' is not a class"),
        (lambda path: table(path, [GOOD], [1.5]), "neither a class name"),
        (lambda path: table(path, [GOOD], [None]), "neither a class name"),
        (lambda path: table(path, [GOOD, None], [1, 1]), "row 1: it is empty"),
        (lambda path: table(path, [b"junk"], [1]), "row 0"),
        (lambda path: table(path, [7], [1]), "not the bytes of encoded images"),
        (lambda path: table(path, ["a.png"], [1]), "there is no file 'a.png'"),
        (lambda path: table(path, [GOOD], [1], ("pixels", "label")), "--image-column"),
        (lambda path: table(path, pa.array([], pa.binary()), pa.array([], pa.int64())), "no rows"),
    ],
)
def test_data_that_do_not_fit_are_refused_in_one_line(prepare, message, charter, tmp_path):
    with pytest.raises(DataError) as caught:
        member_data(charter, prepare(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_parquet(charter, tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"junk")
    with pytest.raises(DataError, match="not a parquet file"):
        member_data(charter, tmp_path / "x.parquet")


def test_training_resumes_bit_for_bit(images, tmp_path):
    charter = tiny_charter(settings=TINY | {"train": {"epochs": 4, "checkpoint_seconds": 0.0}})
    data = member_data(charter, images).data
    whole = make_upload(charter, data, tmp_path / "whole.safetensors", member="north")

    class Stop(Observer):
        def epoch(self, client, epoch, row, samples):
            if epoch == 3:
                raise KeyboardInterrupt

    out = tmp_path / "again.safetensors"
    with pytest.raises(KeyboardInterrupt):
        make_upload(charter, data, out, member="north", observer=Stop())
    assert (work_folder(out) / "checkpoint" / "state.safetensors").exists()
    assert not out.exists()
    seen = []
    resumed = make_upload(charter, data, out, member="north", observer=Relay(lambda event, row: seen.append(row[1])))
    assert seen == [3, 4]
    assert resumed.manifest["tensors"] == whole.manifest["tensors"]


def test_the_same_again_has_nothing_to_do_other_data_are_refused(charter, images, tmp_path):
    data = member_data(charter, images).data
    out = tmp_path / "upload.safetensors"
    first = make_upload(charter, data, out, member="north")
    assert not first.complete_before
    again = make_upload(charter, data, out, member="north")
    assert again.complete_before
    assert again.manifest == first.manifest
    key = generate(tmp_path / "a.key", tmp_path / "a.pub")
    signed = make_upload(charter, data, out, member="north", key=key)
    assert not signed.complete_before
    assert signed.manifest["tensors"] == first.manifest["tensors"]
    shutil.copytree(images, tmp_path / "more")
    write_one(tmp_path / "more", "9/extra", GOOD)
    other = member_data(charter, tmp_path / "more").data
    with pytest.raises(RunError, match="another data"):
        make_upload(charter, other, out, member="north")


@pytest.mark.parametrize("evidence", [["kronecker", "fisher"], ["moments", "raw_moments", "class_means"], None])
def test_the_size_is_known_before_anybody_has_trained(evidence, images, tmp_path):
    """None: the method fedov, which sends a prototype of the class unknown."""
    switches = {"method": "fedov"} if evidence is None else {"upload": {"evidence": evidence}}
    charter = tiny_charter(settings=TINY | switches)
    path = make(charter, images, tmp_path / "east.safetensors", "east")
    assert abs(path.stat().st_size - upload_size(charter)) < 1000


def test_dry_run_tells_the_size_and_writes_nothing(charter, images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    charter.write(tmp_path / "federation.yaml")
    code, out, err = typed(capsys, "client", "train", "federation.yaml", "--data", str(images), "--dry-run")
    assert code == 0
    assert "60 images of 10 of 10 classes" in err
    assert "nothing was written" in out
    assert [path.name for path in tmp_path.iterdir()] == ["federation.yaml"]
    guess = estimate(charter, member_data(charter, images)[0])
    real = make(charter, images, tmp_path / "upload.safetensors", "north").stat().st_size
    assert abs(guess.upload_bytes - real) < 1000


def test_a_federation_of_statistics_alone(images, tmp_path):
    charter = tiny_charter(settings={"method": "analytic"})
    path = make(charter, images, tmp_path / "upload.safetensors", "north")
    upload = read_upload(path, charter.contract)
    assert upload.prototypes is None
    assert "statistics" in upload.fields
    guess = estimate(charter, member_data(charter, images)[0])
    assert abs(guess.upload_bytes - path.stat().st_size) < 1000


def test_without_a_name_a_member_gets_one_and_keeps_it(charter, images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    charter.write(tmp_path / "federation.yaml")
    words = ["client", "train", "federation.yaml", "--data", str(images), "-q"]
    assert typed(capsys, *words)[0] == 0
    name = read_manifest(tmp_path / "upload.safetensors")["member"]
    assert name.startswith("member-")
    assert typed(capsys, *words)[0] == 0
    assert read_manifest(tmp_path / "upload.safetensors")["member"] == name


def test_members_are_who_their_key_says(images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {name: generate(tmp_path / f"{name}.key", tmp_path / f"{name}.pub") for name in ("north", "south", "other")}
    charter = tiny_charter(members={name: keys[name].public for name in ("north", "south")})
    charter.write(tmp_path / "federation.yaml")
    words = ["client", "train", "federation.yaml", "--data", str(images)]
    for more, message in (
        ([], "say who you are"),
        (["--name", "north"], "must be signed"),
        (["--name", "north", "--key", "south.key"], "belongs to south"),
        (["--name", "north", "--key", "other.key"], "is not north's"),
        (["--key", "nowhere.key"], "cannot read the key"),
        (["--key", "north.key", "--out", "upload.txt"], "ends in .safetensors"),
    ):
        code, out, err = typed(capsys, *words, *more)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1
    assert not list(tmp_path.glob("upload*"))


def test_a_copy_of_the_terms_from_before_ones_admission_is_good_enough(images, tmp_path, capsys):
    """Members may be admitted after the file was sent; a misspelt name is still noticed."""
    old = tiny_charter(members={"north": None})
    old.write(tmp_path / "federation.yaml")
    words = ["client", "train", str(tmp_path / "federation.yaml"), "--data", str(images)]
    code, _, err = typed(capsys, *words, "--name", "nroth", "--dry-run")
    assert code == 0
    assert "must admit nroth before its upload counts; did you mean 'north'?" in err
    code, _, err = typed(capsys, *words, "--name", "south", "--out", str(tmp_path / "south.safetensors"))
    assert code == 0
    assert "the coordinator must admit south" in err
    assert take_in(old, [tmp_path / "south.safetensors"]).uploads == {}
    admitted = revised(old, members={"north": None, "south": None})
    assert list(take_in(admitted, [tmp_path / "south.safetensors"]).uploads) == ["south"]


def test_keygen_by_command(tmp_path, capsys):
    words = ["client", "keygen", "--name", "north", "--out", str(tmp_path)]
    code, out, _ = typed(capsys, *words)
    assert code == 0
    assert (tmp_path / "north.pub").read_text().strip() in out
    code, _, err = typed(capsys, *words)
    assert code == 2
    assert "not overwritten" in err


def test_terms_survive_the_file_and_only_shared_ones_make_the_fingerprint(charter, tmp_path):
    charter.write(tmp_path / "federation.yaml")
    again = read_charter(tmp_path)
    assert again == charter
    assert again.fingerprint == charter.fingerprint
    assert again.contract.encoder_hash() == charter.contract.encoder_hash()
    fusions = charter.experiment | {"fusions": [{"name": "average"}]}
    for same in (
        revised(charter, deadline="2027-01-01"),
        revised(charter, members={"north": None}),
        revised(charter, use="x", limits="y"),
        revised(charter, experiment=fusions),
    ):
        assert same.fingerprint == charter.fingerprint
    for other in (
        revised(charter, id="0" * 32),
        revised(charter, name="others"),
        revised(charter, classes=[*DIGITS, "10"]),
        revised(charter, image={"size": 8, "channels": 1, "mirror": True}),
        revised(charter, experiment=charter.experiment | {"seed": 1}),
    ):
        assert other.fingerprint != charter.fingerprint
    assert charter.client("north") != charter.client("south")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clases": []}, "did you mean 'classes'"),
        ({"classes": ["a"]}, "classes"),
        ({"classes": ["a", "a"]}, "'a' is listed twice"),
        ({"classes": ["yes", False]}, "put them in quotes"),
        ({"classes": ["a", "b/c"]}, "without '/'"),
        ({"deadline": "soon"}, "give a date"),
        ({"image": {"size": 4}}, "image.size"),
        ({"image": {"size": 8, "channels": 1, "mean": [0.5, 0.5]}}, "mean and std need 1 values"),
        ({"members": {"north": "key"}}, "not a public key"),
        ({"members": {"no rth": None}}, "cannot be a name"),
        ({"experiment": {"method": "falre"}}, "did you mean 'flare'"),
        ({"experiment": {"data": "digits"}}, "does not decide it"),
        ({"experiment": {"upload": {"statistics_noise_seed": 1}}}, "hides nothing"),
        ({"id": "1"}, "id"),
        ({"version": 2}, "version"),
    ],
)
def test_impossible_terms_are_refused_in_one_line(change, message, charter, tmp_path):
    content = yaml.safe_load(charter.to_yaml()) | change
    (tmp_path / "federation.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as caught:
        read_charter(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_charter_that_was_cut_off_anywhere_never_means_other_terms(tmp_path):
    """Without its last lines the file may be valid, with defaults in their place: exact sums instead of noised ones."""
    private = {"method": "analytic", "upload.statistics_epsilon": 1, "upload.counts": "withheld"}
    charter = tiny_charter(settings=private)
    lines = charter.to_yaml().splitlines(keepends=True)
    reasons = set()
    for end in range(1, len(lines)):
        (tmp_path / "federation.yaml").write_text("".join(lines[:end]))
        try:
            assert read_charter(tmp_path).fingerprint == charter.fingerprint
        except ConfigError as error:
            reasons.add("cut off" if "was cut off or changed: its first line says" in str(error) else "other")
    assert reasons == {"cut off", "other"}


def test_terms_that_may_change_leave_the_first_line_true(charter, tmp_path):
    path = tmp_path / "federation.yaml"
    revised(charter, members={"north": None}, use="Another.", limits="Others.").write(path)
    assert read_charter(path).fingerprint == charter.fingerprint
    path.write_text(path.read_text().replace("size: 8", "size: 9"))
    with pytest.raises(ConfigError, match="ask the coordinator for the file again"):
        read_charter(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "federation.yaml")
    with pytest.raises(ConfigError, match=r"is a directory, pipe or device; give the path of a federation's"):
        read_charter(tmp_path)
    with pytest.raises(ConfigError, match="is neither a public key"):
        public_key_of(str(tmp_path / "federation.yaml"))


def test_names_of_files_write_no_line_and_no_colour(charter, images, tmp_path, capsys):
    shutil.copytree(images, tmp_path / "data")
    charter.write(tmp_path / "federation.yaml")
    folder = next(path for path in sorted((tmp_path / "data").iterdir()) if path.is_dir())
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\x1b[31m\nerror: forged.png")).write_bytes(b"junk")
    words = ["client", "train", str(tmp_path / "federation.yaml"), "--data", str(tmp_path / "data"), "--dry-run"]
    code, out, error = typed(capsys, *words)
    assert code == 2
    assert r"\xff\x1b[31m\nerror: forged.png: it is damaged or not an image" in out
    assert "\x1b" not in out + error
    assert [line for line in (out + error).splitlines() if line.startswith("error: ")] == error.splitlines()[-1:]


def test_a_folder_without_terms(tmp_path):
    with pytest.raises(ConfigError, match="server init"):
        read_charter(tmp_path)


def test_a_charter_writes_every_option_out():
    charter = new_charter("x", {"method": "V7"}, classes=["a", "b"])
    assert charter.experiment["method"] == "etf_annealed"
    assert charter.experiment["train"]["lr"] == charter.terms.train.lr
    assert charter.experiment["anchors"]["seed"] == 0
    assert len(charter.experiment["fusions"]) == 1
