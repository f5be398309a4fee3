"""Observers that log a run to TensorBoard or MLflow. Both are optional packages, imported when a run begins."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.data import Dataset, Partition
from oneflare.errors import ConfigError, did_you_mean
from oneflare.simulation.results import RunResult
from oneflare.simulation.stages import default_folder

TRACKERS = ("tensorboard", "mlflow")
FOLDER = Path("runs/tensorboard")
STORE = "sqlite:///runs/mlflow.db"
SQLITE = "sqlite:///"
FINAL = ("balanced_accuracy", "worst_class", "calibration_error", "fuse_seconds")
"""of a fusion, after its accuracy, which is drawn over epochs"""
TRACE_NAMES = {"accuracy": "training_accuracy"}
"""a client's accuracy is on the images it trains on, unlike that of a fusion"""
MOST_PARAMETERS = 100
"""that MLflow takes in one batch"""
LONGEST = 500
"""characters of a parameter's value"""


class TensorBoard(Observer):
    """Scalars per client and epoch, and every fusion's accuracy, in `<folder>/<name of the run>`."""

    def __init__(self, folder: Path | str = FOLDER) -> None:
        _import_tensorboard()
        self.folder = Path(folder)
        self.writer: Any = None

    @property
    def hint(self) -> str:
        return f"tensorboard --logdir {self.folder}"

    def begin(self, experiment: Experiment, _dataset: Dataset, _partition: Partition) -> None:
        self.writer = _import_tensorboard()(str(self.folder / run_name(experiment)))
        self.writer.add_text("experiment", f"```yaml\n{experiment.to_yaml()}\n```", 0)

    def epoch(self, client: int, epoch: int, row: Mapping[str, float], _samples: int) -> None:
        for key, value in numbers(row):
            self.writer.add_scalar(f"{TRACE_NAMES.get(key, key)}/client {client}", value, epoch)

    def end(self, content: RunResult) -> None:
        for fusion, row in content.fusions.items():
            for point in row.history:
                self.writer.add_scalar(f"accuracy/{fusion}", point.accuracy, point.epoch)
            for key in FINAL:
                self.writer.add_scalar(f"{key}/{fusion}", getattr(row, key), content.epochs)
        self.writer.close()


class MLflow(Observer):
    """A run per federation in the experiment `oneflare`; one that was interrupted is gone on with."""

    def __init__(self, uri: str | None = None, experiment: str = "oneflare") -> None:
        self.uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or STORE
        if self.uri.startswith(SQLITE):
            Path(self.uri.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
        self.client = _import_mlflow()(tracking_uri=self.uri)
        found = self.client.get_experiment_by_name(experiment)
        self.experiment = self.client.create_experiment(experiment) if found is None else found.experiment_id
        self.run = ""

    @property
    def hint(self) -> str:
        return f"mlflow ui --backend-store-uri {self.uri}"

    def begin(self, experiment: Experiment, _dataset: Dataset, _partition: Partition) -> None:
        name = run_name(experiment)
        wanted = f"attributes.status = 'RUNNING' and attributes.run_name = '{name}'"
        open_runs = self.client.search_runs([self.experiment], wanted)
        if open_runs:
            self.run = open_runs[0].info.run_id
            return
        self.run = self.client.create_run(self.experiment, run_name=name).info.run_id
        from mlflow.entities import Param

        settings = [Param(key, str(value)[:LONGEST]) for key, value in flat(experiment.model_dump(mode="json"))]
        for start in range(0, len(settings), MOST_PARAMETERS):
            self.client.log_batch(self.run, params=settings[start : start + MOST_PARAMETERS])

    def epoch(self, client: int, epoch: int, row: Mapping[str, float], _samples: int) -> None:
        self._log([(f"client_{client:03d}/{TRACE_NAMES.get(key, key)}", value, epoch) for key, value in numbers(row)])

    def end(self, content: RunResult) -> None:
        last = content.epochs
        for fusion, row in content.fusions.items():
            self._log([(f"{fusion}/accuracy", point.accuracy, point.epoch) for point in row.history])
            self._log([(f"{fusion}/{key}", getattr(row, key), last) for key in FINAL])
        self._log([(key, value, last) for key, value in numbers(asdict(content.cost))])
        self._log([("accuracy", content.accuracy, last)])
        self.client.set_terminated(self.run)

    def _log(self, values: Sequence[tuple[str, float, int]]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.run, metrics=[Metric(key, value, now, step) for key, value, step in values])


def tracker(name: str) -> TensorBoard | MLflow:
    """By name, at its usual place."""
    if name not in TRACKERS:
        raise ConfigError(f"--track: unknown tracker '{name}'{did_you_mean(name, TRACKERS)}")
    return TensorBoard() if name == "tensorboard" else MLflow()


def run_name(experiment: Experiment) -> str:
    return default_folder(experiment).name


def numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What can be drawn over epochs; a value that is not finite is left out."""
    for key, value in row.items():
        if key != "epoch" and isinstance(value, int | float) and math.isfinite(value):
            yield key, float(value)


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings with dotted names; absent ones are left out."""
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from flat(item, f"{prefix}{key}.")
        elif item is not None:
            yield f"{prefix}{key}", item


def _import_tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(_missing("tensorboard")) from None
    return SummaryWriter


def _import_mlflow() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise ConfigError(_missing("mlflow")) from None
    return MlflowClient


def _missing(name: str) -> str:
    return f"--track {name}: the package is not installed; pip install 'oneflare[track]'"
