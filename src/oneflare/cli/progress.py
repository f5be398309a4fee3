"""Progress on stderr: a bar on a terminal, one line per client in a log file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeRemainingColumn

from oneflare.cli.manners import is_quiet
from oneflare.cli.show import MOST_ROWS, client_table, console_for, note
from oneflare.client.files import ClientSummary
from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.data import Dataset, Partition


class TerminalObserver(Observer):
    """A bar over all clients and epochs with the time left; in a log file, one line per client instead."""

    def __init__(self, console: Console, bar: Progress | None, table: bool) -> None:
        self.console = console
        self.bar = bar
        self.table = table
        self.task: Any = None
        self.done = 0
        self.clients = 0
        self.total = 0
        self.credit: dict[int, int] = {}
        self.told: set[str] = set()
        """notes, which the runs of a comparison share"""
        self.fusing: dict[str, Any] = {}
        """the bar of each fusion that trains"""
        self.computing: Any = None
        """the bar of a backbone"""
        self.computing_since = 0.0
        self.weight = 1
        """how often the bar counts an image"""
        self.measuring: tuple[float, int] | None = None
        """since when clients measure images, and how many tenths of them a log has been told of"""
        self.first = 0
        """images that had been measured then"""

    def begin(self, experiment: Experiment, dataset: Dataset, partition: Partition) -> None:
        self.clients, self.done, self.credit = len(partition.sizes), 0, {}
        if self.table:
            self.console.print(client_table(dataset.classes, partition.table.tolist(), partition.kind))
            self.table = False
        self.weight, self.measuring = max(experiment.epochs, 1), None
        self.total = total = sum(partition.sizes) * self.weight
        if self.bar is not None:
            if self.task is not None:
                self.bar.remove_task(self.task)
            name = f"{experiment.method}, seed {experiment.seed}"
            self.task = self.bar.add_task(name, total=total, clients=f"0/{self.clients} clients")
        else:
            self.console.print(f"{experiment.method}, seed {experiment.seed}: training {self.clients} clients")

    def epoch(self, client: int, epoch: int, _row: Mapping[str, float], samples: int) -> None:
        self._credit(client, epoch * samples)

    def measured(self, client: int, images: int) -> None:
        self._credit(client, images * self.weight)
        if self.bar is None:
            self._tell_measured()

    def _tell_measured(self) -> None:
        """A line at every tenth of all clients' images, with an estimate."""
        now, seen = time.monotonic(), sum(self.credit.values())
        if self.measuring is None:
            self.measuring = now, 10 * seen // self.total
            self.first = seen
            return
        since, tenths = self.measuring
        if 10 * seen // self.total > tenths and seen < self.total:
            left = (self.total - seen) * (now - since) / max(1, seen - self.first)
            self.console.print(f"  {seen // self.weight} of {self.total // self.weight} images, {left:.0f} s left")
            self.measuring = since, 10 * seen // self.total

    def client_done(self, summary: ClientSummary, samples_seen: int) -> None:
        self.done += 1
        self._credit(summary.client, samples_seen)
        if self.bar is None and self.clients <= MOST_ROWS:
            self.console.print(
                f"  client {summary.client}: {summary.samples} samples, {summary.classes} classes, {summary.status}"
            )

    def _credit(self, client: int, seen: int) -> None:
        fresh = seen - self.credit.get(client, 0)
        self.credit[client] = max(seen, self.credit.get(client, 0))
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, advance=max(0, fresh), clients=f"{self.done}/{self.clients} clients")

    def stage(self, text: str) -> None:
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, clients=text)
        else:
            self.console.print(text)

    def features(self, done: int, total: int) -> None:
        if self.bar is None:
            self._tell_features(done, total)
            return
        if self.computing is None:
            self.computing = self.bar.add_task("computing features", total=total, clients="")
        self.bar.update(self.computing, completed=done, total=total, clients=f"{done}/{total} images")
        if done >= total:
            self.bar.remove_task(self.computing)
            self.computing = None

    def _tell_features(self, done: int, total: int) -> None:
        """A line at every tenth of the images, with an estimate."""
        now = time.monotonic()
        if not self.computing:
            self.computing, self.computing_since = (done, 0), now
            return
        first, tenths = self.computing
        if 10 * done // total > tenths or done >= total:
            left = (total - done) * (now - self.computing_since) / max(1, done - first)
            self.console.print(f"  {done} of {total} images" + (f", {left:.0f} s left" if done < total else ""))
            self.computing = (first, 10 * done // total) if done < total else None

    def fusion_step(self, fusion: str, step: int, steps: int) -> None:
        if self.bar is None:
            if fusion not in self.fusing:
                self.console.print(f"  {fusion}: {steps} steps" + (f", going on after {step}" if step else ""))
            self.fusing.setdefault(fusion, None)
            return
        if fusion not in self.fusing:
            self.fusing[fusion] = self.bar.add_task(f"fusing by {fusion}", total=steps, clients="")
        self.bar.update(self.fusing[fusion], completed=step, clients=f"step {step}/{steps}")
        if step >= steps:
            self.bar.remove_task(self.fusing.pop(fusion))

    def note(self, text: str) -> None:
        if text not in self.told:
            self.console.print(f"note: {text}", markup=False, highlight=False)
        self.told.add(text)

    def warn(self, text: str) -> None:
        self.console.print(f"[yellow]warning:[/yellow] {text}")


def timed_bar(console: Console, *further: ProgressColumn) -> Progress:
    """A bar with a description, the share that is done and the time left; further columns follow these."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, *further, console=console, transient=True)


class Remarks(Observer):
    """Each remark as a line on stderr."""

    def note(self, text: str) -> None:
        note(text)


@contextlib.contextmanager
def shown(
    observer: Callable[[Console, Progress | None], Observer], bar: Callable[[Console], Progress], *, enabled: bool
) -> Iterator[Observer]:
    """An observer on stderr, with a bar where that is a terminal; one that says nothing where it is not enabled."""
    console = console_for(stderr=True)
    if not enabled or is_quiet():
        yield Observer()
    elif not console.is_terminal:
        yield observer(console, None)
    else:
        with bar(console) as running:
            yield observer(console, running)


def progress(*, enabled: bool, table: bool) -> contextlib.AbstractContextManager[Observer]:
    """How far a run is."""
    return shown(
        lambda console, bar: TerminalObserver(console, bar, table),
        lambda console: timed_bar(console, TextColumn("{task.fields[clients]}")),
        enabled=enabled,
    )
