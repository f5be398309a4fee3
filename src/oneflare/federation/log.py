"""The coordinator's log: who did what in a federation, in lines that are signed and chained.

Every line of `log/entries.jsonl` is one JSON object with a number, the time, what happened, the SHA-256 of the line
before it, and the coordinator's signature of all of these. Whoever edits, removes, reorders or adds a line without the
key breaks the chain at that line. What a chain cannot show by itself is that its last lines were cut off: therefore
`log/head.json` holds the last line's number and digest and the coordinator's signature of them, a file beside the
private key holds the same, a fusion's signed `result.json`, its page and the signatures of models hold those of the
time, and `verify` compares all of them. So does `append`: what it finds missing it writes down before anything else, so
that the next line does not cover it up. The owner of the key can still write another history; members who keep an
earlier digest, or a signature of a model, notice.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oneflare.core.files import digest_of, exclusive, read_regular, write_bytes, write_json
from oneflare.core.plain import plain
from oneflare.core.strict import strict_json
from oneflare.errors import ConfigError, RunError
from oneflare.upload.signing import SigningKey, verify

FOLDER, ENTRIES, HEAD = "log", "entries.jsonl", "head.json"
MESSAGE, HEAD_MESSAGE = b"oneflare log ", b"oneflare log head "
WAIT_SECONDS = 60.0
"""for another process that writes to the same log"""
SIZE_LIMIT = 1 << 30
SHOWN = 16
"""letters of a digest that people are shown"""
TEXT = 400
"""characters of a text that others chose"""
EVENTS = {
    "terms": "the terms of the federation, when they are first used and whenever they change",
    "admitted": "a member was admitted, or its key replaced",
    "received": "an upload was examined and is part of a fusion",
    "refused": "a file was examined and is no part of a fusion",
    "approved": "the coordinator accepted what a member does to a class",
    "removed": "a member was removed",
    "failed": "a fusion was tried, and nothing was changed",
    "fused": "a model was made",
    "released": "model and result were signed",
    "scored": "a member's scores of the model were examined and are part of the result",
    "thresholds": "thresholds for classes or for unknown images were chosen or removed",
    "rolled_back": "an earlier version of the model was put in use again",
    "roster": "the coordinator signed who takes part in the next total of masked sums",
    "closed": "a round of masked sums was closed: who is in the total, and who is missing",
    "rotated": "a member's or the coordinator's key was replaced by one that the old key signed",
    "revoked": "a member's key was revoked",
    "broken": "lines before this one were found to be missing or replaced when it was written",
}


@dataclass(frozen=True)
class Event:
    """What happened, to be written down."""

    event: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LogEntry:
    """One line of the log."""

    number: int
    at: str
    event: str
    details: dict[str, Any]
    previous: str
    """SHA-256 of the line before; of the federation's own number for the first"""
    key: str | None
    signature: str | None

    @property
    def digest(self) -> str:
        """Of all but the signature: what is signed."""
        return digest_of({name: value for name, value in asdict(self).items() if name != "signature"})

    @property
    def line(self) -> bytes:
        return (json.dumps(asdict(self), sort_keys=True, separators=(",", ":")) + "\n").encode()

    @property
    def text(self) -> str:
        """What happened, in one line without control characters."""
        facts = sorted(self.details.items(), key=lambda fact: fact[0] != "who")
        told = ", ".join(f"{name} {_told(value)}" for name, value in facts if value not in (None, [], {}))
        return plain(f"{self.event}: {told}" if told else self.event, 2 * TEXT)


def _told(value: Any) -> str:
    """A value for people: of a digest, its first letters."""
    if isinstance(value, list):
        return " ".join(map(_told, value))
    text = str(value)
    return text[:SHOWN] if re.fullmatch("[0-9a-f]{64}", text) else text


@dataclass(frozen=True)
class Position:
    """Where a log ends."""

    entries: int = 0
    digest: str | None = None

    def __str__(self) -> str:
        return f"{self.entries}:{self.digest or ''}"

    @classmethod
    def parse(cls, text: str) -> Position:
        number, _, digest = text.partition(":")
        if not number.isdecimal() or len(digest) != 64:
            raise ConfigError(f"'{plain(text, 80)}' is no position in a log; give NUMBER:DIGEST as the log shows it")
        return cls(int(number), digest)


@dataclass(frozen=True)
class Verified:
    """A log as it is, and everything that is wrong with it."""

    entries: tuple[LogEntry, ...]
    problems: tuple[str, ...]
    position: Position


def start_of(federation: str) -> str:
    """What stands before the first line. federation: the random number in the charter."""
    return digest_of(["oneflare log", federation])


