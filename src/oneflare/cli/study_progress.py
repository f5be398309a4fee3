"""One display for all cells of a study: a bar with the time left, or one line per cell in a log file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from oneflare.cli.progress import shown
from oneflare.client.observer import Observer, Outcome
from oneflare.study.estimate import duration

TRAINING = 0.85
"""part of a cell's time; the rest is fusing and measuring"""


class StudyObserver(Observer):
    """Counts in estimated seconds, so that long cells weigh more; the pace so far corrects the estimate."""

    def __init__(self, console: Console, bar: Progress | None, seconds: Mapping[str, float]) -> None:
        self.console = console
        self.bar = bar
        self.seconds = seconds
        self.task: Any = None
        self.parts: dict[str, float] = {}
        self.left: set[str] = set()
        self.cells = self.done = 0
        self.processes = 1
        self.started = time.monotonic()
        self.waits = False

    def cells_begin(self, cells: Sequence[str], there: int, processes: int) -> None:
        self.cells, self.done, self.processes = len(cells) + there, there, processes
        self.left = set(cells)
        self.parts = dict.fromkeys(self.left, 0.0)
        self.started = time.monotonic()
        if self.bar is not None:
            self.task = self.bar.add_task("cells", total=1.0, state="")
            self._draw()
        else:
            self._say(f"{self.cells} cells, {there} done, {processes} at once; about {self.time_left()} left")

    def time_left(self) -> str:
        """Estimated seconds still to be done, at the pace seen so far once there is one."""
        worked = sum(self.seconds[name] * part for name, part in self.parts.items())
        total = sum(self.seconds[name] for name in self.parts)
        elapsed = time.monotonic() - self.started
        pace = worked / elapsed if worked > 0.02 * total and elapsed > 1 else float(self.processes)
        return duration((total - worked) / pace)

    def cell_step(self, cell: str, part: float) -> None:
        self.parts[cell] = TRAINING * part
        self._draw()

    def cell_done(self, outcome: Outcome) -> None:
        self.parts[outcome.cell] = 1.0
        if outcome.status == "there":  # says nothing about the pace of those that are run
            del self.parts[outcome.cell]
        self.left.discard(outcome.cell)
        self.done += 1
        text = f"[{self.done}/{self.cells}] {outcome.cell}"
        if outcome.status == "failed":
            self._say(f"{text} failed: {outcome.reason}")
        elif self.bar is None and outcome.status == "run":
            shown = "" if outcome.accuracy is None else f" {100 * outcome.accuracy:.1f} %"
            self._say(f"{text}{shown}, {duration(outcome.seconds)}; about {self.time_left()} left")
        elif self.bar is None:
            self._say(f"{text} is there")
        self._draw()

    def cells_wait(self, cells: Sequence[str]) -> None:
        if not self.waits:
            self._say(f"waiting for {len(cells)} cells that another process runs: {', '.join(cells[:3])} ...")
            self.waits = True

    def warn(self, text: str) -> None:
        self._say(f"warning: {text}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _draw(self) -> None:
        if self.bar is None or self.task is None:
            return
        total = sum(self.seconds[name] for name in self.parts) or 1.0
        worked = sum(self.seconds[name] * part for name, part in self.parts.items())
        active = [name for name, part in self.parts.items() if 0 < part < 1 and name in self.left]
        state = f"{self.done}/{self.cells} cells, {self.time_left()} left"
        if active:
            state += f"  {active[0].rsplit('-', 1)[0]}" + (f" +{len(active) - 1}" if len(active) > 1 else "")
        self.bar.update(self.task, completed=worked / total if self.parts else 1.0, state=state)


def study_progress(*, enabled: bool, seconds: Mapping[str, float]) -> AbstractContextManager[Observer]:
    """How far a study is; seconds: that each cell is expected to take."""
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[state]}"),
    )
    return shown(
        lambda console, bar: StudyObserver(console, bar, seconds),
        lambda console: Progress(*columns, console=console, transient=True),
        enabled=enabled,
    )
