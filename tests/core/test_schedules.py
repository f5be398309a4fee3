from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.core.schedules import SCHEDULES, build_schedule, peak, restart_steps
from oneflare.errors import ConfigError
from oneflare.methods.resolve import resolve


@pytest.mark.parametrize(
    ("spec", "formula"),
    [
        ({"name": "constant", "value": 0.3}, lambda p: 0.3),
        ({"name": "linear"}, lambda p: 1 - p),
        ({"name": "linear", "start": 2.0, "end": 0.5}, lambda p: 2 - 1.5 * p),
        ({"name": "cosine"}, lambda p: (1 + math.cos(math.pi * p)) / 2),
        ({"name": "cosine", "start": 3.0, "end": 1.0}, lambda p: 1 + 2 * (1 + math.cos(math.pi * p)) / 2),
        ({"name": "constant", "decay": 4.0}, lambda p: 1 / (1 + 4 * p)),
        ({"name": "constant", "warmup": 0.2}, lambda p: min(p / 0.2, 1)),
        ({"name": "linear", "warmup": 0.5}, lambda p: p / 0.5 if p < 0.5 else 1 - (p - 0.5) / 0.5),
    ],
)
def test_schedules_are_their_formulas(spec, formula):
    schedule = build_schedule(spec)
    for k in range(41):
        assert schedule(k / 40) == pytest.approx(formula(k / 40))


@pytest.mark.parametrize(("first", "growth", "cycles"), [(10, 1, 4), (10, 2, 3), (7, 3, 3), (13, 1, 1)])
def test_restarts_equal_pytorch(first, growth, cycles):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, first, growth, eta_min=0.1)
    total = first * sum(growth**k for k in range(cycles))
    ours = build_schedule({"name": "cosine_restarts", "cycles": cycles, "growth": growth, "end": 0.1})
    for step in range(total):
        assert ours(step / total) == pytest.approx(theirs.get_last_lr()[0], abs=1e-7), step
        theirs.step()


def test_restart_steps_open_the_cycles():
    schedule = build_schedule({"name": "cosine_restarts", "cycles": 3, "growth": 2})
    assert restart_steps(schedule, 70) == {10, 30}
    assert restart_steps(build_schedule("cosine"), 70) == frozenset()
    warm = build_schedule({"name": "cosine_restarts", "cycles": 2, "warmup": 0.2})
    assert restart_steps(warm, 100) == {60}
    for step in restart_steps(warm, 100):
        assert warm(step / 100) == pytest.approx(1.0)
        assert warm((step - 1) / 100) < 0.01


@given(total=st.integers(2, 400), cycles=st.integers(1, 6), growth=st.sampled_from([1, 1.5, 2]), decay=st.floats(0, 50))
def test_values_stay_between_zero_and_the_peak(total, cycles, growth, decay):
    schedule = build_schedule({"name": "cosine_restarts", "cycles": cycles, "growth": growth, "decay": decay})
    values = [schedule(step / total) for step in range(total + 1)]
    assert all(0 <= value <= 1 for value in values)
    assert peak(schedule) == values[0] == 1.0


def test_the_decaying_envelope_meets_the_conditions_for_convergence():
    """sum eta grows like log T, sum eta^2 stays bounded."""
    sums = []
    for total in (1000, 10_000, 100_000):
        schedule = build_schedule({"name": "cosine_restarts", "cycles": 20, "decay": 0.1 * total})
        values = [schedule(step / total) for step in range(total)]
        sums.append((sum(values), sum(v * v for v in values)))
    assert sums[2][0] - sums[1][0] > 0.5 * (sums[1][0] - sums[0][0]) > 1
    assert sums[2][1] < 11


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_schedule_serves_the_learning_rate_and_the_controllers(name):
    experiment = resolve({"train.schedule": name, "controller.schedule": {"name": name, "warmup": 0.1}})
    assert experiment.train.schedule["name"] == name
    assert experiment.controller["schedule"]["warmup"] == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "linear", "warmup": 1.0}, "warmup"),
        ({"name": "cosine", "decay": -1}, "decay"),
        ({"name": "cosine_restarts", "cycles": 0}, "cycles"),
        ({"name": "cosine_restarts", "growth": 0.5}, "growth"),
        ({"name": "cosine_restarts", "cycle": 3}, "did you mean 'cycles'"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(options)
