"""The stages in order: data, clients, uploads, fusions, metrics. A rerun skips what is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from oneflare.client.files import ClientFiles
from oneflare.client.lending import can_lend
from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.core.files import exclusive, read_json, remove_partial, write_json, write_text
from oneflare.core.layers import Layer, parse_overrides, read_yaml
from oneflare.core.plugins import loaded_plugins
from oneflare.core.stopping import AGAIN, NOTHING, UNCHANGED, on_stop
from oneflare.data import Dataset
from oneflare.errors import ConfigError, RunError
from oneflare.fusion import GlobalModel, UploadSet, check_needs, load_model
from oneflare.fusion.base import FUSIONS
from oneflare.methods.resolve import given_in_python, recorded, resolve
from oneflare.nn.hardware import choose_device, one_thread
from oneflare.simulation.clients import Clients
from oneflare.simulation.features import load_data
from oneflare.simulation.files import SCRATCH, RunFiles
from oneflare.simulation.given import Given
from oneflare.simulation.kept import check_figures, recorded_experiment_code, warn_what_changed
from oneflare.simulation.results import FusionResult, RunResult
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.watching import LineObserver, in_notebook

__all__ = [
    "Result",
    "choose_folder",
    "default_folder",
    "fuse_run",
    "open_run",
    "read_experiment",
    "read_result",
    "run",
    "run_experiment",
]


NO_IDENTITY = ("fusions", "workers", "engine", "checkpoint_seconds", "code")
"""settings that do not make another experiment; the code is compared by itself"""


@dataclass(frozen=True)
class Result:
    """A finished run: its figures, and its models on demand."""

    folder: Path
    content: RunResult
    """what `result.json` says"""
    complete_before: bool = False
    """nothing had to be done"""

    @property
    def fusions(self) -> dict[str, FusionResult]:
        """by name, for example `result.fusions["count_prototypes"].accuracy`"""
        return dict(self.content.fusions)

    @property
    def headline(self) -> str:
        """the method's own fusion"""
        return self.content.headline

    @property
    def accuracy(self) -> float:
        return self.content.accuracy

    def model(self, fusion: str | None = None, encoder: nn.Module | None = None) -> GlobalModel:
        return load_model(RunFiles(self.folder).model(fusion or self.headline), encoder)

    def to_dict(self) -> dict[str, Any]:
        """The content of `result.json`."""
        return self.content.to_dict()


def run(
    *overrides: str,
    config: Path | str | None = None,
    out: Path | str | None = None,
    test: tuple[Any, Any] | None = None,
    observer: Observer | None = None,
    progress: bool | None = None,
    **keywords: Any,
) -> Result:
    """Run one federation; the same names as on the command line.

    `oneflare.run("train.lr=0.1", data="digits", alpha=0.05, method="flare", epochs=10)`

    data: a name, `(x, y)` arrays, a list of `(x, y)` (one per client), a `Dataset`, or any torch data set.
    encoder: a name, a mapping of options, or your own `nn.Module` that returns `(batch, d)`.
    backbone: a name, a mapping of options, or your own pretrained `nn.Module` that returns `(batch, D)`.
    test: `(x, y)` held-out arrays for data given as arrays.
    progress: one line on stderr that says how far it is; by default in a notebook only.
    """
    if observer is None and (in_notebook() if progress is None else progress):
        observer = LineObserver()
    given = Given.among(keywords, test)
    layers: list[Layer] = [read_yaml(Path(config))] if config is not None else []
    experiment = given.recorded(resolve(*layers, parse_overrides(overrides), keywords | given.settings()))
    dataset = given.images(experiment)
    folder = choose_folder(experiment, None if out is None else Path(out), observer)
    return run_experiment(experiment, folder, dataset=dataset, observer=observer)


def choose_folder(experiment: Experiment, out: Path | None, observer: Observer | None) -> Path:
    """The folder that was asked for, else the default; says so where changed code makes the default a new one."""
    if out is not None:
        return out
    folder = default_folder(experiment)
    warn_what_changed([(folder, experiment)], observer or Observer())
    return folder


