from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from conftest import TINY
from oneflare.client.files import ClientFiles, snapshot_epochs
from oneflare.client.job import ClientJob
from oneflare.client.loop import build_training
from oneflare.client.observer import Observer, Relay
from oneflare.client.training import train_client
from oneflare.data import ClientData, Split, load
from oneflare.methods.resolve import resolve
from oneflare.nn.hardware import bfloat16_speedup
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation


def federation(folder, *layers):
    experiment = resolve(TINY, {"method": "flare"}, *layers)
    return Simulation.build(experiment, RunFiles(folder), load(experiment.data))


def job_of(made: Simulation, client: int, folder) -> ClientJob:
    return ClientJob(made.experiment, made.contract, client, folder, flip=False)


def test_snapshots_are_spread_before_the_end():
    assert snapshot_epochs(40, 4) == [8, 16, 24, 32]
    assert snapshot_epochs(3, 2) == [1, 2]
    assert snapshot_epochs(5, 0) == []
    assert snapshot_epochs(1, 0) == []


def test_a_client_learns_its_own_data(tmp_path):
    made = federation(tmp_path, {"epochs": 15})
    summary = train_client(job_of(made, 0, tmp_path / "c"), made.clients.data(0))
    trace = ClientFiles(tmp_path / "c").read_trace()
    assert summary.status == "trained"
    assert trace[-1]["local"] < 0.7 * trace[0]["local"]
    assert summary.accuracy_own == trace[-1]["accuracy"] > 0.5
    names = {"cls", "supcon", "proto_feature", "proto_separation", "align", "lambda_raw", "lambda_effective"}
    assert names | {"sigma_local2", "sigma_align2", "accuracy", "progress", "epoch"} <= set(trace[0])


def test_schedules_run_on_global_progress(tmp_path):
    """Never per epoch: the effective lambda of an annealed rule falls from epoch to epoch until the end."""
    made = federation(tmp_path, {"method": "etf_annealed", "epochs": 6, "train": {"schedule": "linear"}})
    train_client(job_of(made, 0, tmp_path / "c"), made.clients.data(0))
    rows = ClientFiles(tmp_path / "c").read_trace()
    lambdas = [row["lambda_effective"] for row in rows]
    assert lambdas == sorted(lambdas, reverse=True)
    assert lambdas[0] > 15
    assert lambdas[-1] < 4
    for row in rows:
        assert row["lambda_effective"] == pytest.approx(20 * (1 - row["progress"]))
        assert row["lr"] == pytest.approx(0.05 * (1 - row["progress"]))


