"""What trackers wrote, read back with the trackers' own readers."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from conftest import TINY
from oneflare.client.observer import Observer, Observers
from oneflare.errors import ConfigError
from oneflare.methods.resolve import resolve
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import run_experiment
from oneflare.simulation.tracking import MLflow, TensorBoard, run_name, tracker

# MLflow leans on deprecated parts of SQLAlchemy and leaves its connection to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def experiment():
    return resolve(TINY, {"method": "flare", "fusions": ["count_prototypes", "average"], "partition": {"clients": 2}})


def test_tensorboard_holds_every_client_and_fusion(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run_experiment(experiment(), tmp_path / "run", observer=TensorBoard(tmp_path / "logs"))
    log = EventAccumulator(str(tmp_path / "logs" / run_name(experiment())))
    log.Reload()
    for client in range(2):
        trace = RunFiles(result.folder).client(client).read_trace()
        for key, shown in (("lambda_raw",) * 2, ("local",) * 2, ("accuracy", "training_accuracy")):
            events = log.Scalars(f"{shown}/client {client}")
            assert [event.step for event in events] == [row["epoch"] for row in trace]
            assert [event.value for event in events] == pytest.approx([row[key] for row in trace])
    for name, row in result.fusions.items():
        found = [(event.step, event.value) for event in log.Scalars(f"accuracy/{name}")]
        assert found == [(point.epoch, pytest.approx(point.accuracy)) for point in row.history]
        assert log.Scalars(f"worst_class/{name}")[0].value == pytest.approx(row.worst_class)


def test_mlflow_holds_settings_curves_and_results_and_goes_on_with_an_interrupted_run(tmp_path):
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"

    class Stop(Observer):
        def epoch(self, client, epoch, row, samples):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment(), tmp_path / "run", observer=Observers(MLflow(uri), Stop()))
    observer = MLflow(uri)
    result = run_experiment(experiment(), tmp_path / "run", observer=observer)
    (run,) = observer.client.search_runs([observer.experiment])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == run_name(experiment())
    assert run.data.params["method"] == "flare"
    assert run.data.params["partition.clients"] == "2"
    assert run.data.metrics["accuracy"] == result.accuracy
    assert run.data.metrics["upload_bytes"] == result.content.cost.upload_bytes
    trace = RunFiles(result.folder).client(1).read_trace()
    curve = observer.client.get_metric_history(run.info.run_id, "client_001/lambda_raw")
    assert {point.step: point.value for point in curve} == {row["epoch"]: row["lambda_raw"] for row in trace}
    history = observer.client.get_metric_history(run.info.run_id, "average/accuracy")
    assert [point.value for point in history] == [point.accuracy for point in result.fusions["average"].history]


def test_several_observers_all_hear_everything():
    heard = []
    names = [name for name, value in vars(Observer).items() if callable(value) and not name.startswith("_")]

    def hear(name, number):
        return lambda self, *arguments: heard.append((name, number, arguments))

    both = [type("Hearing", (Observer,), {name: hear(name, number) for name in names})() for number in (1, 2)]
    for name in names:
        arguments = tuple(inspect.signature(getattr(Observer, name)).parameters)[1:]
        getattr(Observers(*both), name)(*arguments)
        assert heard[-2:] == [(name, 1, arguments), (name, 2, arguments)]
    assert "fusion_step" in names


def test_an_unknown_tracker():
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        tracker("tensorbord")


@pytest.mark.parametrize("name", ["mlflow", "tensorboard"])
def test_a_missing_package(name, monkeypatch):
    for module in [module for module in sys.modules if module.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as told:
        tracker(name)
    assert str(told.value) == f"--track {name}: the package is not installed; pip install 'oneflare[track]'"


def test_tracking_needs_no_file_until_a_run_begins(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    TensorBoard()
    assert list(Path(tmp_path).iterdir()) == []
