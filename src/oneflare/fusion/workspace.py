"""What a fusion receives beside the uploads: where it keeps a checkpoint, and what it tells of its progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from oneflare import _version
from oneflare.client.observer import Observer
from oneflare.core.files import load_state, save_state
from oneflare.errors import RunError

REPORT_SECONDS = 0.1


@dataclass(frozen=True)
class Workspace:
    """Where a fusion may keep what resuming needs, and whom it tells how far it is; only fusions that train use it."""

    checkpoint: Path | None = None
    """file of the checkpoint; None: nothing is kept, and an interrupted fusion starts again"""
    every_seconds: float = 20.0
    """least time between two checkpoints"""
    fusion: str = ""
    """the name under which the observer is told of the steps"""
    observer: Observer = field(default_factory=Observer)
    """is told how many steps are done"""

    def report(self, step: int, steps: int) -> None:
        """So many of all steps are done."""
        self.observer.fusion_step(self.fusion, step, steps)

    def discard(self) -> None:
        """Delete the checkpoint. Call it once the result is safely written."""
        if self.checkpoint is not None:
            self.checkpoint.unlink(missing_ok=True)


QUIET = Workspace()
"""keeps nothing and tells nobody: the workspace of a caller who names none"""


class Training(Protocol):
    """An optimisation in steps. `state_dict` is everything that resuming needs."""

    step: int
    steps: int

    def advance(self) -> None:
        """One or more steps; `step` says how many are done."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def carry_out(training: Training, key: str, workspace: Workspace) -> float:
    """Train to the end, from the checkpoint if there is one of the same work, whose name is `key`.

    Returns the seconds that were spent before the checkpoint, in attempts that were interrupted; 0 without one.
    """
    key = f"{key}, arithmetic {_version.FUSION_ARITHMETIC}"
    checkpoint, seconds_before = workspace.checkpoint, 0.0
    if checkpoint is not None and checkpoint.exists():
        state = load_state(checkpoint)
        if not isinstance(state, dict) or not {"key", "training", "seconds"} <= set(state):
            raise RunError(f"{checkpoint} is not a checkpoint; delete it and run again")
        if state["key"] == key:
            training.load_state_dict(state["training"])
            seconds_before = float(state["seconds"])
    started = saved = told = time.monotonic()

    def save() -> None:
        if checkpoint is not None:
            seconds = seconds_before + time.monotonic() - started
            save_state(checkpoint, {"key": key, "training": training.state_dict(), "seconds": seconds})

    workspace.report(training.step, training.steps)
    while training.step < training.steps:
        training.advance()
        now = time.monotonic()
        if training.step >= training.steps or now - saved >= workspace.every_seconds:
            save()
            saved = time.monotonic()
        if training.step >= training.steps or now - told >= REPORT_SECONDS:
            workspace.report(training.step, training.steps)
            told = now
    return seconds_before
