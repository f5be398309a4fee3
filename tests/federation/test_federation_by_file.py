"""Three members by file: processes and folders of their own, one late, one removed, one tampered with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from hospitals import NAMES, WORDS, digits, rows_of, typed, write_pngs
from oneflare.core.files import load_state
from oneflare.data.local import read_local
from oneflare.federation.charter import read_charter
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.quorum import Rules
from oneflare.fusion import load_model
from oneflare.upload.signing import generate
from shared import forked, oneflare


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory) -> Path:
    """A federation's folder and, beside it, one folder per member, each with nothing but what it would have."""
    root = tmp_path_factory.mktemp("hospitals")
    train, test = digits()
    write_pngs(root / "test", test, range(80))
    members = []
    for index, name in enumerate(NAMES):
        write_pngs(root / name / "images", train, rows_of(index))
        generate(root / name / f"{name}.key", root / name / f"{name}.pub")
        members += ["--member", f"{name}={root / name / name}.pub"]
    shape = ["--classes", "0,1,2,3,4,5,6,7,8,9", "--image-size", "8", "--channels", "1", "--use", "Reading digits."]
    made = forked("server", "init", "federation", *shape, *members, *WORDS, cwd=root)
    assert made.returncode == 0, made.stderr
    assert "Send federation/federation.yaml to every member" in made.stdout
    for name in NAMES:
        shutil.copy(root / "federation" / "federation.yaml", root / name)
        words = ["client", "train", "federation.yaml", "--data", "images", "--key", f"{name}.key"]
        trained = (oneflare if name == NAMES[0] else forked)(*words, "--out", "upload.safetensors", cwd=root / name)
        assert trained.returncode == 0, trained.stderr
        assert f"you are {name}" in trained.stderr
        assert "what it reveals" in trained.stdout
        assert "Send upload.safetensors" in trained.stdout
    return root


@pytest.fixture
def federation(hospitals, tmp_path) -> Path:
    """A folder that was never fused."""
    folder = tmp_path / "federation"
    folder.mkdir()
    shutil.copy(hospitals / "federation" / "federation.yaml", folder)
    return folder


