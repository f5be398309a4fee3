"""The masked upload: the sums of an upload replaced by masked ones, with what opening the total needs beside them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oneflare.core.files import digest_of, write_bytes
from oneflare.errors import UploadError
from oneflare.upload.checking import parse_manifest, read_header
from oneflare.upload.contract import HEADER_LIMIT, MANIFEST, MASKED, SIZE_LIMIT, STATISTICS
from oneflare.upload.masking.fixed_point import FIXED, counts_of
from oneflare.upload.masking.keys import MaskKey
from oneflare.upload.masking.masks import (
    SALT_BYTES,
    SEED_BYTES,
    TAG_BYTES,
    Words,
    add_stream,
    commitment,
    pair_seed,
    seal_share,
)
from oneflare.upload.masking.roster import Roster
from oneflare.upload.masking.shamir import SHARE_BYTES, split
from oneflare.upload.tensors import tensor_entries

HEX = re.compile(r"[0-9a-f]{64}")
PAIR, SHARE, PERSONAL = "pair", "share", "personal"
"""the three kinds of secrets that an upload commits its member to"""


@dataclass(frozen=True)
class MaskedNote:
    """What a masked upload says beside its numbers; kept in its manifest as `masked`."""

    roster: str
    threshold: int
    salt: str
    """random: names this upload among all that the member ever makes"""
    personal: str
    """commitment to the seed b_i of the personal mask"""
    pairs: dict[str, str]
    """other member -> commitment to the seed s_ij"""
    shares: dict[str, str]
    """holder -> commitment to its share of b_i"""
    sealed: dict[str, str]
    """holder -> the share, which the holder alone can open, base64"""

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    @classmethod
    def read(cls, path: Path, content: Any, roster: Roster, member: str) -> MaskedNote:
        """The note of an upload from others, checked against the roster; its values are checked when they are used."""
        if not isinstance(content, Mapping) or set(content) != set(cls.__dataclass_fields__):
            raise UploadError(f"{path}: the masks are not described as they should be; the member must train again")
        if content["roster"] != roster.digest or content["threshold"] != roster.threshold:
            raise UploadError(
                f"{path}: was masked for another roster than number {roster.number}, so its masks do not cancel; "
                f"{member} must run `oneflare client train` with the charter that has this roster"
            )
        names = set(roster.names)
        words = [content["salt"], content["personal"]]
        for key, wanted in (("pairs", names - {member}), ("shares", names), ("sealed", names)):
            if not isinstance(content[key], Mapping) or set(content[key]) != wanted:
                raise UploadError(f"{path}: masked.{key} does not name the members of the roster; train again")
            words += [] if key == "sealed" else content[key].values()
        if not all(isinstance(word, str) and HEX.fullmatch(word) for word in words):
            raise UploadError(f"{path}: a commitment among the masks is damaged; send the file again")
        for name, text in content["sealed"].items():
            if decoded(text, SHARE_BYTES + TAG_BYTES) is None:
                raise UploadError(f"{path}: the share that is sealed for {name} is damaged; send the file again")
        return cls(**content)


def decoded(text: Any, size: int) -> bytes | None:
    """Bytes of this size from base64; None where it is something else."""
    try:
        content = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        return None
    return content if len(content) == size else None


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def mask(vector: Words, roster: Roster, member: str, key: MaskKey, salt: bytes) -> MaskedNote:
    """Add all masks of a member to its sums in place; the seed of the personal mask is forgotten afterwards.

    salt: `SALT_BYTES` random bytes that were never used before.
    """
    personal = secrets.token_bytes(SEED_BYTES)
    add_stream(vector, personal)
    pairs, place = {}, roster.position(member)
    for other in roster.names:
        if other != member:
            seed = pair_seed(key, roster.entry(other).mask, roster.digest, (member, other))
            add_stream(vector, seed, 1 if place < roster.position(other) else -1)
            pairs[other] = commitment(PAIR, seed)
    shares = dict(zip(roster.names, split(personal, roster.threshold, len(roster.names)), strict=True))
    sealed = {
        name: encoded(seal_share(key, roster.entry(name).mask, roster.digest, salt, (member, name), share))
        for name, share in shares.items()
    }
    committed = {name: commitment(SHARE, share) for name, share in shares.items()}
    return MaskedNote(
        roster.digest, roster.threshold, salt.hex(), commitment(PERSONAL, personal), pairs, committed, sealed
    )


def new_salt() -> bytes:
    return secrets.token_bytes(SALT_BYTES)


def mask_upload(source: Path, target: Path, roster: Roster, member: str, key: MaskKey, salt: bytes) -> MaskedNote:
    """Copy an upload with its plain sums replaced by masked ones; everything else stays as it is.

    Where class counts are withheld, the number of images is replaced by the one that the member enrolled with.
    """
    header = read_header(source, SIZE_LIMIT, HEADER_LIMIT)
    manifest = parse_manifest(source, header)
    entry = tensor_entries(source, header)[STATISTICS + FIXED]
    with source.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        body = bytearray(source.stat().st_size - begin)
        file.seek(begin)
        file.readinto(body)
    vector = np.frombuffer(body, dtype="<u8", count=(entry.end - entry.start) // 8, offset=entry.start)
    images = int(counts_of(torch.from_numpy(vector.view("<i8")), len(manifest["classes"])).sum())
    declared = roster.entry(member).images
    if images > declared:
        raise UploadError(
            f"{member} has {images} images, and enrolled with at most {declared}; leave some out, or join "
            "again with --images and ask for a new roster"
        )
    note = mask(vector, roster, member, key, salt)
    tensors = {name: digest for name, digest in manifest["tensors"].items() if name != STATISTICS + FIXED}
    tensors[STATISTICS + MASKED] = hashlib.sha256(vector.data).hexdigest()
    manifest |= {"masked": note.to_dict(), "tensors": dict(sorted(tensors.items()))}
    if manifest["counts"] == "withheld":
        manifest["samples"] = declared
    manifest["digest"] = digest_of({key: value for key, value in manifest.items() if key != "digest"})
    header[STATISTICS + MASKED] = header.pop(STATISTICS + FIXED)
    header["__metadata__"] = {MANIFEST: json.dumps(manifest, sort_keys=True)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_bytes(target, len(text).to_bytes(8, "little"), text, body)
    return note
