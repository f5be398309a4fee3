"""Progress in a Python session: what a reader of the notebook or of the log sees."""

from __future__ import annotations

import io
import sys

from rich.console import Console
from rich.progress import Progress, TextColumn

import oneflare
from conftest import TINY
from oneflare.cli.progress import TerminalObserver
from oneflare.data import load, split_clients
from oneflare.methods.resolve import resolve
from oneflare.simulation.watching import LineObserver


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def begun(rewrite: bool) -> tuple[LineObserver, io.StringIO, Clock, list[int]]:
    experiment = resolve(TINY, {"method": "fafi", "epochs": 4})
    dataset = load(experiment.data)
    partition = split_clients(dataset.train.labels.numpy(), 10, experiment.partition, experiment.seed)
    stream, clock = io.StringIO(), Clock()
    observer = LineObserver(stream, rewrite=rewrite, clock=clock)
    observer.begin(experiment, dataset, partition)
    return observer, stream, clock, list(partition.sizes)


def test_one_line_is_rewritten_with_the_time_left():
    observer, stream, clock, sizes = begun(rewrite=True)
    for epoch in (1, 2):
        clock.now += 5
        for client, size in enumerate(sizes):
            observer.epoch(client, epoch, {}, size)
    shown = stream.getvalue()
    assert "\n" not in shown
    last = shown.split("\r")[-1].rstrip()
    assert last.startswith("fafi, seed 0: ")
    clock.now += 0.6
    observer.epoch(0, 2, {}, sizes[0])
    assert stream.getvalue().split("\r")[-1].rstrip() == f"fafi, seed 0: 50 %, 0 of {len(sizes)} clients, 11 s left"


def test_a_shorter_line_leaves_nothing_of_a_longer_one():
    observer, stream, _, _ = begun(rewrite=True)
    observer._write("a long line", final=False)
    observer._write("short", final=True)
    assert stream.getvalue().endswith("\rshort      \n")


def test_in_a_notebook_it_shows_by_itself_and_elsewhere_not(tmp_path, capsys, monkeypatch):
    layers = TINY | {"method": "fafi"}
    oneflare.run(**layers, out=tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    oneflare.run(**layers, out=tmp_path / "log", progress=True)
    said = capsys.readouterr().err
    assert "\r" not in said  # not a terminal: a line per client
    assert "3 of 3 clients" in said
    monkeypatch.setitem(sys.modules, "ipykernel", object())
    result = oneflare.run(**layers, out=tmp_path / "notebook")
    said = capsys.readouterr().err
    assert said.startswith("\rfafi, seed 0: 0 %")
    assert said.count("\n") == 1  # one line in the notebook, however long it takes
    assert f"{result.headline} {100 * result.accuracy:.1f} %" in said


def test_clients_that_measure_images_show_how_far_they_are():
    observer, stream, clock, sizes = begun(rewrite=True)
    observer.total = sum(sizes)
    clock.now += 10
    observer.measured(0, sum(sizes) // 2)
    assert "50 %, 0 of" in stream.getvalue().split("\r")[-1]
    assert "10 s left" in stream.getvalue().split("\r")[-1]


def terminal(bar: bool):
    experiment = resolve(TINY, {"method": "analytic"})
    dataset = load(experiment.data)
    partition = split_clients(dataset.train.labels.numpy(), 10, experiment.partition, experiment.seed)
    console = Console(file=io.StringIO())
    shown = Progress(TextColumn("{task.fields[clients]}"), console=console) if bar else None
    observer = TerminalObserver(console, shown, table=False)
    observer.begin(experiment, dataset, partition)
    return observer, list(partition.sizes)


def test_a_log_says_how_many_images_are_measured_and_how_long_the_rest_takes():
    observer, sizes = terminal(bar=False)
    for images in (1, sizes[0] // 2, sizes[0]):
        observer.measured(0, images)
    lines = [line for line in observer.console.file.getvalue().splitlines() if "images" in line]
    assert lines[-1].split(",")[0].strip() == f"{sizes[0]} of {sum(sizes)} images"
    assert lines[-1].endswith("s left")


def test_the_bar_counts_measured_images():
    observer, sizes = terminal(bar=True)
    observer.measured(1, 5)
    observer.measured(1, 9)
    (task,) = observer.bar.tasks
    assert (task.completed, task.total) == (9, sum(sizes))
