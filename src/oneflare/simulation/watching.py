"""Progress for Python sessions: one line that is rewritten in a notebook or a terminal, a line per client elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from oneflare.client.files import ClientSummary
from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.data import Dataset, Partition
from oneflare.simulation.results import RunResult

EVERY_SECONDS = 0.5


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this, whose output area rewrites a line as a terminal does."""
    return "ipykernel" in sys.modules


class LineObserver(Observer):
    """`flare, seed 0: 37 %, 2 of 5 clients, 12 s left`"""

    def __init__(
        self, stream: TextIO | None = None, *, rewrite: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """rewrite: whether the stream understands a carriage return; by default terminals and notebooks do."""
        self.stream = stream or sys.stderr
        self.rewrite = (self.stream.isatty() or in_notebook()) if rewrite is None else rewrite
        self.clock = clock
        self.name = ""
        self.seen: dict[int, int] = {}
        self.clients = self.done = 0
        self.total = 1
        self.before = 0
        """what clients had done before an interruption; it says nothing about the pace"""
        self.started = self.told = clock()
        self.width = 0

    def features(self, done: int, total: int) -> None:
        if done >= total or (self.rewrite and self.clock() - self.told >= EVERY_SECONDS):
            self.told = self.clock()
            self._write(f"features of {done} of {total} images", final=not self.rewrite)

    def begin(self, experiment: Experiment, _dataset: Dataset, partition: Partition) -> None:
        self.name = f"{experiment.method}, seed {experiment.seed}"
        self.clients, self.total = len(partition.sizes), max(1, sum(partition.sizes) * max(experiment.epochs, 1))
        self.started = self.clock()
        self._tell()

    def epoch(self, client: int, epoch: int, _row: Mapping[str, float], samples: int) -> None:
        self._worked(client, epoch * samples)

    def measured(self, client: int, images: int) -> None:
        self._worked(client, images)

    def _worked(self, client: int, images: int) -> None:
        self.seen[client] = images
        if self.rewrite and self.clock() - self.told >= EVERY_SECONDS:
            self._tell()

    def client_done(self, summary: ClientSummary, samples_seen: int) -> None:
        self.done += 1
        if summary.client not in self.seen:
            self.before += samples_seen
        self.seen[summary.client] = max(samples_seen, self.seen.get(summary.client, 0))
        self._tell()

    def note(self, text: str) -> None:
        self._write(f"note: {text}", final=True)

    def warn(self, text: str) -> None:
        self._write(f"warning: {text}", final=True)

    def end(self, content: RunResult) -> None:
        figures = f"{content.headline} {100 * content.accuracy:.1f} %, {self.clock() - self.started:.0f} s"
        self._write(f"{self.name}: {figures}", final=True)

    def _tell(self) -> None:
        self.told = self.clock()
        worked = sum(self.seen.values())
        text = f"{self.name}: {100 * min(1.0, worked / self.total):.0f} %, {self.done} of {self.clients} clients"
        fresh, elapsed = worked - self.before, self.told - self.started
        if fresh > 0.02 * self.total and elapsed > 1 and worked < self.total:
            text += f", {(self.total - worked) * elapsed / fresh:.0f} s left"
        self._write(text, final=not self.rewrite)

    def _write(self, text: str, *, final: bool) -> None:
        padded = text.ljust(self.width) if self.rewrite else text
        self.stream.write(("\r" if self.rewrite else "") + padded + ("\n" if final else ""))
        self.stream.flush()
        self.width = 0 if final else len(text)
