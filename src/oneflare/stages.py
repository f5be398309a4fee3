"""The stages in order: data, clients, uploads, fusions, metrics. A rerun skips what is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from oneflare.client import ClientSummary
from oneflare.config import Experiment, Layer, parse_overrides, read_yaml
from oneflare.data import Dataset, data_digest, given_data, load
from oneflare.errors import ConfigError, RunError
from oneflare.federation import Federation, Observer, RunFiles
from oneflare.files import digest_of, exclusive, read_json, remove_partial, tensor_digest, write_json, write_text
from oneflare.fusion import GlobalModel, UploadSet, check_needs, load_model, made_with
from oneflare.fusion.base import FUSIONS
from oneflare.methods.resolve import ARRAYS, resolve
from oneflare.nn.encoders import CUSTOM
from oneflare.nn.hardware import choose_device, one_thread
from oneflare.plugins import loaded_plugins
from oneflare.watch import LineObserver, in_notebook

__all__ = [
    "Observer",
    "Result",
    "RunFiles",
    "default_folder",
    "fuse_run",
    "open_run",
    "read_experiment",
    "read_result",
    "run",
    "run_experiment",
]


@dataclass(frozen=True)
class Result:
    """A finished run: its figures, and its models on demand."""

    folder: Path
    content: dict[str, Any]
    complete_before: bool = False
    """nothing had to be done"""

    @property
    def fusions(self) -> dict[str, dict[str, Any]]:
        return dict(self.content["fusions"])

    @property
    def headline(self) -> str:
        """the method's own fusion"""
        return str(self.content["headline"])

    @property
    def accuracy(self) -> float:
        return float(self.fusions[self.headline]["accuracy"])

    def model(self, fusion: str | None = None, encoder: nn.Module | None = None) -> GlobalModel:
        return load_model(RunFiles(self.folder).model(fusion or self.headline), encoder)

    def to_dict(self) -> dict[str, Any]:
        return self.content


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
    test: `(x, y)` held-out arrays for data given as arrays.
    progress: one line on stderr that says how far it is; by default in a notebook only.
    """
    if observer is None and (in_notebook() if progress is None else progress):
        observer = LineObserver()
    dataset, parts = given_data(keywords.get("data"), test)
    if dataset is not None:
        keywords["data"] = {"name": ARRAYS, "digest": data_digest(dataset)}
        if dataset.public is not None:
            keywords["data"]["public"] = len(dataset.public.labels)
    if parts is not None:
        keywords["partition"] = {"kind": "given", "clients": len(parts)}
    encoder = keywords.get("encoder")
    if not isinstance(encoder, nn.Module):
        encoder = None
    else:
        keywords["encoder"] = {
            "name": CUSTOM,
            "kind": type(encoder).__qualname__,
            "digest": _module_digest(encoder),
        }
    layers: list[Layer] = [read_yaml(Path(config))] if config is not None else []
    experiment = resolve(*layers, parse_overrides(overrides), keywords)
    if encoder is not None and not experiment.trains:
        raise ConfigError(
            f"encoder: method '{experiment.method}' trains no network, so a module of your own would not be used; "
            "leave it out, or choose a method that trains"
        )
    if dataset is not None:
        if parts is not None and experiment.data.public is not None:
            raise ConfigError("data.public: images that have owners cannot be set aside; give a Dataset with `public`")
        dataset = dataset.set_aside(experiment.data.public, experiment.data.seed)
    folder = Path(out) if out is not None else default_folder(experiment)
    return run_experiment(experiment, folder, dataset=dataset, parts=parts, encoder=encoder, observer=observer)


def _module_digest(module: nn.Module) -> str:
    state = module.state_dict()
    return digest_of([str(module), {name: tensor_digest(tensor.cpu()) for name, tensor in state.items()}])


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
    parts: Sequence[np.ndarray[Any, Any]] | None = None,
    encoder: nn.Module | None = None,
    observer: Observer | None = None,
) -> Result:
    """All stages; those whose files are complete are skipped."""
    observer = observer or Observer()
    files = RunFiles(folder)
    with exclusive(folder), _tidy(folder):
        claim_folder(files, experiment)
        finished = _finished(files, experiment)
        if finished is not None:
            return finished
        choose_device(experiment.train.device)
        if dataset is None:
            observer.stage("reading data")
            dataset = load(experiment.data)
        federation = Federation.build(experiment, files, dataset, parts, encoder)
        write_json(files.partition, federation.partition.to_dict())
        observer.begin(experiment, dataset, federation.partition)
        with one_thread():
            summaries = federation.train(observer)
            uploads = federation.collect(summaries, observer)
            federation.fuse(experiment.fusions, uploads, observer)
        content = federation.result(summaries, uploads)
        write_json(files.result, content)
        observer.end(content)
    return Result(folder, content)


@contextlib.contextmanager
def _tidy(folder: Path) -> Iterator[None]:
    """Clears what killed writers left half-written: before, and after workers were stopped in the middle."""
    remove_partial(folder)
    try:
        yield
    finally:
        remove_partial(folder)


def open_run(folder: Path, observer: Observer) -> tuple[Federation, UploadSet]:
    """A finished run with its data and its verified uploads."""
    files = RunFiles(folder)
    experiment = read_experiment(folder)
    if not files.result.exists():
        raise RunError(f"{folder} is not finished; run it to the end first")
    if experiment.data.name == ARRAYS or experiment.encoder["name"] == CUSTOM:
        raise RunError(
            f"{folder} used arrays or an encoder given in Python; add the fusion to `fusions` and run it again"
        )
    federation = Federation.build(experiment, files, load(experiment.data), None, None)
    summaries = [ClientSummary(**row) for row in read_json(files.result)["clients"]]
    return federation, federation.collect(summaries, observer)


def fuse_run(folder: Path, specs: Sequence[Mapping[str, Any]], observer: Observer | None = None) -> Result:
    """Add fusions to a finished run without training; the same uploads feed them.

    A name alone is the run's own fusion with its options where it has it, else the fusion with its defaults.
    """
    observer = observer or Observer()
    files = RunFiles(folder)
    complete = complete_specs(read_experiment(folder), specs)  # a folder that is no run is left as it is
    with exclusive(folder), _tidy(folder), one_thread():
        federation, uploads = open_run(folder, observer)
        check_needs(complete, uploads.offered, "; choose another fusion")
        federation.fuse(complete, uploads, observer)
        content = read_json(files.result)
        for spec in complete:
            content["fusions"][spec["name"]] = read_json(files.metrics(spec["name"]))
        write_json(files.result, content)
    return Result(folder, content)


def complete_specs(experiment: Experiment, specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    own = {spec["name"]: spec for spec in experiment.fusions}
    chosen = [own.get(spec["name"], spec) if set(spec) == {"name"} else spec for spec in specs]
    return [FUSIONS.complete(spec, f"fusion {spec['name']}") for spec in chosen]


def read_experiment(folder: Path) -> Experiment:
    path = RunFiles(folder).experiment
    if not path.exists():
        raise RunError(f"{folder} is not a run folder (no experiment.yaml)")
    try:
        return resolve(read_yaml(path))
    except ConfigError:
        missing = _missing_plugins(RunFiles(folder))
        if not missing:
            raise
        names = ",".join(missing)
        raise RunError(
            f"{folder} was made with the plugin {names}, which is not loaded; "
            f"oneflare --plugin {missing[0]} ..., or set ONEFLARE_PLUGINS={names}"
        ) from None


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
    return Result(folder, read_json(files.result), complete_before=True)


def claim_folder(files: RunFiles, experiment: Experiment) -> None:
    """A folder belongs to one experiment; only the list of fusions may grow."""
    if files.experiment.exists():
        old = read_experiment(files.folder)
        if old.training_digest() != experiment.training_digest():
            place = _first_difference(old.model_dump(mode="json"), experiment.model_dump(mode="json"))
            raise RunError(f"{files.folder} holds another experiment ({place}); choose another --out")
    if loaded_plugins():
        write_json(files.plugins, loaded_plugins())
    write_text(files.experiment, experiment.to_yaml())


def _first_difference(old: Any, new: Any, place: str = "") -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if old.get(key) != new.get(key) and key not in (
                "fusions",
                "workers",
                "engine",
                "checkpoint_seconds",
            ):
                return _first_difference(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    return f"{place} was {old!r}, now {new!r}"


def _finished(files: RunFiles, experiment: Experiment) -> Result | None:
    if not files.result.exists():
        return None
    content = read_json(files.result)
    there = content["fusions"]
    if any(spec["name"] not in there or not made_with(there[spec["name"]], spec) for spec in experiment.fusions):
        return None
    return Result(files.folder, content, complete_before=True)
