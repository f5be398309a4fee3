"""Whose uploads count: strangers, forgers, duplicates, replays, late ones."""

from __future__ import annotations

import json
import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from hospitals import DIGITS, TINY, digits, make, rows_of, tiny_charter, write_pngs
from oneflare.errors import UploadError
from oneflare.federation.charter import revised
from oneflare.federation.identity import identify
from oneflare.federation.intake import UploadHistory, take_in
from oneflare.federation.ledger import Ledger
from oneflare.federation.member import make_upload, member_data, signer
from oneflare.upload import MANIFEST, read_manifest, seal_upload
from oneflare.upload.disclosure import disclose
from oneflare.upload.signing import SigningKey, generate, public_key_of, read_key, verify

OLD, NEW = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, SigningKey]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: generate(folder / f"{name}.key", folder / f"{name}.pub") for name in ("north", "south", "mallory")}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_pngs(folder, digits()[0], rows_of(0))
    return folder


@pytest.fixture(scope="module")
def charter(keys):
    return tiny_charter(members={name: keys[name].public for name in ("north", "south")})


@pytest.fixture(scope="module")
def trained(charter, images, tmp_path_factory) -> Path:
    """Training is the same whoever signs it."""
    return make(charter, images, tmp_path_factory.mktemp("work") / "north.safetensors", "north")


@pytest.fixture
def sealed(charter, trained, tmp_path):
    def seal(file: str, member: str = "north", key: SigningKey | None = None, created: str = OLD) -> Path:
        path = tmp_path / f"{file}.safetensors"
        seal_upload(trained, path, member=member, created=created)
        rewrite(path, lambda manifest: manifest.update(client=charter.client(member)), **({"key": key} if key else {}))
        return path

    return seal


def rewrite(path: Path, change, **resign: SigningKey) -> None:
    """Alter a manifest as an attacker could: the digest fits again, the signature only with the key."""
    from oneflare.core.files import digest_of

    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    manifest = json.loads(header["__metadata__"][MANIFEST])
    change(manifest)
    manifest["digest"] = digest_of({k: v for k, v in manifest.items() if k not in ("digest", "signature")})
    if resign:
        manifest["signature"] = signer(resign["key"])(manifest["digest"])
    header["__metadata__"][MANIFEST] = json.dumps(manifest)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def only(charter, *files, **options):
    intake = take_in(charter, files, **options)
    return intake, {Path(verdict.file).stem: verdict for verdict in intake.verdicts}


def test_a_signed_upload_is_taken_and_its_tensors_are_those_of_training(charter, keys, sealed, trained):
    path = sealed("a", key=keys["north"])
    intake, verdicts = only(charter, path)
    assert verdicts["a"].status == "in"
    assert intake.uploads["north"].member == "north"
    assert read_manifest(path)["tensors"] == read_manifest(trained)["tensors"]


@pytest.mark.parametrize(
    ("member", "key", "reason"),
    [
        ("mallory", "mallory", "'mallory' is not a member"),
        ("north", "mallory", "another key than the one admitted for north"),
        ("north", "south", "another key than the one admitted for north"),
        ("north", None, "is not signed"),
        ("../north", "north", "cannot be a name"),
        ("north\n", "north", "cannot be a name"),
    ],
)
def test_strangers_and_forgers_are_refused(member, key, reason, charter, keys, sealed):
    intake, verdicts = only(charter, sealed("a", member, None if key is None else keys[key]))
    assert intake.uploads == {}
    assert verdicts["a"].status == "refused"
    assert reason in verdicts["a"].reason


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(created=NEW),
        lambda manifest: manifest.update(member="south"),
        lambda manifest: manifest.update(samples=manifest["samples"] + 1),
        lambda manifest: manifest["tensors"].update(prototypes="0" * 64),
        lambda manifest: manifest["signature"].update(value="AAAA"),
        lambda manifest: manifest.update(signature="yes"),
    ],
)
def test_whatever_is_altered_the_signature_no_longer_fits(change, charter, keys, sealed):
    path = sealed("a", key=keys["north"])
    assert only(charter, path)[1]["a"].status == "in"
    rewrite(path, change)
    intake, verdicts = only(charter, path)
    assert intake.uploads == {}
    assert "sign" in verdicts["a"].reason