@pytest.mark.numeric
def test_interrupted_training_resumes_bit_for_bit(tmp_path):
    made = federation(tmp_path, {"epochs": 6, "train": {"checkpoint_seconds": 0, "snapshots": 2}})
    data = made.clients.data(1)
    train_client(job_of(made, 1, tmp_path / "whole"), data)

    class Cut(Exception):
        pass

    class CutAfter(Observer):
        def __init__(self, limit):
            self.limit = limit

        def epoch(self, client, epoch, row, samples):
            if epoch == self.limit:
                raise Cut

    for limit in (2, 3, 5):
        with pytest.raises(Cut):
            train_client(job_of(made, 1, tmp_path / "cut"), data, CutAfter(limit))
    train_client(job_of(made, 1, tmp_path / "cut"), data)
    for name in ("upload.safetensors", "trace.jsonl", "snapshots/epoch-00002.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not (tmp_path / "cut" / "checkpoint").exists()


@pytest.mark.parametrize("method", ["fafi", "drcl", "etf_annealed", "flare"])
def test_state_of_every_kind_of_training_round_trips(tmp_path, method):
    from oneflare.core.files import load_state, save_state

    made = federation(tmp_path, {"method": method})
    data = made.clients.data(0)
    one = build_training(job_of(made, 0, tmp_path), data)
    one.run_epoch()
    save_state(tmp_path / "state", one.state_dict())
    two = build_training(job_of(made, 0, tmp_path), data)
    two.load_state_dict(load_state(tmp_path / "state"))
    assert one.run_epoch() == two.run_epoch()


def test_an_exploding_client_stops_with_a_clear_message(tmp_path):
    made = federation(tmp_path, {"train": {"lr": 1e30, "clip": 1e30}})
    summary = train_client(job_of(made, 0, tmp_path / "c"), made.clients.data(0))
    assert summary.status == "failed"
    assert "NaN or infinite in epoch" in summary.reason
    assert not (tmp_path / "c" / "upload.safetensors").exists()


def test_a_complete_client_is_not_trained_again(tmp_path):
    made = federation(tmp_path)
    first = train_client(job_of(made, 0, tmp_path / "c"), made.clients.data(0))
    assert (
        train_client(job_of(made, 0, tmp_path / "c"), made.clients.data(0), Relay(lambda *_: pytest.fail("trained")))
        == first
    )


def split(images, labels):
    return Split(torch.as_tensor(images), torch.as_tensor(labels))


@pytest.mark.parametrize("method", ["fedavg", "fafi", "flare"])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_few_samples_and_one_class_train(tmp_path, method, rows):
    made = federation(tmp_path, {"method": method})
    images = made.dataset.train.images[:rows]
    data = ClientData.of(Split(images, torch.full((rows,), 3)), 10)
    summary = train_client(job_of(made, 0, tmp_path / "c"), data)
    assert summary.status == "trained"
    assert (summary.samples, summary.classes) == (rows, 1)


def test_identical_and_constant_images_train(tmp_path):
    made = federation(tmp_path)
    for value in (0, 255):
        images = torch.full((20, 1, 8, 8), value, dtype=torch.uint8)
        data = ClientData.of(Split(images, torch.arange(20) % 10), 10)
        assert train_client(job_of(made, 0, tmp_path / str(value)), data).status == "trained"


def test_an_empty_client_is_reported(tmp_path):
    made = federation(tmp_path)
    data = ClientData.of(made.dataset.train.take(torch.zeros(0, dtype=torch.long)), 10)
    assert train_client(job_of(made, 0, tmp_path / "c"), data).status == "empty"


def test_clients_do_not_depend_on_each_other(tmp_path):
    made = federation(tmp_path)
    for name, order in (("forward", (0, 1)), ("backward", (1, 0))):
        for client in order:
            train_client(job_of(made, client, tmp_path / name / str(client)), made.clients.data(client))
    for client in (0, 1):
        one, two = (tmp_path / name / str(client) / "upload.safetensors" for name in ("forward", "backward"))
        assert one.read_bytes() == two.read_bytes()


def test_bfloat16_trains_where_the_processor_can(tmp_path):
    if bfloat16_speedup(torch.device("cpu")) == 0:
        pytest.skip("this processor dies of bfloat16 convolutions (measured in a child process)")
    made = federation(tmp_path, {"train": {"precision": "bfloat16"}})
    assert train_client(job_of(made, 0, tmp_path / "c"), made.clients.data(0)).status == "trained"


def test_training_goes_on_in_the_precision_of_its_checkpoint(tmp_path):
    """Also where the machine would decide otherwise by now."""
    made = federation(tmp_path, {"train": {"precision": "float32"}})
    training = build_training(job_of(made, 0, tmp_path / "c"), made.clients.data(0))
    training.load_state_dict(training.state_dict() | {"precision": "bfloat16"})
    assert training.precision == torch.bfloat16
    earlier = {name: value for name, value in training.state_dict().items() if name != "precision"}
    training.load_state_dict(earlier)
    assert training.precision == torch.bfloat16


def test_trace_is_plain_json_lines(tmp_path):
    made = federation(tmp_path)
    train_client(job_of(made, 0, tmp_path / "c"), made.clients.data(0))
    rows = [json.loads(line) for line in (tmp_path / "c" / "trace.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert dataclasses.asdict(ClientFiles(tmp_path / "c").read_summary())["status"] == "trained"
