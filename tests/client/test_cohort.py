from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import TINY
from oneflare.client.cohort import MOST_CLIENTS, MOST_SAMPLES, cohorts, supports, train_cohort
from oneflare.client.files import ClientFiles
from oneflare.client.observer import Relay
from oneflare.client.training import train_client
from oneflare.data import ClientData, Split, load
from oneflare.methods.resolve import resolve
from oneflare.nn.given import give
from oneflare.nn.hardware import bfloat16_speedup
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=200), image=st.sampled_from([8, 32]))
def test_everybody_is_in_one_group_of_equals(sizes, image):
    groups = cohorts(sizes, image, None)
    assert sorted(client for group in groups for client in group) == list(range(len(sizes)))
    for group in groups:
        assert len({sizes[client] for client in group}) == 1
        assert len(group) <= MOST_CLIENTS
        if len(group) > 1:
            assert image == 8
            assert 0 < sizes[group[0]] <= MOST_SAMPLES
    firsts = [sizes[group[0]] for group in groups]
    assert firsts == sorted(firsts, reverse=True)


def test_the_rule_can_be_overruled():
    assert cohorts([3] * 10, 8, 1) == [[client] for client in range(10)]
    assert cohorts([90] * 4, 32, 3) == [[0, 1, 2], [3]]
    assert cohorts([0, 0], 8, 5) == [[0], [1]]


def clients(folder, method, number=4, samples=5, **layer):
    experiment = resolve(TINY, {"method": method, "epochs": 4}, layer)
    federation = Simulation.build(experiment, RunFiles(folder), load(experiment.data))
    split = federation.dataset.train
    rows = [torch.arange(samples) + samples * client for client in range(number)]
    data = [ClientData.of(split.take(part), 10) for part in rows]
    return [replace(federation.clients.job(client), folder=folder / str(client)) for client in range(number)], data


EVERY = [(method, batch, "float32") for method in ("fedavg", "fafi", "etf_annealed", "flare") for batch in (2, 32)]
PULL = {"objective.align_classes": "seen", "objective.align_reduction": "per_prototype"}
"""of every second case"""


@pytest.mark.numeric
@pytest.mark.parametrize(("method", "batch", "precision"), [*EVERY, ("fafi", 32, "bfloat16"), ("flare", 2, "bfloat16")])
def test_together_equals_one_after_another(tmp_path, method, batch, precision):
    """In every precision: cohorts compute the same, or leave it to plain training."""
    layer = {"train.batch_size": batch, "train.weight_decay": 1e-3, "train.precision": precision, "train.lr": 0.07}
    layer["train.schedule"] = {"name": "cosine"}
    layer |= PULL if batch == 2 else {}
    if precision == "bfloat16" and bfloat16_speedup(torch.device("cpu")) == 0:
        pytest.skip("this processor cannot train in bfloat16")
    jobs, data = clients(tmp_path / "a", method, **layer)
    alone = [train_client(job, part) for job, part in zip(jobs, data, strict=True)]
    jobs, data = clients(tmp_path / "b", method, **layer)
    together = train_cohort(jobs, data)
    for one, other in zip(alone, together, strict=True):
        for name in ("client", "samples", "classes", "status", "peak_lr", "stable_lr", "precision"):
            assert getattr(one, name) == getattr(other, name), name
        assert (other.status, other.peak_lr, other.precision) == ("trained", 0.07, precision)
        assert other.lambda_raw_max == pytest.approx(one.lambda_raw_max, rel=1e-3)
    for client in range(len(jobs)):
        first, second = (ClientFiles(tmp_path / name / str(client)) for name in "ab")
        for row, row_together in zip(first.read_trace(), second.read_trace(), strict=True):
            assert row_together.keys() == row.keys()
            assert row_together == pytest.approx(row, rel=2e-2, abs=2e-2)
        assert second.upload.exists()
        assert second.snapshot(2).exists()


def test_a_run_says_what_its_clients_were_trained_in(tmp_path):
    """Five samples each of 8 x 8 images would train together, which is float32 alone."""
    if bfloat16_speedup(torch.device("cpu")) == 0:
        pytest.skip("this processor cannot train in bfloat16")
    split = {"partition": {"kind": "iid", "clients": 6}, "data": {"train_size": 30}, "workers": 2}
    for precision in ("float32", "bfloat16"):
        result = run_experiment(resolve(TINY, split, {"train.precision": precision}), tmp_path / precision).content
        assert result.precision == precision
        assert [client.precision for client in result.clients] == [precision] * 6
        assert [client.peak_lr for client in result.clients] == [0.05] * 6
    traces = [
        [RunFiles(tmp_path / precision).client(client).read_trace()[-1]["local"] for client in range(6)]
        for precision in ("float32", "bfloat16")
    ]
    assert all(one != pytest.approx(other, rel=1e-5) for one, other in zip(*traces, strict=True))


@pytest.mark.parametrize(
    "layer",
    [
        {"method": "analytic"},
        {"method": "flare_analytic"},
        {"train.thermostat": 0.1},
        {"train.check_lr": True},
        {"train.holdout": 0.2},
        {"method": "fedprox"},
    ],
)
def test_cohorts_say_what_they_support(tmp_path, layer):
    def job(**more):
        experiment = resolve(TINY, {"method": "flare"}, more)
        return Simulation.build(experiment, RunFiles(tmp_path), load(experiment.data)).clients.job(0)

    assert supports(job())
    assert not supports(job(**layer))
    assert not supports(job(encoder=give(torch.nn.Flatten())))
    assert not supports(replace(job(), precision="bfloat16"))


def test_a_cohort_is_repeatable_and_not_repeated(tmp_path):
    outcomes = []
    for name in "ab":
        jobs, data = clients(tmp_path / name, "flare")
        train_cohort(jobs, data)
        outcomes.append([(tmp_path / name / str(c) / "upload.safetensors").read_bytes() for c in range(4)])
    assert outcomes[0] == outcomes[1]
    again = train_cohort(jobs, data, Relay(lambda *_: pytest.fail("trained again")))
    assert [summary.client for summary in again] == [0, 1, 2, 3]


def test_one_failing_client_does_not_touch_the_others(tmp_path):
    jobs, data = clients(tmp_path / "a", "fafi")
    train_cohort(jobs, data)
    jobs, data = clients(tmp_path / "b", "fafi")
    broken = data[1].images.float() / 255
    broken[0] = float("inf")
    data = [
        ClientData.of(Split(broken if index == 1 else part.images.float() / 255, part.labels), 10)
        for index, part in enumerate(data)
    ]
    summaries = train_cohort(jobs, data)
    assert [summary.status for summary in summaries] == ["trained", "failed", "trained", "trained"]
    assert "NaN or infinite in epoch 1" in summaries[1].reason
    assert not (tmp_path / "b" / "1" / "upload.safetensors").exists()
    for client in (0, 2, 3):
        one, two = (ClientFiles(tmp_path / name / str(client)).read_trace()[-1] for name in "ab")
        assert two == pytest.approx(one, rel=1e-3, abs=1e-3)