def test_a_member_cannot_claim_more_images_than_it_counts(charter, keys, sealed):
    path = sealed("a", key=keys["north"])
    rewrite(path, lambda manifest: manifest.update(samples=10**9), key=keys["north"])
    assert "not the sum of the class counts" in only(charter, path)[1]["a"].reason


def test_the_newest_signed_upload_of_a_member_wins_in_any_order(charter, keys, sealed):
    files = [sealed("old", key=keys["north"], created=OLD), sealed("new", key=keys["north"], created=NEW)]
    for order in (files, files[::-1]):
        intake, verdicts = only(charter, *order)
        assert intake.uploads["north"].path.stem == "new"
        assert verdicts["old"].status == "superseded"
        (note,) = intake.notes
        assert "north sent 2 uploads" in note
        assert "new.safetensors" in note


def test_the_same_upload_twice_is_no_duplicate(charter, keys, sealed, tmp_path):
    path = sealed("a", key=keys["north"])
    (tmp_path / "copy.safetensors").write_bytes(path.read_bytes())
    intake, _ = only(charter, path, tmp_path / "copy.safetensors")
    assert len(intake.uploads) == 1
    assert intake.notes == ()


def test_an_upload_for_another_federation_is_refused_even_with_the_same_terms(charter, keys, images, tmp_path):
    other = tiny_charter(members=charter.members)
    assert other.terms.encoder == charter.terms.encoder
    path = make(other, images, tmp_path / "a.safetensors", "north", keys["north"])
    assert only(other, path)[1]["a"].status == "in"
    assert "another federation" in only(charter, path)[1]["a"].reason


def test_where_no_keys_are_set_anybody_counts_and_signed_goes_before_unsigned(charter, keys, sealed):
    opened = revised(charter, members={})
    intake, _ = only(opened, sealed("a", "anybody"))
    assert list(intake.uploads) == ["anybody"]
    intake, verdicts = only(opened, sealed("signed", key=keys["north"]), sealed("newer", created=NEW))
    assert intake.uploads["north"].path.stem == "signed"
    assert verdicts["newer"].reason.startswith("unsigned")
    intake, verdicts = only(opened, sealed("one", key=keys["north"]), sealed("two", key=keys["mallory"]))
    assert intake.uploads == {}
    assert "2 keys sign for north" in verdicts["one"].reason


def test_after_the_deadline(charter, keys, sealed):
    strict = revised(charter, deadline="2026-01-15")
    early, late = sealed("early", key=keys["north"]), sealed("late", "south", keys["south"], NEW)
    intake, verdicts = only(strict, early, late)
    assert list(intake.uploads) == ["north"]
    assert verdicts["late"].status == "late"
    assert "16 days after the deadline" in verdicts["late"].reason
    assert len(take_in(strict, [early, late], late=True).uploads) == 2
    assert len(take_in(strict, [early], [late]).uploads) == 2


def test_dates_that_cannot_be(charter, keys, sealed):
    assert (
        "in the future" in only(charter, sealed("a", key=keys["north"], created="2126-01-01T00:00:00Z"))[1]["a"].reason
    )
    beyond = ("9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59")  # outside of UTC's calendar
    for created in ("yesterday", "2026-01-01T00:00:00", *beyond):
        assert "when it was made" in only(charter, sealed("a", key=keys["north"], created=created))[1]["a"].reason


def test_a_simulations_upload_is_not_a_members(charter, trained, tiny_run):
    path = tiny_run / "clients" / "000" / "upload.safetensors"
    assert "another federation" in only(charter, path)[1]["upload"].reason
    assert "signature" not in read_manifest(path)
    assert "member" not in read_manifest(path)


