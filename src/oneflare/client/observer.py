"""Watching work: the one protocol by which clients, engines, fusions, federations and studies say how far they are.

The rooms above use it too, so its events speak of them, but only in types that this room knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oneflare.client.files import ClientSummary
from oneflare.core.config import Experiment
from oneflare.data import Dataset, Partition


@dataclass(frozen=True)
class Outcome:
    """How one cell of a study ended."""

    cell: str
    status: Literal["run", "there", "in use", "failed"]
    """`there`: somebody else finished it in the meantime"""
    seconds: float = 0.0
    accuracy: float | None = None
    """under the method's own server"""
    reason: str = ""


class Observer:
    """Watches and does nothing. Displays and trackers override the events that they show."""

    def begin(self, experiment: Experiment, dataset: Dataset, partition: Partition) -> None:
        """A run has its data and is about to train its first client."""

    def epoch(self, client: int, epoch: int, row: Mapping[str, float], samples: int) -> None:
        """A client ended an epoch over `samples` images; `row` is what its trace says of it."""

    def measured(self, client: int, images: int) -> None:
        """A client that trains nothing has measured this many of its images."""

    def client_done(self, summary: ClientSummary, samples_seen: int) -> None:
        """A client is complete; `samples_seen` counts images x epochs."""

    def stage(self, text: str) -> None:
        """Another stage begins."""

    def features(self, done: int, total: int) -> None:
        """A backbone has computed the features of this many of the images whose features were not there."""

    def fusion_step(self, fusion: str, step: int, steps: int) -> None:
        """A fusion that trains has done this many of its steps."""

    def note(self, text: str) -> None:
        """Something was done or decided that the user may want to know."""

    def warn(self, text: str) -> None:
        """Something happened that the user should know."""

    def end(self, content: Any) -> None:
        """The run is complete; `content` is its `oneflare.simulation.results.RunResult`."""

    def cells_begin(self, cells: Sequence[str], there: int, processes: int) -> None:
        """A study is about to run these cells, so many at a time; `there` others were complete already."""

    def cell_step(self, cell: str, part: float) -> None:
        """A cell has trained this part, between 0 and 1, of its epochs."""

    def cell_done(self, outcome: Outcome) -> None:
        """A cell is complete, or has failed."""

    def cells_wait(self, cells: Sequence[str]) -> None:
        """Only cells that other processes hold are left."""


class Relay(Observer):
    """Hands every event on, as the name of the method and its arguments."""

    def __init__(self, send: Callable[[str, tuple[Any, ...]], None]) -> None:
        self._send = send

    def begin(self, experiment: Experiment, dataset: Dataset, partition: Partition) -> None:
        self._send("begin", (experiment, dataset, partition))

    def epoch(self, client: int, epoch: int, row: Mapping[str, float], samples: int) -> None:
        self._send("epoch", (client, epoch, row, samples))

    def measured(self, client: int, images: int) -> None:
        self._send("measured", (client, images))

    def client_done(self, summary: ClientSummary, samples_seen: int) -> None:
        self._send("client_done", (summary, samples_seen))

    def stage(self, text: str) -> None:
        self._send("stage", (text,))

    def features(self, done: int, total: int) -> None:
        self._send("features", (done, total))

    def fusion_step(self, fusion: str, step: int, steps: int) -> None:
        self._send("fusion_step", (fusion, step, steps))

    def note(self, text: str) -> None:
        self._send("note", (text,))

    def warn(self, text: str) -> None:
        self._send("warn", (text,))

    def end(self, content: Any) -> None:
        self._send("end", (content,))

    def cells_begin(self, cells: Sequence[str], there: int, processes: int) -> None:
        self._send("cells_begin", (cells, there, processes))

    def cell_step(self, cell: str, part: float) -> None:
        self._send("cell_step", (cell, part))

    def cell_done(self, outcome: Outcome) -> None:
        self._send("cell_done", (outcome,))

    def cells_wait(self, cells: Sequence[str]) -> None:
        self._send("cells_wait", (cells,))


class Observers(Relay):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        super().__init__(self._tell_all)
        self.observers = observers

    def _tell_all(self, event: str, arguments: tuple[Any, ...]) -> None:
        for observer in self.observers:
            tell(observer, event, arguments)


def tell(observer: Observer, event: str, arguments: tuple[Any, ...]) -> None:
    """Deliver what a `Relay` handed on."""
    getattr(observer, event)(*arguments)


def announce_client(summary: ClientSummary, epochs: int, observer: Observer) -> None:
    """Tell that a client is complete, and warn where it is left out or its learning rate was too high."""
    observer.client_done(summary, summary.samples * epochs)
    if summary.status != "trained":
        observer.warn(f"client {summary.client} is left out: {summary.reason}")
    elif summary.stable_lr is not None and summary.peak_lr > summary.stable_lr:
        observer.warn(
            f"client {summary.client}: the peak rate {summary.peak_lr:g} exceeds 2/L = "
            f"{summary.stable_lr:.2g} at the start, the largest stable rate of plain gradient descent; "
            "lower train.lr or add a warm-up"
        )
