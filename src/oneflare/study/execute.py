"""Runs the cells of studies, and skips those that are complete or held by another process.

Cells run side by side in worker processes, each on one core. Cells that train the same networks and differ in what is
sent or shown beside them run one after the other: the first trains, the others take its networks. Several shells may
work on one folder of runs: a cell is locked while it is run, the lock dies with its holder, and whoever comes later
reads what the other has finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

from oneflare.client.lending import can_lend
from oneflare.client.observer import Observer, Outcome
from oneflare.core.config import DataConfig, Experiment
from oneflare.core.files import exclusive
from oneflare.core.stopping import AGAIN, NOTHING, on_stop
from oneflare.data import Dataset, Partition, load
from oneflare.errors import InUseError, OneFlareError
from oneflare.simulation.engines import default_workers, map_tasks
from oneflare.simulation.features import load_data
from oneflare.simulation.files import RunFiles
from oneflare.simulation.kept import warn_what_changed
from oneflare.simulation.results import RunResult
from oneflare.simulation.stages import read_experiment, run_experiment
from oneflare.study.answers import FILE as ANSWERS
from oneflare.study.answers import has_answers, keep_answers
from oneflare.study.archive import keep_figures
from oneflare.study.cells import Cell, families

POLL_SECONDS = 2.0
LOOKING_SECONDS = 60.0
"""how long another process may look at a run that this one has finished"""


def is_complete(cell: Cell, runs: Path) -> bool:
    """Whether the run, all fusions and the answers to the test images are there."""
    folder = cell.folder(runs)
    if not (folder / "result.json").exists() or not (folder / ANSWERS).exists():
        return False
    fusions = RunResult.read(folder / "result.json").fusions
    return all(
        spec["name"] in fusions
        and fusions[spec["name"]].made_with(spec)
        and has_answers(folder, spec["name"], fusions[spec["name"]])
        for spec in cell.experiment.fusions
    )


def default_processes() -> int:
    """One per core; a GPU takes one cell at a time."""
    import torch

    return 1 if torch.cuda.is_available() else default_workers()


@dataclass(frozen=True)
class Desk:
    """Where cells are run, and which of them train the same networks."""

    runs: Path
    archive: Path | None
    relatives: Mapping[str, Sequence[Cell]]
    """the family of a cell, by its name"""

    def lender(self, cell: Cell) -> Path | None:
        """The folder of a finished cell whose uploads are there and hold the networks that this one trains."""
        for other in self.relatives[cell.name]:
            files = RunFiles(other.folder(self.runs))
            uploads = (files.client(client).upload for client in range(other.experiment.partition.clients))
            there = other is not cell and files.result.exists() and any(path.exists() for path in uploads)
            if there and can_lend(other.experiment, cell.experiment):
                return files.folder
        return None


def run_cells(
    cells: Sequence[Cell],
    runs: Path,
    *,
    processes: int | None = None,
    observer: Observer | None = None,
    archive: Path | None = None,
) -> list[Outcome]:
    """Run what is missing; returns the outcomes of what was not complete before, failures among them.

    archive: where the figures of finished cells are kept, beside their runs.
    """
    observer = observer or Observer()
    waiting = [cell for cell in cells if not is_complete(cell, runs)]
    relatives = {cell.name: family for family in families(cells) for cell in family}
    processes = min(processes or default_processes(), max(len(families(waiting)), 1))
    observer.cells_begin([cell.name for cell in waiting], len(cells) - len(waiting), processes)
    warn_what_changed([(cell.folder(runs), cell.experiment) for cell in waiting], observer)
    outcomes: list[Outcome] = []
    while waiting:
        with on_stop(lambda: _what_is_kept(cells, runs)):
            found = _round(families(waiting), partial(_work, Desk(runs, archive, relatives)), processes, observer)
        outcomes += [outcome for outcome in found if outcome.status != "in use"]
        held = {outcome.cell for outcome in found if outcome.status == "in use"}
        if len(held) == len(waiting):
            observer.cells_wait(sorted(held))
            time.sleep(POLL_SECONDS)
        waiting = [cell for cell in waiting if cell.name in held]
    return outcomes


def _what_is_kept(cells: Sequence[Cell], runs: Path) -> str:
    done = sum(is_complete(cell, runs) for cell in cells)
    begun = any(path for cell in cells for path in cell.folder(runs).glob("clients/*/*/state.safetensors"))
    begun = begun or any(path for cell in cells for path in cell.folder(runs).glob("clients/*/summary.json"))
    return f"{done} of {len(cells)} cells are complete; {AGAIN}" if done or begun else NOTHING


def _round(
    groups: Sequence[Sequence[Cell]],
    work: Callable[[bool, Sequence[Cell], Observer], list[Outcome]],
    processes: int,
    observer: Observer,
) -> list[Outcome]:
    def end(outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.status != "in use":
                observer.cell_done(outcome)

    alone = processes == 1 or len(groups) == 1
    found = map_tasks(
        partial(work, not alone), groups, workers=1 if alone else processes, observer=observer, on_result=end
    )
    return [outcome for outcomes in found for outcome in outcomes]


def _work(desk: Desk, in_worker: bool, family: Sequence[Cell], observer: Observer) -> list[Outcome]:
    return [_run_cell(desk, in_worker, cell, observer) for cell in family]


def _run_cell(desk: Desk, in_worker: bool, cell: Cell, observer: Observer) -> Outcome:
    folder, started = cell.folder(desk.runs), time.monotonic()
    try:
        if is_complete(cell, desk.runs):
            return Outcome(cell.name, "there")
        dataset = _dataset(cell.experiment.data) if cell.experiment.backbone is None else None
        experiment = _with_all_fusions(cell.experiment, folder)
        if in_worker:  # it has one core, and may not have workers of its own
            experiment = experiment.model_copy(update={"workers": 1})
        watching = _CellObserver(cell.name, observer)
        result = run_experiment(experiment, folder, dataset=dataset, observer=watching, lender=desk.lender(cell))
        with exclusive(folder, wait_seconds=LOOKING_SECONDS):
            keep_answers(folder, cell.fusions, load_data(experiment) if dataset is None else dataset)
        if desk.archive is not None:
            keep_figures(cell, desk.runs, desk.archive)
    except InUseError:
        return Outcome(cell.name, "in use")
    except OneFlareError as error:
        return Outcome(cell.name, "failed", time.monotonic() - started, reason=str(error))
    status: Literal["run", "there"] = "there" if result.complete_before else "run"
    return Outcome(cell.name, status, time.monotonic() - started, result.accuracy)


@lru_cache(maxsize=1)
def _dataset(config: DataConfig) -> Dataset:
    """Remembered, because neighbouring cells use the same images; features of a backbone are kept in files anyway."""
    return load(config)


def _with_all_fusions(experiment: Experiment, folder: Path) -> Experiment:
    """Keep the fusions that other studies have asked of this run."""
    if not RunFiles(folder).experiment.exists():
        return experiment
    own = {spec["name"]: spec for spec in experiment.fusions}
    others = [spec for spec in read_experiment(folder).fusions if spec["name"] not in own]
    return experiment.model_copy(update={"fusions": (*own.values(), *others)})


class _CellObserver(Observer):
    """Sums up how far the run of a cell is, and passes its warnings on under the cell's name."""

    def __init__(self, cell: str, observer: Observer) -> None:
        self.cell = cell
        self.observer = observer
        self.total = 1
        self.seen: dict[int, int] = {}

    def begin(self, experiment: Experiment, _dataset: Dataset, partition: Partition) -> None:
        self.total = max(1, sum(partition.sizes) * max(experiment.epochs, 1))

    def epoch(self, client: int, epoch: int, _row: Mapping[str, float], samples: int) -> None:
        self.seen[client] = epoch * samples
        self.observer.cell_step(self.cell, min(1.0, sum(self.seen.values()) / self.total))

    def warn(self, text: str) -> None:
        self.observer.warn(f"{self.cell}: {text}")