def test_what_the_terms_ask_for_cannot_be_withheld(charter, keys, sealed):
    path = sealed("a", key=keys["north"])

    def blur(manifest):
        manifest["counts"] = "noised"

    rewrite(path, blur, key=keys["north"])
    assert "not exact" in only(charter, path)[1]["a"].reason


def test_keys_stay_with_their_owner(tmp_path):
    private, public = tmp_path / "a.key", tmp_path / "a.pub"
    key = generate(private, public)
    assert private.stat().st_mode & 0o777 == 0o600
    assert public_key_of(str(public)) == key.public
    assert read_key(private).public == key.public
    assert key.public not in private.read_text()
    content = private.read_bytes()
    with pytest.raises(Exception, match="not overwritten"):
        generate(private, tmp_path / "b.pub")
    with pytest.raises(Exception, match="not overwritten"):
        generate(tmp_path / "b.key", public)
    assert private.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.key", "a.pub"]
    private.chmod(0o644)
    with pytest.raises(Exception, match="chmod 600"):
        read_key(private)
    public.chmod(0o600)
    with pytest.raises(Exception, match="not a private key"):
        read_key(public)
    with pytest.raises(Exception, match="stays with its member"):
        public_key_of(str(private))


def test_a_signature_is_for_one_digest_and_one_key(keys):
    value = keys["north"].sign("abc")
    assert verify(keys["north"].public, value, "abc")
    assert not verify(keys["north"].public, value, "abd")
    assert not verify(keys["south"].public, value, "abc")
    assert not verify(keys["north"].public, "no base64!", "abc")


def test_noise_on_counts_is_not_the_coordinators_to_redraw(images, tmp_path):
    charter = tiny_charter(
        settings=TINY | {"upload": {"counts": "noised", "counts_epsilon": 0.1}, "fusions": ["count_prototypes"]}
    )
    counts = []
    for name in ("a", "b"):
        data = member_data(charter, images).data
        out = tmp_path / f"{name}.safetensors"
        path = make_upload(charter, data, out, member="north", ledger=Ledger(tmp_path / name)).path
        counts.append(take_in(charter, [path]).uploads["north"].counts)
    assert len(counts[0]) == len(DIGITS)
    assert not torch.equal(*counts)


STRANGE = [None, -1, 1.5, "", "\x1b[31m", [], {}, [1], {"a": 1}, True, 10**30, "a" * 5000]


def test_no_manifest_can_break_the_coordinator_or_the_reader(charter, keys, sealed):
    """Every field replaced by something strange: a verdict or one line, never a crash, never raw control codes."""
    draw = random.Random(0)
    opened = revised(charter, members={})
    path = sealed("a", key=keys["north"])
    content, fields = path.read_bytes(), list(read_manifest(path))
    for field in [*fields, "extra"]:
        for value in draw.sample(STRANGE, 3):
            path.write_bytes(content)
            rewrite(path, lambda manifest, field=field, value=value: manifest.update({field: value}))
            for verdict in take_in(opened, [path]).verdicts:
                assert "\x1b" not in json.dumps([verdict.member, verdict.created])
                assert "\n" not in verdict.reason
            assert told(path).isprintable()


def told(path: Path) -> str:
    try:
        return str(disclose(path).to_dict())
    except UploadError as error:
        return str(error)


def test_nobody_can_send_under_anothers_number(charter, keys, sealed):
    """A member that takes another's client number would have that other one suspected and removed in its place."""
    path = sealed("a", key=keys["north"])
    rewrite(path, lambda manifest: manifest.update(client=charter.client("south")), key=keys["north"])
    intake, verdicts = only(charter, path)
    assert intake.uploads == {}
    assert verdicts["a"].member is None
    assert f"north's is {charter.client('north')}" in verdicts["a"].reason


