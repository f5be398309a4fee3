"""One fusion after another: who must be there, what is kept of the version before, and what of those who left."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from crowd import charter_of, upload_of
from hospitals import typed
from oneflare.cli.server import admit
from oneflare.errors import RunError
from oneflare.federation.charter import read_charter, revised
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.history import History
from oneflare.federation.quorum import Rules
from oneflare.fusion import load_model
from oneflare.upload.signing import generate

NAMES = ("east", "north", "south")
FIRST = "models/001/"
NEW = "2026-02-01T00:00:00+00:00"


@pytest.fixture
def federation(tmp_path) -> Path:
    """Three members, fused once with two fusions; their uploads lie in inbox/."""
    charter = charter_of(dict.fromkeys(NAMES))
    fusions = [{"name": "count_prototypes"}, {"name": "ensemble"}]
    charter = revised(charter, experiment=charter.experiment | {"fusions": fusions})
    charter.write(tmp_path / "federation" / "federation.yaml")
    (tmp_path / "inbox").mkdir()
    for name in NAMES:
        upload_of(charter, tmp_path / "inbox" / f"{name}.safetensors", name)
    fuse_federation(tmp_path / "federation", uploads=tmp_path / "inbox")
    return tmp_path / "federation"


def content_of(folder: Path) -> dict[str, bytes]:
    """All files but the log, which also says what was tried in vain."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.parent.name != "log"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(bytes(content))


def spoil(folder: Path, *names: str) -> Path:
    """The inbox, with some uploads damaged on their way."""
    for name in names:
        damage(folder.parent / "inbox" / f"{name}.safetensors")
    return folder.parent / "inbox"


def names_of(content: dict) -> list[str]:
    return [member["name"] for member in content["members"]]


def test_with_two_of_three_refused_nothing_is_changed(federation, capsys):
    before = content_of(federation)
    box = spoil(federation, "east", "north")
    code, out, err = typed(capsys, "server", "fuse", str(federation), "--uploads", str(box))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "1 usable upload (south), but 3 are needed (as many as in the last fusion" in err
    assert "east (" in err
    assert "does not match its digest" in err
    assert "--min-members 1 fuses without the others; --keep fuses the others' uploads of the last fusion again" in err
    assert content_of(federation) == before


def test_fewer_members_on_purpose_keep_the_version_before_and_say_what_changed(federation, capsys):
    before = content_of(federation)
    box = spoil(federation, "east", "north")
    code, out, _ = typed(capsys, "server", "fuse", str(federation), "--uploads", str(box), "--min-members", "1")
    assert code == 0
    assert "Gone since the fusion of" in out
    assert "UTC: east, north." in out
    after = content_of(federation)
    kept = {name.removeprefix(FIRST): content for name, content in after.items() if name.startswith(FIRST)}
    assert {"model.safetensors", "models/ensemble.safetensors", "result.json", "members/north.safetensors"} <= set(kept)
    assert all(before[name] == content for name, content in kept.items())
    assert load_model(federation / FIRST / "model.safetensors").cost.forward_passes == 3
    result = json.loads(after["result.json"])
    assert result["change"]["gone"] == ["east", "north"]
    assert "Gone since" in after["card.md"].decode().replace("\\", "")
    assert "Gone since" in after["report.html"].decode()
    fuse_federation(federation, uploads=box, rules=Rules(min_members=1))  # the same again is no new version
    again = content_of(federation)
    assert all(again[FIRST + name] == content for name, content in kept.items())


def test_who_sends_nothing_usable_can_stay_in_with_the_upload_before(federation):
    before = content_of(federation)
    fused = fuse_federation(federation, uploads=spoil(federation, "east", "north"), rules=Rules(keep=True))
    assert list(fused.content.names) == list(NAMES)
    assert content_of(federation)["model.safetensors"] == before["model.safetensors"]


@pytest.mark.parametrize("name", ["state.json", "models/versions.json", "result.json"])
def test_nobody_is_told_to_delete_what_a_federation_remembers(federation, capsys, name):
    (federation / name).write_text("{")
    code, _, err = typed(capsys, "server", "rollback", str(federation))
    if name == "state.json":
        code, _, err = typed(capsys, "server", "fuse", str(federation))
    assert code == 2
    assert "is not valid JSON; restore it from a copy" in err


def test_what_is_no_file_is_refused_by_name_and_an_asked_for_number_is_called_so(federation):
    box = spoil(federation, "east")
    (box / "east.safetensors").unlink()
    os.mkfifo(box / "east.safetensors")
    with pytest.raises(RunError, match=r"3 are needed \(--min-members\).*east\.safetensors\) is refused: .*pipe"):
        fuse_federation(federation, uploads=box, rules=Rules(min_members=3))


