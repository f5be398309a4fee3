"""What a fusion that trains shares with its surroundings: how far it is, and what resuming needs."""

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


@dataclass
class Workspace:
    """Keeps nothing and tells nobody unless asked to."""

    checkpoint: Path | None = None
    every_seconds: float = 20.0
    """least time between two checkpoints"""
    fusion: str = ""
    """the name under which the observer is told of its steps"""
    observer: Observer = field(default_factory=Observer)
    seconds_before: float = 0.0
    """spent before an interruption"""
    notes: dict[str, Any] = field(default_factory=dict)
    """what the fusion has to say beside its model"""

    def report(self, step: int, steps: int) -> None:
        """So many steps are done."""
        self.observer.fusion_step(self.fusion, step, steps)

    def discard(self) -> None:
        """After the result is safe."""
        if self.checkpoint is not None:
            self.checkpoint.unlink(missing_ok=True)


class Training(Protocol):
    """An optimisation in steps. `state_dict` is everything that resuming needs."""

    step: int
    steps: int

    def advance(self) -> None:
        """One or more steps; `step` says how many are done."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def carry_out(training: Training, key: str, workspace: Workspace) -> None:
    """Train to the end, from the checkpoint if there is one of the same work, whose name is `key`."""
    key = f"{key}, arithmetic {_version.FUSION_ARITHMETIC}"
    checkpoint = workspace.checkpoint
    if checkpoint is not None and checkpoint.exists():
        state = load_state(checkpoint)
        if not isinstance(state, dict) or not {"key", "training", "seconds"} <= set(state):
            raise RunError(f"{checkpoint} is not a checkpoint; delete it and run again")
        if state["key"] == key:
            training.load_state_dict(state["training"])
            workspace.seconds_before = float(state["seconds"])
    started = saved = told = time.monotonic()

    def save() -> None:
        if checkpoint is not None:
            seconds = workspace.seconds_before + time.monotonic() - started
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
