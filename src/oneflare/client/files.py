"""The files of one client, and the summary that marks it as complete."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneflare.core.records import read_record


@dataclass(frozen=True)
class ClientSummary:
    """What a client reports beside its upload; kept in `summary.json`."""

    client: int
    status: str
    """trained | failed | empty"""
    samples: int
    classes: int
    reason: str = ""
    train_seconds: float = 0.0
    upload_bytes: int = 0
    lambda_raw_max: float = 0.0
    lambda_effective_final: float = 0.0
    accuracy_own: float = 0.0
    """on its own training images, as augmented in the last epoch: it says nothing about new images"""
    conflicts: float = 0.0
    """share of steps in which the pull of the anchors conflicted with the local gradient"""
    peak_lr: float = 0.0
    stable_lr: float | None = None
    """2/L at the start, where train.check_lr asked for it"""
    precision: str = ""
    """float32 or bfloat16; empty where nothing was trained"""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ClientFiles:
    """Where a client's files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.upload = folder / "upload.safetensors"
        self.trace = folder / "trace.jsonl"
        self.summary = folder / "summary.json"
        self.checkpoint = folder / "checkpoint" / "state.safetensors"

    def snapshot(self, epoch: int) -> Path:
        return self.folder / "snapshots" / f"epoch-{epoch:05d}.safetensors"

    def read_summary(self) -> ClientSummary | None:
        if not self.summary.exists():
            return None
        remedy = f"delete the folder {self.folder} and run the same command again"
        return read_record(ClientSummary, self.summary, remedy)

    def remove_checkpoint(self) -> None:
        self.checkpoint.unlink(missing_ok=True)
        if self.checkpoint.parent.is_dir():
            self.checkpoint.parent.rmdir()

    def read_trace(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []


def snapshot_epochs(epochs: int, snapshots: int, tail: int | None = None) -> list[int]:
    """Epochs after which fusion is simulated: evenly spread before the last one, and the `tail` epochs before it."""
    spread = {round(k * epochs / (snapshots + 1)) for k in range(1, snapshots + 1)}
    return sorted((spread | set(tail_epochs(epochs, tail))) - {0, epochs})


def tail_epochs(epochs: int, tail: int | None) -> range:
    """The `tail` epochs before the last one, as far as there are so many."""
    return range(max(1, epochs - (tail or 0)), epochs)
