"""Digits as PNG files in class folders, one folder per member, and a tiny federation over them."""

from __future__ import annotations

import contextlib
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from oneflare.core.config import DataConfig
from oneflare.data import Split, load
from oneflare.federation.charter import Charter, new_charter
from oneflare.federation.member import make_upload, member_data
from oneflare.upload.signing import SigningKey

NAMES = ("east", "north", "south")
DIGITS = [str(digit) for digit in range(10)]
TINY = {"encoder": {"name": "conv4", "width": 4}, "train": {"epochs": 2, "batch_size": 32}}
WORDS = ["encoder=conv4", "encoder.width=4", "epochs=2", "train.batch_size=32"]


def digits() -> tuple[Split, Split]:
    dataset = load(DataConfig(name="digits"))
    return dataset.train, dataset.test


def write_pngs(folder: Path, split: Split, rows: Sequence[int]) -> None:
    for row in rows:
        path = folder / str(int(split.labels[row])) / f"{row:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(split.images[row, 0].numpy()).save(path)


def rows_of(member: int, each: int = 60) -> list[int]:
    return list(range(member * each, (member + 1) * each))


def tiny_charter(**fields) -> Charter:
    fields = {"classes": DIGITS, "image": {"size": 8, "channels": 1}} | fields
    settings = fields.pop("settings", TINY)
    return new_charter(fields.pop("name", "hospitals"), settings, **fields)


def make(charter: Charter, data: Path, out: Path, member: str, key: SigningKey | None = None) -> Path:
    """One member's upload, in this process."""
    return make_upload(charter, member_data(charter, data)[0], out, member=member, key=key).path


@contextlib.contextmanager
def _own_signals():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def typed(capsys, *words: str) -> tuple[int, str, str]:
    """What `oneflare WORDS` answers, in this process: exit code, stdout, stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer's own, about click
        from oneflare.cli.main import main

    before, sys.argv = sys.argv, ["oneflare", *words]
    try:
        with _own_signals():
            main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    return code, captured.out, captured.err