class FederationLog:
    """The log in a federation's folder."""

    def __init__(self, folder: Path, federation: str, seen: Path | None = None) -> None:
        """seen: a file that also knows where the log ends, and that others than the log's writers keep"""
        self.seen = seen
        self.folder = folder / FOLDER
        self.file = self.folder / ENTRIES
        self.head = self.folder / HEAD
        self.federation = federation

    def append(
        self,
        events: Sequence[Event],
        at: str,
        key: SigningKey | None,
        terms: Event | None = None,
        others: Sequence[tuple[str, Position]] = (),
    ) -> Position:
        """Write events down, all or none of them; several processes may do so at the same time.

        terms: written before them if the log's last word on the terms was another. others: as `verify` has them.
        """
        with exclusive(self.folder, wait_seconds=WAIT_SECONDS):
            content = self._content()
            if content and not content.endswith(b"\n"):
                raise RunError(f"{self.file}: its last line is cut short; `oneflare server log` shows what is left")
            lines = content.splitlines(keepends=True)
            previous = hashlib.sha256(lines[-1]).hexdigest() if lines else start_of(self.federation)
            number = len(lines)
            if terms is not None and _last_terms(lines) != _printable(terms.details):
                events = [terms, *events]
            events = [*self._gaps(lines, others, signing=key is not None), *events]
            for event in events:
                number += 1
                blank = LogEntry(number, at, event.event, _printable(event.details), previous, None, None)
                line = signed(blank, key).line
                lines.append(line)
                previous = hashlib.sha256(line).hexdigest()
            write_bytes(self.file, b"".join(lines))
            position = Position(number, previous)
            write_json(self.head, self._signed_end(position, key))
            if self.seen is not None:
                write_json(self.seen, asdict(position))
        return position

    def _signed_end(self, position: Position, key: SigningKey | None) -> dict[str, Any]:
        if key is None:
            return asdict(position)
        signature = key.sign(end_digest(self.federation, position), HEAD_MESSAGE)
        return asdict(position) | {"key": key.public, "signature": signature}

    def _ends(self, entries: Sequence[LogEntry], *, signing: bool) -> tuple[list[tuple[str, Position]], list[str]]:
        """Where the log ends by the files that know it, and what is wrong with these files.

        The end must be signed with the key of one of the lines: no one else can say that a shorter log is all of it.
        """
        found: list[tuple[str, Position]] = []
        problems: list[str] = []
        if not entries and not self.head.exists():
            return found, problems
        head = _position(self.head)
        if head is None:
            problems.append(NO_HEAD.format(self.head.name))
        else:
            found.append((self.head.name, head.position))
            keys = {entry.key for entry in entries}
            if signing and keys != {None} and not head.signed_by(keys, self.federation):
                problems.append(FORGED_HEAD.format(self.head.name))
        if self.seen is not None:
            seen = _position(self.seen)
            if seen is None:
                problems.append(NO_HEAD.format(f"{self.seen.name} beside the key"))
            else:
                found.append((f"{self.seen.name} beside the key", seen.position))
        return found, problems

    def _gaps(
        self, lines: Sequence[bytes], others: Sequence[tuple[str, Position]], *, signing: bool
    ) -> Iterator[Event]:
        """What a place that knows an earlier end of the log misses in it; each place is written down once."""
        entries = [entry for entry in map(_parsed, lines) if entry is not None]
        told = {entry.details.get("seen") for entry in entries if entry.event == "broken"}
        digests = [hashlib.sha256(line).hexdigest() for line in lines]
        known, wrong = self._ends(entries, signing=signing)
        if len({entry.at for entry in entries}) > 1:  # else the first writer was killed before the end
            yield from (Event("broken", {"reason": text}) for text in wrong)
        for name, position in known + list(others):
            if str(position) not in told:
                told.add(str(position))
                yield from (
                    Event("broken", {"reason": text, "seen": str(position)}) for text in _cut(name, position, digests)
                )

    def _content(self) -> bytes:
        return read_regular(self.file, SIZE_LIMIT) if self.file.exists() else b""

    def verify(self, keys: Sequence[str], *others: tuple[str, Position]) -> Verified:
        """Compare every line with the one before, with the coordinator's keys and with the places that know the end.

        keys: the coordinator's public keys in the order in which they counted; a line after one that a later key signed
        is not believed from an earlier key. None at all: nobody signs. others: who says it, where the log was.
        """
        entries: list[LogEntry] = []
        problems: list[str] = []
        digests: list[str] = []
        previous, left = start_of(self.federation), list(keys)
        for number, line in enumerate(self._content().splitlines(keepends=True), start=1):
            entry = _parsed(line)
            reasons = [_DAMAGED] if entry is None else list(_broken(entry, number, previous, left))
            problems += [f"line {number} {reason}" for reason in reasons]
            if entry is not None and entry.event == "broken":
                problems.append(f"line {number} found this when it was written: {entry.details.get('reason')}")
            previous = hashlib.sha256(line).hexdigest()
            digests.append(previous)
            if entry is not None:
                entries.append(entry)
                if entry.key in left and not reasons:
                    del left[: left.index(entry.key)]
        known, wrong = self._ends(entries, signing=bool(keys))
        problems += wrong
        problems += [text for name, position in known + list(others) for text in _cut(name, position, digests)]
        return Verified(tuple(entries), tuple(problems), Position(len(digests), digests[-1] if digests else None))