def inbox(hospitals: Path, folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(hospitals / name / "upload.safetensors", folder / f"{name}.safetensors")
    return folder


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(bytes(content))


def tensors(state) -> dict:
    """Every tensor of a model file by its place."""
    if isinstance(state, torch.Tensor):
        return {"": state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {f"{key}/{place}": tensor for key, value in items for place, tensor in tensors(value).items()}


def assert_same_model(left: Path, right: Path) -> None:
    one, other = tensors(load_state(left / "model.safetensors")), tensors(load_state(right / "model.safetensors"))
    assert one.keys() == other.keys()
    assert len(one) > 10
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_one_is_tampered_with_and_named_the_others_go_on(hospitals, federation):
    box = inbox(hospitals, federation.parent / "inbox", *NAMES)
    flip_a_byte(box / "east.safetensors")
    words = ["--uploads", str(box), "--test", str(hospitals / "test"), "--min-members", "2"]
    outcome = forked("server", "fuse", str(federation), *words, cwd=hospitals)
    assert outcome.returncode == 0, outcome.stderr
    content = json.loads((federation / "result.json").read_text())
    assert [member["name"] for member in content["members"]] == ["north", "south"]
    assert content["missing"] == ["east"]
    (refused,) = [verdict for verdict in content["verdicts"] if verdict["status"] == "refused"]
    assert refused["member"] == "east"
    assert "does not match its digest" in refused["reason"]
    assert "refused" in outcome.stdout
    assert "missing" in outcome.stdout
    card = (federation / "card.md").read_text()
    for text in (
        "Reading digits.",
        "| north | 60 |",
        "Missing: east.",
        "does not match its digest",
        "density_ratio",
    ):
        assert text in card.replace("\\", "")
    page = (federation / "report.html").read_text()
    assert "does not match its digest" in page
    assert "Reading digits." in page
    accuracy = content["fusions"]["density_ratio"]["scores"]["accuracy"]
    charter = read_charter(federation)
    test = read_local(hospitals / "test", charter.classes, charter.image.spec()).split
    answers = load_model(federation / "model.safetensors").predict(test.images)
    assert accuracy == float((answers == test.labels).double().mean())
    assert f"accuracy {100 * accuracy:.1f} %" in outcome.stdout


def test_a_late_member_gives_what_a_fresh_fusion_gives(hospitals, federation, tmp_path):
    fuse_federation(
        federation, uploads=inbox(hospitals, tmp_path / "two", "north", "south"), rules=Rules(min_members=2)
    )
    before = (federation / "model.safetensors").read_bytes()
    added = fuse_federation(federation, add=[hospitals / "east" / "upload.safetensors"])
    assert list(added.content.names) == list(NAMES)
    fresh = tmp_path / "fresh"
    shutil.copytree(hospitals / "federation", fresh, ignore=shutil.ignore_patterns("[!f]*"))
    fuse_federation(fresh, uploads=inbox(hospitals, tmp_path / "three", *NAMES))
    assert_same_model(federation, fresh)
    assert (federation / "model.safetensors").read_bytes() == (fresh / "model.safetensors").read_bytes()
    assert (federation / "model.safetensors").read_bytes() != before


def test_a_removed_member_leaves_no_trace_and_stays_out(hospitals, federation, tmp_path):
    box = inbox(hospitals, tmp_path / "three", *NAMES)
    fuse_federation(federation, uploads=box)
    left = fuse_federation(federation, remove=["north"])
    assert list(left.content.names) == ["east", "south"]
    assert not (federation / "members" / "north.safetensors").exists()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    shutil.copy(federation / "federation.yaml", fresh)
    fuse_federation(fresh, uploads=inbox(hospitals, tmp_path / "two", "east", "south"), rules=Rules(min_members=2))
    assert_same_model(federation, fresh)
    again = fuse_federation(federation, uploads=box)
    (verdict,) = [verdict for verdict in again.content.verdicts if verdict.status == "removed"]
    assert verdict.member == "north"
    assert "--add" in verdict.reason
    assert_same_model(federation, fresh)
    back = fuse_federation(federation, add=[box / "north.safetensors"])
    assert len(back.content.members) == 3
    assert back.content.removed == {}


def test_any_part_of_the_members_is_enough_but_nobody_is_not(hospitals, federation, tmp_path, capsys):
    one = inbox(hospitals, tmp_path / "one", "south")
    alone = fuse_federation(federation, uploads=one, rules=Rules(min_members=1))
    assert alone.content.missing == ("east", "north")
    assert load_model(federation / "model.safetensors").cost.forward_passes == 1
    before = (federation / "model.safetensors").read_bytes()
    box = inbox(hospitals, tmp_path / "bad", "east")
    flip_a_byte(box / "east.safetensors")
    code, out, err = typed(capsys, "server", "fuse", str(federation), "--uploads", str(box))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "does not match its digest" in err
    assert (federation / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--uploads", "nowhere"], "no folder at nowhere"),
        ([], "give --uploads FOLDER"),
        (["--add", "nowhere.safetensors"], "no such file"),
    ],
)
def test_mistakes_of_the_coordinator_are_one_line(words, message, federation, capsys):
    code, out, err = typed(capsys, "server", "fuse", str(federation), *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_removing_a_stranger_is_answered_with_a_suggestion(hospitals, federation, tmp_path, capsys):
    fuse_federation(
        federation, uploads=inbox(hospitals, tmp_path / "two", "north", "south"), rules=Rules(min_members=2)
    )
    code, _, err = typed(capsys, "server", "fuse", str(federation), "--remove", "nroth")
    assert code == 2
    assert "did you mean 'north'" in err


@pytest.mark.parametrize(
    ("words", "twice"),
    [
        (["epochs=1", "epochs=2"], "train.epochs is given twice, the second time by 'epochs=2'"),
        (["epochs=1", "train.epochs=2"], "train.epochs is given twice"),
        (["--member", "north", "--member", "north"], "--member north is given twice"),
        (["--pixels", "bits=12", "--pixels", "bits=8"], "bits is given twice"),
    ],
)
def test_terms_that_are_given_twice_are_refused(words, twice, tmp_path, capsys):
    code, _, error = typed(capsys, "server", "init", str(tmp_path / "fed"), "--classes", "a,b", *words)
    assert code == 2
    assert twice in error
    assert not (tmp_path / "fed").exists()


def test_init_does_not_overwrite_and_admit_keeps_the_fingerprint(hospitals, federation, tmp_path, capsys):
    code, _, err = typed(capsys, "server", "init", str(federation), "--classes", "a,b")
    assert code == 2
    assert "exists" in err
    before = read_charter(federation)
    generate(tmp_path / "west.key", tmp_path / "west.pub")
    code, out, _ = typed(capsys, "server", "admit", str(federation), "west", str(tmp_path / "west.pub"))
    assert code == 0
    assert "admitted west" in out
    after = read_charter(federation)
    assert set(after.members) == {*before.members, "west"}
    assert after.fingerprint == before.fingerprint
    code, _, err = typed(capsys, "server", "admit", str(federation), "west", str(tmp_path / "west.key"))
    assert code == 2
    assert "private key" in err


def test_show_says_what_is_inside(hospitals, capsys):
    code, out, _ = typed(capsys, "upload", "show", str(hospitals / "north" / "upload.safetensors"))
    assert code == 0
    for text in ("network", "prototypes", "counts", "60 images", "exactly how many", "signed with ed25519:"):
        assert text in out
    code, out, _ = typed(capsys, "upload", "show", str(hospitals / "north" / "upload.safetensors"), "--json")
    content = json.loads(out)
    size = (hospitals / "north" / "upload.safetensors").stat().st_size
    parts = [field["size_bytes"] for field in content["fields"]]
    assert content["size_bytes"] == sum(parts) == size
    assert content["signature"] == "valid"


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 100, b"\x02\x00\x00\x00\x00\x00\x00\x00{}"])
def test_show_of_something_else_is_one_line(content, tmp_path, capsys):
    (tmp_path / "x.safetensors").write_bytes(content)
    code, out, err = typed(capsys, "upload", "show", str(tmp_path / "x.safetensors"))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
