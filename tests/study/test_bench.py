"""The benchmarks measure what they say; how fast is not a test's business."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

import pytest

from conftest import TINY
from oneflare.study.bench import cohort_gain, communication, controller_costs, machine, step_overhead
from oneflare.study.bench.growth import client_growth, fusion_growth
from oneflare.study.bench.steps import interleaved
from oneflare.study.bench.suite import BenchTarget, find_targets
from oneflare.study.bench.wire import FORMATS

SMALL = {"name": "conv4", "width": 2}


def test_ratios_are_taken_between_neighbours(monkeypatch):
    """A machine that becomes ten times slower in the middle: the times of both grow, the ratio does not."""
    clock, calls = [0.0], []
    monkeypatch.setattr("oneflare.study.bench.steps.time.perf_counter", lambda: clock[0])

    def work(name, seconds):
        def done():
            calls.append(name)
            clock[0] += seconds * (10 if len(calls) > 6 else 1)

        return done

    first, second, ratio = interleaved(work("a", 3.0), work("b", 2.0), 3)
    assert calls == ["a", "b"] * 5
    assert (first, second, ratio) == (3.0, 2.0, 1.5)


def test_a_step_is_measured_against_its_encoder():
    row = step_overhead(SMALL, size=8, channels=1, batch=4, repeats=2)
    assert row["images_per_second"] == pytest.approx(4 / (row["full_ms"] / 1000))
    assert row["precision"] == "float32"


def test_every_controller_is_measured():
    from oneflare.objective import CONTROLLERS

    costs = controller_costs(size=8, channels=1, batch=2, rounds=1)
    assert set(CONTROLLERS) - {"none"} <= set(costs)
    assert costs["fixed"] == 1.0


def test_cohorts_are_measured_against_one_after_another():
    row = cohort_gain(size=8, channels=1, samples=2, clients=2, repeats=1)
    assert row["clients"] == 2
    assert row["gain"] == pytest.approx(row["alone_ms"] / row["together_ms"])  # of one repeat, the only ratio


def test_growth_is_measured_in_a_process_of_its_own():
    (row,) = client_growth((2,), size=8, channels=1, samples=200, epochs=1, batch=16, encoder=SMALL)
    assert row["clients"] == 2
    assert row["peak_memory_bytes"] > 10 << 20
    (row,) = fusion_growth((2,), encoder=SMALL, images=8)
    assert row["uploads"] == 2
    assert row["peak_memory_bytes"] > 10 << 20


def test_formats_are_compared_on_the_same_clients(tmp_path):
    content = communication(TINY | {"method": "fafi"}, seeds=1, folder=tmp_path, fusions=["average", "feature_mean"])
    assert set(content["formats"]) == set(FORMATS)
    assert content["formats"]["float32"]["ratio"] == 1.0
    assert content["formats"]["float32"]["mean_points_lost"] == 0.0
    sizes = content["int8_over_float32"]
    assert 0.25 < sizes["resnet18 width 64"] < 0.27


def test_a_missed_target_is_seen():
    assert BenchTarget("x", 1.0, 1.1).held
    assert not BenchTarget("x", 1.2, 1.1).held
    content = {
        "start_up": {"help_seconds": 0.2, "one_step_run_seconds": 2.0},
        "busy_machine": {"ratio": 2.0},
        "step_overhead": [{"encoder": SMALL, "size": 32, "ratio": 1.2}],
        "controllers": {"fixed": 1.0, "fixed, pcgrad": 9.0},
        "communication": {"formats": {"int8": {"mean_points_lost": 0.1}}, "int8_over_float32": {"resnet18": 0.25}},
        "clients_8x8": [
            {"clients": clients, "seconds": clients, "peak_memory_bytes": 100} for clients in (5, 10, 1000)
        ],
        "fusion": [
            {"uploads": 5, "seconds": 1, "peak_memory_bytes": 5},
            {"uploads": 9, "seconds": 2, "peak_memory_bytes": 5},
        ],
    }
    missed = {target.name for target in find_targets(content) if not target.held}
    assert missed == {"full step over bare pass: conv4 width 2, 32x32", "clients_8x8: time of 1000 over 5"}


def test_the_machine_is_described():
    said = machine()
    assert {"processor", "bfloat16_speedup", "load_average"} <= set(said)
    assert said["cores"] == len(os.sched_getaffinity(0))
    assert (said["torch"], said["python"]) == (version("torch"), sys.version.split()[0])


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_known_to_the_experiment(kind):
    from oneflare.methods.resolve import resolve

    assert resolve({"upload": {"dtype": kind}}).upload.dtype == kind
