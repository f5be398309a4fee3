"""A federation's keys, log and encrypted uploads under attack, with the figures for the table."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from record import record_door

from crowd import charter_of, upload_of
from oneflare.errors import UploadError
from oneflare.federation.charter import FILE, read_charter, revised
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.keys import admit_member, revoke_member, rotate_member
from oneflare.federation.log import FederationLog
from oneflare.federation.member import encrypted_for, signer
from oneflare.federation.model_signing import make_key
from oneflare.federation.opening import make_box
from oneflare.federation.quorum import Rules
from oneflare.federation.recording import check_log
from oneflare.upload.encryption import MAGIC, PIECE, TAG, decrypt, encrypt, generate_box, read_box
from oneflare.upload.signing import generate
from oneflare.upload.succession import succeed

pytestmark = pytest.mark.soak
NAMES = ("east", "north", "south")
TRIES = 400
NEW = "2026-02-01T00:00:00+00:00"


@pytest.fixture
def office(tmp_path) -> Path:
    folder = tmp_path / "federation"
    folder.mkdir()
    keys = {name: generate(tmp_path / f"{name}.key", tmp_path / f"{name}.pub") for name in NAMES}
    plain = charter_of({name: key.public for name, key in keys.items()})
    charter = revised(plain, coordinator=make_key(folder), encryption=make_box(folder))
    charter.write(folder / FILE)
    for name, key in keys.items():
        upload = upload_of(charter, tmp_path / "uploads" / f"{name}.safetensors", name, signer(key))
        encrypt(upload, tmp_path / "inbox" / f"{upload.name}.encrypted", charter.encryption)
    for _ in range(3):
        fuse_federation(folder, uploads=tmp_path / "inbox")
    return folder


def tampered(lines: list[bytes], draw: random.Random) -> tuple[str, list[bytes]]:
    """A log that somebody without the key changed."""
    kind = draw.choice(["edited", "removed", "cut off", "reordered", "repeated", "put in"])
    place = draw.randrange(len(lines))
    other = draw.choice([number for number in range(len(lines)) if number != place])
    changed = list(lines)
    if kind == "edited":
        line = bytearray(changed[place])
        line[draw.randrange(len(line) - 1)] ^= draw.randrange(1, 128)
        changed[place] = bytes(line)
    elif kind == "removed":
        del changed[place]
    elif kind == "cut off":
        changed = changed[:place]
    elif kind == "reordered":
        changed[place], changed[other] = changed[other], changed[place]
    else:
        changed.insert(place, lines[other] if kind == "repeated" else lines[place].replace(b"north", b"south"))
    return kind, changed


def test_no_line_of_the_log_is_changed_unseen(office):
    charter, log = read_charter(office), FederationLog(office, read_charter(office).id)
    assert check_log(office, charter).problems == ()
    content, found = log.file.read_bytes(), Counter()
    lines, draw = content.splitlines(keepends=True), random.Random(0)
    for _ in range(TRIES):
        kind, changed = tampered(lines, draw)
        if changed == lines:
            continue
        log.file.write_bytes(b"".join(changed))
        problems = check_log(office, charter).problems
        assert problems, kind
        assert all("\n" not in text for text in problems)
        found[kind] += 1
    log.file.write_bytes(content)
    head, seen = log.head.read_bytes(), next(office.glob("*.seen"))
    for place in range(1, len(lines)):  # an end that fits the shorter log
        log.file.write_bytes(b"".join(lines[:place]))
        end = {"entries": place, "digest": hashlib.sha256(lines[place - 1]).hexdigest()}
        log.head.write_text(json.dumps(json.loads(head) | end))
        seen.write_text(json.dumps(end))
        assert any(text.startswith("head.json") for text in check_log(office, charter).problems)
        found["cut off with the end rewritten"] += 1
    log.file.write_bytes(content)
    log.head.write_bytes(head)
    seen.write_text(json.dumps({name: json.loads(head)[name] for name in ("entries", "digest")}))
    assert check_log(office, charter).problems == ()
    record_door(
        "log",
        promise="nobody without the coordinator's key changes the log of who did what unseen",
        tried=f"{sum(found.values())} changed logs of {len(lines)} lines: "
        + ", ".join(f"{number} {kind}" for kind, number in sorted(found.items())),
        outcome=f"{sum(found.values())} of {sum(found.values())} found and named",
    )


def test_keys_that_no_longer_count_are_refused(office, tmp_path):
    from oneflare.upload.signing import read_key

    old, new, next_one = (
        read_key(tmp_path / "north.key"),
        *(generate(tmp_path / f"{name}.key", tmp_path / f"{name}.pub") for name in ("new", "next")),
    )
    rotate_member(office, succeed("north", old, new, NEW), keep=True)
    kept = fuse_federation(office).content
    refused = 0
    for key, revoke in ((old, False), (new, True)):
        if revoke:
            revoke_member(office, "north", keep=False)
        for day in ("2025-12-01", "2026-01-02", "2026-03-01"):
            box = tmp_path / f"{key.public[8:14].replace('/', '_')}-{day}"
            charter, made = read_charter(office), f"{day}T00:00:00+00:00"
            upload = upload_of(charter, box / "north.safetensors", "north", signer(key), made)
            path = encrypted_for(charter, upload)
            content = fuse_federation(office, add=[path], rules=Rules(min_members=1)).content
            reasons = [row.reason for row in content.verdicts if row.file == str(path)]
            assert "is signed with a key of north that was revoked on" in reasons[0]
            refused += 1
    admit_member(office, "north", next_one.public)
    charter = read_charter(office)
    upload = upload_of(charter, tmp_path / "z" / "north.safetensors", "north", signer(next_one), NEW)
    assert (
        len(fuse_federation(office, add=[encrypted_for(charter, upload)], rules=Rules(min_members=1)).content.members)
        == 3
    )
    assert len(kept.members) == 3
    record_door(
        "revoked-keys",
        promise="whoever has a member's old or stolen key sends nothing under its name",
        tried="a key that was replaced and one that was revoked, each with uploads dated before, at and after that",
        outcome=f"{refused} of {refused} refused by name; what was fused before stays if the coordinator says so",
    )


def test_encrypted_uploads_are_whole_or_refused(office, tmp_path):
    box = read_box(office / "coordinator.box")
    plain, sealed, target = tmp_path / "plain", tmp_path / "sealed", tmp_path / "opened"
    draw = random.Random(1)
    plain.write_bytes(draw.randbytes(3 * PIECE + 1000))
    encrypt(plain, sealed, box.public)
    content = sealed.read_bytes()
    head = len(MAGIC) + 32
    pieces = [content[start : start + PIECE + TAG] for start in range(head, len(content), PIECE + TAG)]
    found = Counter()
    for _ in range(TRIES):
        kind = draw.choice(["bit", "cut short", "reordered", "another key"])
        changed, key = content, box
        if kind == "bit":
            place = draw.randrange(len(content))
            changed = content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
        elif kind == "cut short":
            changed = content[: draw.randrange(len(content))]
        elif kind == "reordered":
            order = draw.sample(pieces, len(pieces))
            changed = content[:head] + b"".join(order)
        else:
            key = generate_box(tmp_path / f"{found[kind]}.box")
        if changed == content and key is box:
            continue
        sealed.write_bytes(changed)
        with pytest.raises(UploadError):
            decrypt(sealed, target, key, 1 << 24)
        assert not target.exists()
        found[kind] += 1
    record_door(
        "encrypted-uploads",
        promise="an encrypted upload is read whole and unchanged by the coordinator alone, or not at all",
        tried=f"{sum(found.values())} files: "
        + ", ".join(f"{number} {kind}" for kind, number in sorted(found.items())),
        outcome=f"{sum(found.values())} of {sum(found.values())} refused in one line, and nothing written",
    )
