"""Keys that are replaced or revoked, and uploads that are encrypted, through the commands and the intake."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from crowd import charter_of, upload_of
from hospitals import typed
from oneflare.cli.server import init
from oneflare.errors import ConfigError, RunError
from oneflare.federation.charter import read_charter, revised
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.intake import Examination
from oneflare.federation.keys import NEXT, admit_member, revoke_member, rotate_coordinator, rotate_member
from oneflare.federation.member import encrypted_for, signer
from oneflare.federation.model_signing import known_key, make_key
from oneflare.federation.opening import make_box
from oneflare.federation.page import read_federation, write_card
from oneflare.federation.quorum import Rules
from oneflare.federation.recording import check_log
from oneflare.models.sealing import check_seal
from oneflare.upload.encryption import encrypt, generate_box
from oneflare.upload.signing import SigningKey, generate, read_key
from oneflare.upload.succession import Succession, current, read_succession, succeed, write_succession

OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
NAMES = ("east", "north", "south")


@pytest.fixture
def keys(tmp_path) -> dict[str, SigningKey]:
    return {name: generate(tmp_path / f"{name}.key", tmp_path / f"{name}.pub") for name in (*NAMES, "fresh")}


def found(root: Path, keys: dict[str, SigningKey], *, encrypted: bool) -> Path:
    """Three members whose uploads were fused; in uploads/ as they made them, in inbox/ as they sent them."""
    folder = root / "federation"
    folder.mkdir()
    plain = charter_of({name: keys[name].public for name in NAMES})
    charter = revised(plain, coordinator=make_key(folder), encryption=make_box(folder) if encrypted else None)
    charter.write(folder / "federation.yaml")
    for place in ("inbox", "uploads"):
        (root / place).mkdir()
    for name in NAMES:
        upload = root / "uploads" / f"{name}.safetensors"
        upload_of(charter, upload, name, signer(keys[name]), created=OLD)
        shutil.copy(encrypted_for(charter, upload), root / "inbox")
    write_card(fuse_federation(folder, uploads=root / "inbox"))
    return folder


@pytest.fixture
def office(tmp_path, keys) -> Path:
    return found(tmp_path, keys, encrypted=False)


@pytest.fixture
def sealed(tmp_path, keys) -> Path:
    """The same with encrypted uploads."""
    return found(tmp_path, keys, encrypted=True)


def again(office: Path, name: str, key: SigningKey, created: str = NEW, **rules) -> Examination:
    """A fusion in which a member sends anew, signed with this key."""
    box = office.parent / "again"
    box.mkdir(exist_ok=True)
    path = upload_of(read_charter(office), box / f"{name}.safetensors", name, signer(key), created=created)
    content = fuse_federation(office, uploads=box, rules=Rules(keep=True, min_members=1, **rules)).content
    return next(verdict for verdict in content.verdicts if verdict.file == str(path))


def test_a_member_replaces_its_key_with_the_old_ones_word(office, keys, capsys):
    root = office.parent
    words = ["--name", "north", "--key", str(root / "north.key"), "--out", str(root / "new")]
    assert typed(capsys, "client", "rotate", *words)[0] == 0
    statement = root / "new" / "north.rotation.json"
    code, _, said = typed(capsys, "server", "rotate", str(office), str(statement))
    assert code == 0, said
    new = read_key(root / "new" / "north.key")
    assert read_charter(office).members["north"] == new.public
    box = office.parent / "more"
    path = upload_of(read_charter(office), box / "north.safetensors", "north", signer(new), created=NEW)
    content = fuse_federation(office, add=[path]).content  # beside the kept one, which the old key signed
    assert {verdict.status for verdict in content.verdicts} == {"in", "superseded"}
    assert again(office, "north", new).status == "in"
    verdict = again(office, "north", keys["north"], created="2026-03-01T00:00:00+00:00")
    assert verdict.status == "refused"
    assert "is signed with a key of north that was revoked on" in verdict.reason
    assert typed(capsys, "server", "rotate", str(office), str(statement))[0] == 2
    assert check_log(office, read_charter(office)).problems == ()
    assert any(entry.event == "rotated" for entry in check_log(office, read_charter(office)).entries)


def test_nobody_replaces_somebody_elses_key(office, keys, tmp_path):
    stolen = succeed("south", keys["north"], keys["fresh"], NEW)
    with pytest.raises(ConfigError, match="is not for south's key"):
        rotate_member(office, stolen, keep=True)
    real = succeed("north", keys["north"], keys["fresh"], NEW)
    path = tmp_path / "x.json"
    for field, value in (("who", "south"), ("new", keys["south"].public), ("at", OLD), ("by_old", real.by_new)):
        write_succession(path, Succession(**(real.to_dict() | {field: value})))
        with pytest.raises(ConfigError, match="did not sign this replacement"):
            read_succession(path)
    for text in ("{}", "[1]", "not json", json.dumps(real.to_dict() | {"who": 3})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a replacement of a key"):
            read_succession(path)
    assert read_charter(office).members["north"] == keys["north"].public


def test_a_revoked_key_is_refused_by_name_whatever_the_date(office, keys, capsys):
    assert typed(capsys, "server", "revoke", str(office), "north")[0] == 0
    with pytest.raises(RunError, match="is signed with a key of north that was revoked on"):
        fuse_federation(office)
    for created in (OLD, "2025-01-01T00:00:00+00:00", "2026-03-01T00:00:00+00:00"):
        verdict = again(office, "north", keys["north"], created=created)
        assert verdict.status == "refused"
    with pytest.raises(ConfigError, match=r"was revoked on .* and does not come back"):
        admit_member(office, "north", keys["north"].public)
    with pytest.raises(ConfigError, match="so its word does not count"):
        rotate_member(office, succeed("north", keys["north"], keys["fresh"], NEW), keep=True)
    assert "is revoked already" in typed(capsys, "server", "revoke", str(office), "north")[2]
    assert "did you mean 'north'" in typed(capsys, "server", "revoke", str(office), "nort")[2]
    assert "say keep or refuse" in typed(capsys, "server", "revoke", str(office), "south", "--earlier", "maybe")[2]
    admit_member(office, "north", keys["fresh"].public)
    assert again(office, "north", keys["fresh"], created="2026-04-01T00:00:00+00:00").status == "in"


def test_a_revocation_covers_what_an_earlier_key_had_signed(office, keys):
    rotate_member(office, succeed("north", keys["north"], keys["fresh"], NEW), keep=True)
    assert len(fuse_federation(office).content.members) == 3
    revoke_member(office, "north", keep=True)
    assert len(fuse_federation(office).content.members) == 3
    charter = read_charter(office)
    assert {one.keep for one in charter.revoked.values()} == {charter.revoked[keys["north"].public].keep}
    admit_member(office, "north", generate(office / "a.key", office / "a.pub").public)
    revoke_member(office, "north", keep=False)
    with pytest.raises(RunError, match="is signed with a key of north that was revoked on"):
        fuse_federation(office)


def test_the_coordinator_may_keep_what_was_fused_before(office, keys):
    revoke_member(office, "north", keep=True)
    content = fuse_federation(office).content
    assert [member.name for member in content.members] == list(NAMES)
    assert again(office, "north", keys["north"]).status == "refused"


def test_the_coordinator_replaces_its_own_key_and_models_stay_verifiable(office, capsys):
    before = read_charter(office)
    old = (office / "coordinator.key").read_bytes()
    code, _, said = typed(capsys, "server", "rotate", str(office))
    assert code == 0, said
    charter = read_charter(office)
    assert charter.fingerprint == before.fingerprint
    assert charter.coordinator == before.coordinator
    assert charter.signing_key == read_key(office / "coordinator.key").public != before.signing_key
    assert (office / "old-coordinator-1.key").read_bytes() == old
    read_federation(office)
    model = office / "model.safetensors"
    known = known_key(model, None)
    check_seal(model, model.read_bytes(), known.key, "model", known.federation)
    with pytest.raises(RunError, match="is not signed by the coordinator's key"):
        check_seal(model, model.read_bytes(), before.signing_key, "model", known.federation)
    fuse_federation(office)
    rotate_coordinator(office)
    fuse_federation(office)
    found = check_log(office, read_charter(office))
    assert found.problems == ()
    assert len({entry.key for entry in found.entries}) == 3
    assert check_log(office, before).problems


def test_an_interrupted_replacement_is_finished_by_the_same_command(office, monkeypatch):
    replace = Path.replace

    def killed(self, target):
        if NEXT in self.name:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        rotate_coordinator(office)
    monkeypatch.undo()
    charter = rotate_coordinator(office)
    assert len(charter.succession) == 1
    assert read_key(office / "coordinator.key").public == charter.signing_key
    fuse_federation(office)
    assert check_log(office, read_charter(office)).problems == ()


def test_a_chain_of_keys_must_begin_with_the_fingerprints_key(office, keys):
    charter = read_charter(office)
    step = succeed("coordinator", keys["east"], keys["fresh"], NEW)
    with pytest.raises(ConfigError, match="do not follow one another"):
        revised(charter, succession=(step.to_dict(),))
    assert current(keys["east"].public, [step]) == keys["fresh"].public
    with pytest.raises(ConfigError, match="no coordinator's key that could have been replaced"):
        revised(charter, coordinator=None, succession=(step.to_dict(),))


def test_encrypted_uploads_are_fused_like_plain_ones_and_leave_nothing_behind(sealed, keys):
    office, box, uploads = sealed, sealed.parent / "inbox", sealed.parent / "uploads"
    content = fuse_federation(office, uploads=box).content
    assert content.fusions == fuse_federation(office).content.fusions  # of the copies that were decrypted before
    assert {Path(member.file).name for member in content.members} == {f"{n}.safetensors.encrypted" for n in NAMES}
    assert all(
        (office / "members" / f"{n}.safetensors").read_bytes() == (uploads / f"{n}.safetensors").read_bytes()
        for n in NAMES
    )
    assert not (office / ".decrypted").exists()
    damaged = box / "north.safetensors.encrypted"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    foreign = generate_box(office.parent / "foreign.box").public
    encrypt(uploads / "east.safetensors", box / "east.safetensors.encrypted", foreign)
    content = fuse_federation(office, uploads=box, rules=Rules(min_members=1)).content
    reasons = {Path(row.file).name: row.reason for row in content.verdicts if row.status == "refused"}
    assert "was encrypted to another key than this federation's" in reasons["east.safetensors.encrypted"]
    assert "cut short" in reasons["north.safetensors.encrypted"]
    assert [member.name for member in content.members] == ["south"]
    (office / "coordinator.box").unlink()
    with pytest.raises(RunError, match=r"is encrypted, and .*coordinator.box is missing"):
        fuse_federation(office, uploads=box)
    assert not (office / ".decrypted").exists()


def test_the_key_for_encryption_is_part_of_the_fingerprint(sealed):
    charter = read_charter(sealed)
    other = generate_box(sealed.parent / "other.box").public
    assert revised(charter, encryption=other).fingerprint != charter.fingerprint
    with pytest.raises(ConfigError, match="encryption"):
        revised(charter, encryption="ed25519:abc")


def test_without_the_package_for_signatures_a_federation_is_founded_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    init(tmp_path / "two", classes="a,b")
    assert "Models will not be signed: pip install 'oneflare[sign]'" in capsys.readouterr().out
    assert read_charter(tmp_path / "two").coordinator is None
    assert [path.name for path in (tmp_path / "two").glob("*.key")] == []