def default_folder(experiment: Experiment) -> Path:
    """A readable name that is unique to the experiment, so that the same command finds its own folder."""
    split = experiment.partition
    skew = f"a{split.alpha:g}" if "dirichlet" in split.kind else split.kind.replace(":", "-")
    parts = [experiment.data.name, experiment.method, skew, f"c{split.clients}", f"s{experiment.seed}"]
    return Path("runs") / "-".join([*parts, experiment.training_digest()[:8]])


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    dataset: Dataset | None = None,
    observer: Observer | None = None,
    lender: Path | None = None,
) -> Result:
    """All stages; those whose files are complete are skipped.

    dataset: the images, where they were given in Python instead of by name
    lender: the folder of a finished run; if it has trained the same networks they are taken from it
    """
    observer = observer or Observer()
    files = RunFiles(folder)
    with on_stop(lambda: _what_is_kept(files)), exclusive(folder), _tidy(folder):
        claim_folder(files, experiment)
        finished = _finished(files, experiment)
        if finished is not None:
            return finished
        choose_device(experiment.train.device)
        named = dataset is None
        if named:
            observer.stage("reading data")
        dataset = load_data(experiment, observer, dataset)
        for note in dataset.notes if named else ():
            observer.note(note)
        federation = Simulation.build(experiment, files, dataset)
        write_json(files.partition, federation.partition.to_dict())
        observer.begin(experiment, dataset, federation.partition)
        with one_thread():
            summaries = federation.train(observer, _clients_of(lender, experiment, dataset))
            uploads = federation.collect(summaries, observer)
            federation.fuse(experiment.fusions, uploads, observer)
        content = federation.result(summaries, uploads)
        content.write(files.result)
        observer.end(content)
    return Result(folder, content)


def _clients_of(lender: Path | None, experiment: Experiment, dataset: Dataset) -> Clients | None:
    """The clients of a finished run on the same data, if their networks are those that the experiment trains."""
    if lender is None or not RunFiles(lender).result.exists():
        return None
    lent = read_experiment(lender)
    return Simulation.build(lent, RunFiles(lender), dataset).clients if can_lend(lent, experiment) else None


def _what_is_kept(files: RunFiles) -> str:
    places = [place for folder in ("clients", SCRATCH) for place in sorted((files.folder / folder).glob("*"))]
    clients = [ClientFiles(place) for place in places]
    done = sum(client.summary.exists() for client in clients)
    begun = sum(client.checkpoint.exists() for client in clients)
    if not done and not begun:
        return NOTHING
    finished = f"{done} client{'' if done == 1 else 's'} finished" if done else ""
    checkpoints = f"{begun} with a checkpoint" if begun else ""
    return f"{', '.join(filter(None, (finished, checkpoints)))}; {AGAIN}"


@contextlib.contextmanager
def _tidy(folder: Path) -> Iterator[None]:
    """Clears what killed writers left half-written: before, and after workers were stopped in the middle."""
    remove_partial(folder)
    try:
        yield
    finally:
        remove_partial(folder)


def open_run(folder: Path, observer: Observer) -> tuple[Simulation, UploadSet]:
    """A finished run with its data and its verified uploads."""
    files = RunFiles(folder)
    experiment = read_experiment(folder)
    if not files.result.exists():
        raise RunError(f"{folder} is not finished; run it to the end first")
    if given_in_python(experiment):
        raise RunError(
            f"{folder} used arrays or an encoder given in Python; add the fusion to `fusions` and run it again"
        )
    _check_code(folder, experiment, observer)
    federation = Simulation.build(experiment, files, load_data(experiment, observer))
    return federation, federation.collect(RunResult.read(files.result).clients, observer)


def _check_code(folder: Path, experiment: Experiment, observer: Observer) -> None:
    """Uploads of another arithmetic are refused; those of another version of a plugin are used, and that is said."""
    today = resolve(experiment.model_dump(mode="json")).code
    changed = " and another ".join(today.differences(experiment.code))
    if today.arithmetic != experiment.code.arithmetic:
        raise RunError(f"{folder} was trained with another {changed}; run the experiment again in another folder")
    if changed:
        observer.warn(f"{folder} was trained with another {changed}; its uploads are used as they are")


