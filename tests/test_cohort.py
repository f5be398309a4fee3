from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import TINY
from oneflare.client import ClientFiles, ClientJob, train_client
from oneflare.cohort import MOST_CLIENTS, MOST_SAMPLES, cohorts, train_cohort
from oneflare.data import ClientData, Split, load
from oneflare.federation import Federation, RunFiles
from oneflare.methods.resolve import resolve


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
    federation = Federation.build(experiment, RunFiles(folder), load(experiment.data), None, None)
    split = federation.dataset.train
    rows = [torch.arange(samples) + samples * client for client in range(number)]
    data = [ClientData.of(split.take(part), 10) for part in rows]
    jobs = [ClientJob(experiment, federation.contract, client, folder / str(client), False) for client in range(number)]
    return jobs, data


@pytest.mark.parametrize("method", ["fedavg", "fafi", "etf_annealed", "flare"])
@pytest.mark.parametrize("batch", [2, 32])
def test_together_equals_one_after_another(tmp_path, method, batch):
    jobs, data = clients(tmp_path / "a", method, **{"train.batch_size": batch, "train.weight_decay": 1e-3})
    alone = [train_client(job, part) for job, part in zip(jobs, data, strict=True)]
    jobs, data = clients(tmp_path / "b", method, **{"train.batch_size": batch, "train.weight_decay": 1e-3})
    together = train_cohort(jobs, data)
    for one, other in zip(alone, together, strict=True):
        assert (one.client, one.samples, one.classes, one.status) == (
            other.client,
            other.samples,
            other.classes,
            "trained",
        )
        assert other.lambda_raw_max == pytest.approx(one.lambda_raw_max, rel=1e-3)
    for client in range(len(jobs)):
        first, second = (ClientFiles(tmp_path / name / str(client)) for name in "ab")
        for row, row_together in zip(first.read_trace(), second.read_trace(), strict=True):
            assert row_together.keys() == row.keys()
            assert row_together == pytest.approx(row, rel=2e-2, abs=2e-2)
        assert second.upload.exists()
        assert second.snapshot(2).exists()


def test_a_cohort_is_repeatable_and_not_repeated(tmp_path):
    outcomes = []
    for name in "ab":
        jobs, data = clients(tmp_path / name, "flare")
        train_cohort(jobs, data)
        outcomes.append([(tmp_path / name / str(c) / "upload.safetensors").read_bytes() for c in range(4)])
    assert outcomes[0] == outcomes[1]
    again = train_cohort(jobs, data, lambda *_: pytest.fail("trained again"))
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
