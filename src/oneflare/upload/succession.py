"""Statements by which a key names its successor: the old key signs the new one, and the new one signs too.

Whoever knows the old key can follow such statements to the key that counts now, and needs nobody's word for it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneflare.core.files import digest_of, read_regular, write_json
from oneflare.core.strict import strict_json
from oneflare.errors import ConfigError, RunError
from oneflare.upload.signing import SigningKey, check_public_key, verify

MESSAGE = b"oneflare key "
SIZE_LIMIT = 10_000


@dataclass(frozen=True)
class Succession:
    """One key replaces another."""

    who: str
    """whose keys they are: a member's name, or `coordinator`"""
    old: str
    new: str
    at: str
    """when, UTC"""
    by_old: str
    """the old key's signature"""
    by_new: str
    """the new key's, which shows that whoever asks for it has it"""

    @property
    def digest(self) -> str:
        return digest_of([self.who, self.old, self.new, self.at])

    def check(self) -> Succession:
        """Refuse a statement that one of the two keys did not sign."""
        for public, signature, which in ((self.old, self.by_old, "old"), (self.new, self.by_new, "new")):
            if not verify(check_public_key(public), signature, self.digest, MESSAGE):
                raise ConfigError(f"the {which} key of {self.who} did not sign this replacement; make it again")
        return self

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def succeed(who: str, old: SigningKey, new: SigningKey, at: str) -> Succession:
    """The statement that `new` replaces `old`."""
    blank = Succession(who, old.public, new.public, at, "", "")
    return Succession(who, old.public, new.public, at, old.sign(blank.digest, MESSAGE), new.sign(blank.digest, MESSAGE))


def current(first: str, chain: Sequence[Succession]) -> str:
    """The key at the end of a chain of statements that begins with `first`."""
    key = first
    for step in chain:
        if step.check().old != key:
            raise ConfigError(
                f"the keys of {step.who} do not follow one another; ask the coordinator for the charter again"
            )
        key = step.new
    return key


def write_succession(path: Path, statement: Succession) -> None:
    write_json(path, statement.to_dict())


def read_succession(path: Path) -> Succession:
    """A statement from a file of somebody else, checked."""
    damaged = ConfigError(f"{path}: is not a replacement of a key; `oneflare client rotate` writes one")
    try:
        content: Any = strict_json(read_regular(path, SIZE_LIMIT))
    except RunError as error:
        raise ConfigError(str(error)) from None
    except (ValueError, json.JSONDecodeError):
        raise damaged from None
    fields = set(Succession.__dataclass_fields__)
    if not isinstance(content, dict) or set(content) != fields or not all(isinstance(v, str) for v in content.values()):
        raise damaged
    try:
        return Succession(**content).check()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