def fuse_run(folder: Path, specs: Sequence[Mapping[str, Any]], observer: Observer | None = None) -> Result:
    """Add fusions to a finished run without training; the same uploads feed them.

    A name alone is the run's own fusion with its options where it has it, else the fusion with its defaults.
    """
    observer = observer or Observer()
    files = RunFiles(folder)
    complete = complete_specs(read_experiment(folder), specs)  # a folder that is no run is left as it is
    with on_stop(lambda: UNCHANGED), exclusive(folder), _tidy(folder), one_thread():
        federation, uploads = open_run(folder, observer)
        check_needs(complete, uploads.offered, "; choose another fusion")
        content = RunResult.read(files.result)
        complete += _others_outdated(federation.experiment, content.fusions, complete)
        federation.fuse(complete, uploads, observer)
        fresh = {spec["name"]: FusionResult.read(files.metrics(spec["name"])) for spec in complete}
        content = replace(content, fusions={**content.fusions, **fresh})
        content.write(files.result)
    return Result(folder, content)


def _others_outdated(
    experiment: Experiment, fusions: Mapping[str, FusionResult], asked: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Fusions of a run whose figures older code gave: one table does not hold both."""
    names = {spec["name"] for spec in asked}
    old = [name for name, row in fusions.items() if row.older_code(name) is not None]
    specs = [{"name": name, **(fusions[name].options or {})} for name in old if name not in names]
    return complete_specs(experiment, specs)


def complete_specs(experiment: Experiment, specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    own = {spec["name"]: spec for spec in experiment.fusions}
    chosen = [own.get(spec["name"], spec) if set(spec) == {"name"} else spec for spec in specs]
    return [FUSIONS.complete(spec, f"fusion {spec['name']}") for spec in chosen]


def read_experiment(folder: Path) -> Experiment:
    path = RunFiles(folder).experiment
    if not path.exists():
        raise RunError(f"{folder} is not a run folder (no experiment.yaml)")
    try:
        experiment = recorded(read_yaml(path))
    except ConfigError:
        missing = _missing_plugins(RunFiles(folder))
        if not missing:
            raise
        names = ",".join(missing)
        raise RunError(
            f"{folder} was made with the plugin {names}, which is not loaded; "
            f"oneflare --plugin {missing[0]} ..., or set ONEFLARE_PLUGINS={names}"
        ) from None
    return experiment.model_copy(update={"code": recorded_experiment_code(folder)})


def _missing_plugins(files: RunFiles) -> list[str]:
    """What the run was made with and this process has not imported."""
    used = read_json(files.plugins) if files.plugins.exists() else []
    return [str(name) for name in used if name not in loaded_plugins()]


def read_result(folder: Path) -> Result:
    files = RunFiles(folder)
    if not files.experiment.exists():
        raise RunError(f"{folder} is not a run folder (no experiment.yaml)")
    if not files.result.exists():
        raise RunError(f"{folder} is not finished; run the same command again to go on")
    content = RunResult.read(files.result)
    check_figures(folder, content)
    return Result(folder, content, complete_before=True)


def claim_folder(files: RunFiles, experiment: Experiment) -> None:
    """A folder belongs to one experiment; only the list of fusions may grow.

    An experiment that ended before its images were divided, for example because they could not be read, has left
    nothing but its settings, and another one may take its place.
    """
    if files.experiment.exists() and files.partition.exists():
        old = read_experiment(files.folder)
        changed = " and another ".join(experiment.code.differences(old.code))
        if changed and old.settings_digest() == experiment.settings_digest():
            raise RunError(
                f"{files.folder} was made with another {changed}; choose another --out for a new run (this one is kept)"
            )
        if old.training_digest() != experiment.training_digest():
            place = _first_difference(old.model_dump(mode="json"), experiment.model_dump(mode="json"))
            raise RunError(f"{files.folder} holds another experiment ({place}); choose another --out")
    if loaded_plugins():
        write_json(files.plugins, loaded_plugins())
    write_text(files.experiment, experiment.to_yaml())


def _first_difference(old: Any, new: Any, place: str = "") -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if old.get(key) != new.get(key) and key not in NO_IDENTITY:
                return _first_difference(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    return f"{place} was {old!r}, now {new!r}"


def _finished(files: RunFiles, experiment: Experiment) -> Result | None:
    if not files.result.exists():
        return None
    content = RunResult.read(files.result)
    there = content.fusions
    if any(spec["name"] not in there or not there[spec["name"]].made_with(spec) for spec in experiment.fusions):
        return None
    return Result(files.folder, content, complete_before=True)