def _last_terms(lines: Sequence[bytes]) -> dict[str, Any] | None:
    for line in reversed(lines):
        entry = _parsed(line)
        if entry is not None and entry.event == "terms":
            return entry.details
    return None


NO_HEAD = "{} is missing or damaged, which says where the log ends"
FORGED_HEAD = "{}, which says where the log ends, is not signed by the coordinator: it was written by somebody else"
_DAMAGED = "is damaged: it is not a line of this log"


def signed(entry: LogEntry, key: SigningKey | None) -> LogEntry:
    if key is None:
        return entry
    named = LogEntry(**(asdict(entry) | {"key": key.public}))
    return LogEntry(**(asdict(named) | {"signature": key.sign(named.digest, MESSAGE)}))


def _printable(details: Mapping[str, Any]) -> dict[str, Any]:
    """Text of others without control characters and of bounded length, so that nobody writes lines of their own."""
    return {
        name: [plain(item, TEXT) if isinstance(item, str) else item for item in value]
        if isinstance(value, list)
        else plain(value, TEXT)
        if isinstance(value, str)
        else value
        for name, value in details.items()
    }


def _parsed(line: bytes) -> LogEntry | None:
    try:
        content = strict_json(line)
        entry = LogEntry(**content)
    except (ValueError, TypeError):
        return None
    fits = isinstance(entry.number, int) and isinstance(entry.details, dict) and entry.event in EVENTS
    fits = fits and isinstance(entry.at, str) and isinstance(entry.previous, str)
    return entry if fits and entry.line == line else None


def _broken(entry: LogEntry, number: int, previous: str, keys: Sequence[str]) -> Iterator[str]:
    """Everything that is wrong with a line in its place. keys: that may have signed it"""
    if entry.number != number:
        yield f"has the number {entry.number}: lines are missing, were added or change places here"
    elif entry.previous != previous:
        yield "does not follow the line before it: that line was changed, or one was taken out or put in"
    if not keys:
        return
    if entry.key is None or entry.signature is None:
        yield "is not signed"
    elif entry.key not in keys or not verify(entry.key, entry.signature, entry.digest, MESSAGE):
        yield "is not signed by the coordinator: it was edited or forged"


def _cut(name: str, position: Position, digests: Sequence[str]) -> Iterator[str]:
    if position.entries > len(digests):
        missing = position.entries - len(digests)
        yield f"the last {missing} of {position.entries} lines are missing: {name} has seen them"
    elif position.entries and digests[position.entries - 1] != position.digest:
        yield f"line {position.entries} is not the one that {name} has seen"


@dataclass(frozen=True)
class _End:
    """Where a log ends by a file, and who signed that."""

    position: Position
    key: str | None = None
    signature: str | None = None

    def signed_by(self, keys: Collection[str | None], federation: str) -> bool:
        if self.key is None or self.signature is None or self.key not in keys:
            return False
        return verify(self.key, self.signature, end_digest(federation, self.position), HEAD_MESSAGE)


def end_digest(federation: str, position: Position) -> str:
    return digest_of([federation, position.entries, position.digest])


def _position(path: Path) -> _End | None:
    try:
        content = dict(strict_json(read_regular(path, 10_000)))
        key, signature = (content.pop(name, None) for name in ("key", "signature"))
        position = Position(**content)
    except (RunError, ValueError, TypeError):
        return None
    fits = isinstance(position.entries, int) and isinstance(position.digest, str)
    fits = fits and isinstance(key, str | None) and isinstance(signature, str | None)
    return _End(position, key, signature) if fits else None


def end_of(folder: Path) -> str:
    """Where the log in a federation's folder ends, as `Position` is written; empty where there is none."""
    end = _position(folder / FOLDER / HEAD)
    return "" if end is None else str(end.position)