def test_the_removed_do_not_count_and_the_first_fusion_wants_all(federation, tmp_path):
    fuse_federation(federation, remove=["north"])
    box = spoil(federation, "east")
    with pytest.raises(RunError, match=r"1 usable upload \(south\), but 2 are needed"):
        fuse_federation(federation, uploads=box)
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    shutil.copy(federation / "federation.yaml", fresh)
    with pytest.raises(
        RunError, match=r"2 usable uploads \(north, south\), but 3 are needed \(as many as are admitted"
    ):
        fuse_federation(fresh, uploads=box)
    assert sorted(path.name for path in fresh.iterdir()) == [".lock", "federation.yaml", "log"]
    fused = fuse_federation(fresh, uploads=box, remove=["east"])
    assert list(fused.content.names) == ["north", "south"]


def test_whoever_is_removed_is_in_no_file_that_is_left(federation):
    """Not in a model of a fusion that the terms no longer name, not in the version before, not in Flower's inbox."""
    upload = (federation.parent / "inbox" / "north.safetensors").read_bytes()
    through_flower = federation / "inbox" / "flower-1" / "node-7.safetensors"
    through_flower.parent.mkdir(parents=True)
    through_flower.write_bytes(upload)
    fuse_federation(federation, uploads=spoil(federation, "east"), rules=Rules(min_members=2))
    assert (federation / FIRST / "model.safetensors").exists()
    charter = read_charter(federation)
    fewer = charter.experiment | {"fusions": charter.experiment["fusions"][:1]}
    revised(charter, experiment=fewer).write(federation / "federation.yaml")
    assert (federation / "models" / "ensemble.safetensors").exists()
    fuse_federation(federation, remove=["north"])
    left = content_of(federation)
    assert not [name for name in left if name.startswith((FIRST, "models/002", "models/ensemble", "inbox"))]
    assert [one.deleted is None for one in History.read(federation / "models").versions] == [False, False, True]
    secret = upload[-4000:-3000]  # some of north's weights
    assert secret in (federation.parent / "inbox" / "north.safetensors").read_bytes()
    assert not [name for name, content in left.items() if secret in content]


def test_a_model_of_a_fusion_that_is_no_longer_named_goes(federation):
    charter = read_charter(federation)
    fewer = charter.experiment | {"fusions": charter.experiment["fusions"][:1]}
    revised(charter, experiment=fewer).write(federation / "federation.yaml")
    fuse_federation(federation)
    assert not list((federation / "models").glob("*.safetensors"))
    assert (federation / FIRST / "models" / "ensemble.safetensors").exists()


def test_an_older_upload_does_not_come_back(federation, tmp_path):
    charter, box = read_charter(federation), federation.parent / "inbox"
    old = (box / "north.safetensors").read_bytes()
    upload_of(charter, box / "north.safetensors", "north", created=NEW)
    renewed = fuse_federation(federation, uploads=box)
    assert renewed.content.change.renewed == ("north",)
    (box / "north.safetensors").write_bytes(old)
    with pytest.raises(RunError, match="before the upload of north that was fused already") as caught:
        fuse_federation(federation, uploads=box)
    assert "--add" in str(caught.value)
    assert "--keep" in str(caught.value)
    kept = fuse_federation(federation, uploads=box, rules=Rules(keep=True))
    assert {member.name: member.created for member in kept.content.members}["north"] == NEW
    named = fuse_federation(federation, uploads=box, add=[box / "north.safetensors"])
    assert {member.name: member.created for member in named.content.members}["north"] != NEW
    fuse_federation(federation, uploads=box)


def test_admitting_six_members_at_once_loses_none(federation, tmp_path, capsys):
    for name in "abcdef":
        generate(tmp_path / f"{name}.key", tmp_path / f"{name}.pub")
    failed: list[BaseException] = []

    def admitted(name: str) -> None:
        try:
            admit(federation, name, str(tmp_path / f"{name}.pub"))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=admitted, args=(name,)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert set(read_charter(federation).members) == {*NAMES, *"abcdef"}


def test_the_version_before_can_be_made_again_from_what_is_kept(federation):
    before = content_of(federation)
    fuse_federation(federation, uploads=spoil(federation, "east", "north"), rules=Rules(min_members=1))
    fuse_federation(federation, uploads=federation / FIRST / "members")
    after = content_of(federation)
    for name in ("model.safetensors", "models/ensemble.safetensors", "members/east.safetensors"):
        assert after[name] == before[name]
    assert names_of(json.loads(after["models/002/result.json"])) == ["south"]
