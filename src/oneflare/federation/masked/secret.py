"""A member's secrets for masked sums: its mask key, and the record of what it has made and released with it.

Both lie in one folder that only the member can read, such as `north.mask` beside `north.key`. The record is what keeps
the member from ever releasing both secrets of somebody; so a key without its record is refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneflare.core.files import exclusive, remove_partial, write_json
from oneflare.core.records import read_record, record_to_dict
from oneflare.errors import ConfigError, RunError
from oneflare.federation.ledger import HOME
from oneflare.upload.masking.keys import MaskKey, is_locked, key_problem, read_mask_key

SUFFIX = ".mask"
KEY, RECORD = "mask.key", "record.json"
PASS_PHRASE = "ONEFLARE_PASS_PHRASE"
WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Released:
    """What a member has released under one roster."""

    federation: str
    uploaded: dict[str, str]
    """member -> salt of the upload whose share was released"""
    missing: tuple[str, ...]
    """members with whom the pair's seed was released"""
    when: str


@dataclass(frozen=True)
class Record:
    """What was made and released with one mask key; everything by the roster's digest."""

    public: str
    made: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """salts of the uploads that were masked"""
    released: dict[str, Released] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return record_to_dict(self)


class MaskSecrets:
    """The folder with a mask key and its record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key_file = folder / KEY
        self.record_file = folder / RECORD

    @property
    def locked(self) -> bool:
        """Whether the key needs a pass phrase."""
        return is_locked(self.key_file)

    def create(self, pass_phrase: str | None = None) -> MaskKey:
        """Make a key and an empty record; the record is written first, so that no key is without one."""
        key = MaskKey.generate()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write {self.folder}: {error.strerror}; choose another --mask folder") from None
        with self.held():
            if self.key_file.exists():
                raise ConfigError(f"{self.key_file} exists and is not overwritten; choose another --mask folder")
            write_json(self.record_file, Record(key.public).to_dict())
            key.write(self.key_file, pass_phrase)
        return key

    def key(self, pass_phrase: str | None = None) -> MaskKey:
        if not self.key_file.exists():
            raise ConfigError(f"there is no mask key in {self.folder}; `oneflare client join` makes one")
        key = read_mask_key(self.key_file, pass_phrase)
        if self.record().public != key.public:
            raise RunError(f"{self.record_file} belongs to another key; restore both files of the folder together")
        return key

    def reopened(self, pass_phrase: str | None = None) -> MaskKey:
        """The key of a folder that is used again, after what a killed process left there is removed."""
        with self.held():
            return self.key(pass_phrase)

    def record(self) -> Record:
        """What was made and released; without it nobody can say what may still be released."""
        remedy = "restore the folder from a backup, or join again with another --mask folder"
        if not self.record_file.exists():
            raise RunError(f"{self.record_file} is missing, so nobody knows what was released; {remedy}")
        return read_record(Record, self.record_file, remedy)

    def keep(self, record: Record) -> None:
        """Write the record to disk before anything that it speaks of leaves."""
        write_json(self.record_file, record.to_dict())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """One process at a time reads, decides and writes; what a killed one left half-written is removed."""
        with exclusive(self.folder, wait_seconds=WAIT_SECONDS):
            remove_partial(self.folder)
            yield

    def problem(self) -> str | None:
        """What is wrong with the files, for `oneflare doctor`; None: nothing."""
        wrong = key_problem(self.key_file)
        if wrong is None:
            try:
                self.record()
            except RunError as error:
                wrong = str(error)
        return wrong


def mask_folder(key: Path | None, member: str) -> Path:
    """`north.mask` beside `north.key`; without a key, in the member's home ($ONEFLARE_HOME, ~/.oneflare)."""
    if key is not None:
        return key.with_suffix(SUFFIX)
    return Path(os.environ.get(HOME) or Path.home() / ".oneflare") / f"{member}{SUFFIX}"


def check_place(folder: Path, out: Path) -> None:
    """Refuse secrets in a folder whose content is passed on: that of a training, or a federation's own."""
    place = folder.resolve()
    passed_on = [parent for parent in (place, *place.parents) if parent.suffix == ".work"]
    passed_on += [place.parent] if (place.parent / "coordinator.key").exists() else []
    if passed_on or place in out.resolve().parents:
        raise ConfigError(f"{folder}: mask keys do not belong in a run's or federation's folder; choose another --mask")


def found_secrets(folder: Path) -> list[MaskSecrets]:
    """The mask keys in a folder and in the member's home."""
    home = Path(os.environ.get(HOME) or Path.home() / ".oneflare")
    places = sorted({path.resolve() for place in (folder, home) for path in place.glob(f"*{SUFFIX}/{KEY}")})
    return [MaskSecrets(path.parent) for path in places]
