"""The member's masked upload: its plain sums stay in its own folder, and only a masked copy of them leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from oneflare.errors import ConfigError, UploadError
from oneflare.federation.charter import Charter
from oneflare.federation.masked.enrolment import check_own, checked_roster
from oneflare.federation.masked.secret import MaskSecrets
from oneflare.upload import read_manifest
from oneflare.upload.contract import STATISTICS
from oneflare.upload.masking.fixed_point import FIXED
from oneflare.upload.masking.keys import MaskKey
from oneflare.upload.masking.message import mask_upload, new_salt
from oneflare.upload.masking.roster import Roster

NAME = "masked.safetensors"


@dataclass(frozen=True)
class Masking:
    """What a member masks its sums with."""

    secrets: MaskSecrets
    key: MaskKey


def check_before_training(charter: Charter, member: str, masking: Masking | None, images: int) -> Roster:
    """The roster that a member's sums are masked for; whatever does not fit is found before any work."""
    roster = checked_roster(charter)
    if masking is None:
        raise ConfigError(f"the sums of {charter.name} are masked; give --mask with the folder that `client join` made")
    check_own(roster, member, masking.key)
    if images > roster.entry(member).images:
        raise ConfigError(
            f"{member} has {images} images, and enrolled with at most {roster.entry(member).images}; leave some out, "
            "or join again with more --images and ask for a new roster"
        )
    return roster


def masked_copy(charter: Charter, trained: Path, member: str, masking: Masking | None) -> Path:
    """The masked copy of an upload, beside it: the one that was made before for the same roster, or a new one.

    The record knows of a masked upload before its file exists, so that nobody can show the member one that it does
    not know.
    """
    roster = check_before_training(charter, member, masking, 0)
    assert masking is not None
    target = trained.with_name(NAME)
    with masking.secrets.held():
        record = masking.secrets.record()
        made = record.made.get(roster.digest, ())
        if not _is_copy(target, trained, roster, made):
            salt = new_salt()
            masking.secrets.keep(replace(record, made=record.made | {roster.digest: (*made, salt.hex())}))
            mask_upload(trained, target, roster, member, masking.key, salt)
    return target


def _is_copy(target: Path, trained: Path, roster: Roster, made: tuple[str, ...]) -> bool:
    """Whether a masked copy of this training for this roster is there already."""
    if not target.exists():
        return False
    try:
        masked, plain = read_manifest(target), read_manifest(trained)
    except UploadError:
        return False
    note = masked.get("masked") or {}
    others = {name: digest for name, digest in plain["tensors"].items() if name != STATISTICS + FIXED}
    same = all(masked["tensors"].get(name) == digest for name, digest in others.items())
    return bool(same and note.get("roster") == roster.digest and note.get("salt") in made)