def test_a_name_that_needs_no_key_is_not_to_be_had_with_anothers_key(charter, keys, sealed):
    mixed = revised(charter, members={"north": keys["north"].public, "south": None})
    _, verdicts = only(mixed, sealed("a", "south", keys["north"]))
    assert "signed with north's key, but says it is from south" in verdicts["a"].reason


def test_one_key_for_two_names_counts_for_neither(charter, keys, sealed):
    opened = revised(charter, members={})
    intake, verdicts = only(opened, sealed("a", "one", keys["mallory"]), sealed("b", "two", keys["mallory"]))
    assert intake.uploads == {}
    assert "one key signs for one and two" in verdicts["a"].reason


def test_a_connection_that_belongs_to_a_member_carries_only_its_own(charter, keys, sealed):
    path = sealed("a", key=keys["north"])
    assert identify(path, read_manifest(path), charter, carrier="north").member == "north"
    with pytest.raises(UploadError, match="came from south's node, but says that it is from north"):
        identify(path, read_manifest(path), charter, carrier="south")


def test_what_a_stranger_claims_to_be_is_called_a_claim(charter, keys, sealed):
    """A refused file must not make its pretended sender look bad."""
    _, verdicts = only(charter, sealed("a", "north", keys["mallory"]))
    assert verdicts["a"].member is None
    assert verdicts["a"].who == "unknown, claims to be north"


def test_an_older_upload_than_the_one_fused_is_refused_unless_it_is_named(charter, keys, sealed):
    old = sealed("old", key=keys["north"], created=OLD)
    known = UploadHistory(newest={"north": NEW})
    intake, verdicts = only(charter, old, known=known)
    assert intake.uploads == {}
    assert verdicts["old"].status == "refused"
    assert verdicts["old"].member == "north"
    assert "made 2026-01-01 00:00 UTC, before the upload of north that was fused already" in verdicts["old"].reason
    assert f"--add {old} takes the older one" in verdicts["old"].reason
    named = take_in(charter, [sealed("new", key=keys["north"], created=NEW)], [old], known=known)
    assert named.uploads["north"].path == old
    assert "the one that --add names is taken" in named.notes[0]


def test_a_clock_may_be_minutes_ahead_and_no_more(charter, keys, sealed):
    def made(**ahead: float) -> str:
        return (datetime.now(UTC) + timedelta(**ahead)).isoformat()

    assert only(charter, sealed("a", key=keys["north"], created=made(minutes=5)))[1]["a"].status == "in"
    verdict = only(charter, sealed("a", key=keys["north"], created=made(hours=1)))[1]["a"]
    assert verdict.status == "refused"
    assert "set its clock" in verdict.reason


def test_the_members_own_command_dates_an_upload_anew_that_was_dated_ahead(charter, keys, images, tmp_path):
    path = make(charter, images, tmp_path / "north.safetensors", "north", keys["north"])
    before = read_manifest(path)
    ahead = (datetime.now(UTC) + timedelta(days=400)).isoformat()
    rewrite(path, lambda manifest: manifest.update(created=ahead), key=keys["north"])
    make(charter, images, path, "north", keys["north"])
    after = read_manifest(path)
    assert before["created"] < after["created"] < ahead
    assert after["tensors"] == before["tensors"]
    assert only(charter, path)[1]["north"].status == "in"


def test_file_names_cannot_forge_lines(charter, keys, sealed, tmp_path):
    honest = sealed("a", key=keys["mallory"])
    forged = Path(os.fsdecode(bytes(tmp_path) + b"/x\n\x1b[32mnorth is in\xff.safetensors"))
    forged.write_bytes(honest.read_bytes())
    (verdict,) = take_in(charter, [forged]).verdicts
    for text in (verdict.file, verdict.reason):
        assert text.isprintable()
        assert text.isascii()
    assert "x\\n\\x1b[32mnorth is in\\xff" in verdict.file
