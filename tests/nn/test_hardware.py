from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime, timedelta

import pytest
import torch
from torch import nn

from oneflare.errors import ConfigError
from oneflare.nn import bfloat16, hardware
from oneflare.nn.bfloat16 import Workload
from oneflare.nn.hardware import choose_device, choose_precision, one_thread

CPU = torch.device("cpu")


def work(size=32, encoder=None):
    return Workload(encoder or nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Flatten()), 3, size)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bfloat16, "_ANSWERS", {})
    return monkeypatch


def times(monkeypatch, float32, other):
    """Every step takes what these iterators say, in the order in which steps are timed."""
    monkeypatch.setattr(bfloat16, "_time_step", lambda workload, narrow: next(other if narrow else float32))


def always(*values):
    while True:
        yield from values


def test_bfloat16_is_chosen_where_it_pays(fresh):
    times(fresh, always(2.0), always(1.0))
    assert choose_precision("auto", CPU, work(32)) == torch.bfloat16
    assert choose_precision("auto", CPU, work(8)) == torch.float32


def test_float32_is_chosen_where_bfloat16_is_slower(fresh):
    times(fresh, always(1.0), always(2.0))
    assert choose_precision("auto", CPU, work()) == torch.float32


def test_load_does_not_decide(fresh):
    """bfloat16 is 1.9 times faster; other programs slow most steps, and those in bfloat16 more often."""
    times(fresh, always(1.9, 8.0, 1.92, 4.0, 1.9), always(15.0, 9.0, 3.0, 7.0, 1.0, 12.0, 1.01))
    assert bfloat16.measured(work()).speedup == 1.9
    assert choose_precision("auto", CPU, work()) == torch.bfloat16


def test_steps_in_both_formats_alternate_and_end(fresh):
    seen = []
    growing = iter(range(1, 10**6))
    fresh.setattr(bfloat16, "BUDGET_SECONDS", 1e9)
    fresh.setattr(bfloat16, "_time_step", lambda workload, narrow: seen.append(narrow) or float(next(growing)) ** 3)
    assert len(bfloat16._time_pairs(work())) == bfloat16.MOST_PAIRS
    assert seen == [False, True] * (bfloat16.MOST_PAIRS + 1)
    fresh.setattr(bfloat16, "BUDGET_SECONDS", 0.0)
    assert len(bfloat16._time_pairs(work())) == bfloat16.FEWEST_PAIRS


def test_a_processor_that_dies_of_bfloat16_is_survived(fresh):
    def die(workload, narrow):
        if narrow:
            os.kill(os.getpid(), signal.SIGILL)
        return 1.0

    fresh.setattr(bfloat16, "_time_step", die)
    assert hardware.bfloat16_speedup(CPU, work()) == 0
    assert choose_precision("auto", CPU, work()) == torch.float32
    with pytest.raises(
        ConfigError, match=r"cannot be trained in bfloat16 on this processor; use train\.precision=float"
    ):
        choose_precision("bfloat16", CPU, work())
    assert len(bfloat16.remembered()) == 1


def test_a_measurement_that_hangs_is_ended_and_not_remembered(fresh):
    fresh.setattr(bfloat16, "LONGEST_SECONDS", 0.05)
    fresh.setattr(bfloat16, "_time_step", lambda workload, narrow: signal.pause())
    assert choose_precision("auto", CPU, work()) == torch.float32
    assert choose_precision("bfloat16", CPU, work()) == torch.bfloat16
    assert bfloat16.remembered() == []


def test_an_encoder_that_cannot_do_it_is_not_blamed_on_the_processor_for_ever(fresh):
    class Narrow(nn.Module):
        def forward(self, x):
            raise TypeError("no bfloat16")

    assert hardware.bfloat16_speedup(CPU, work(encoder=Narrow())) == 0
    assert bfloat16.remembered() == []


def test_it_is_measured_once_per_machine_encoder_and_image(fresh, tmp_path):
    times(fresh, always(3.0), always(1.0))
    assert hardware.bfloat16_speedup(CPU, work()) == 3.0
    times(fresh, iter([]), iter([]))
    bfloat16._ANSWERS.clear()
    assert hardware.bfloat16_speedup(CPU, work()) == 3.0
    (figure,) = bfloat16.remembered()
    assert figure.torch == torch.__version__
    assert figure.processor
    assert "3 x 32 x 32" in figure.workload
    assert abs(datetime.now(UTC) - datetime.fromisoformat(figure.measured)) < timedelta(minutes=5)
    times(fresh, always(1.0), always(1.0))
    assert hardware.bfloat16_speedup(CPU, work(64)) == 1.0
    assert hardware.bfloat16_speedup(CPU, work(encoder=nn.Conv2d(3, 4, 3, 1))) == 1.0
    assert len(bfloat16.remembered()) == 3


def test_doubtful_and_old_figures_are_forgotten(fresh, tmp_path):
    times(fresh, always(*range(2, 60)), always(*range(1, 60)))
    assert bfloat16.measured(work()).doubtful
    assert bfloat16.remembered() == []
    bfloat16._ANSWERS.clear()
    times(fresh, always(2.0), always(1.0))
    assert bfloat16.measured(work()).speedup == 2.0
    bfloat16._ANSWERS.clear()
    times(fresh, always(1.0), always(2.0))
    later = datetime.now(UTC) + bfloat16.KEPT + timedelta(days=1)
    fresh.setattr(bfloat16, "_now", lambda: later)
    assert bfloat16.measured(work()).speedup == 0.5


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"0123456789abcdef torch 2": 0.88}', '{"x": {"speedup": "no"}}'])
def test_a_damaged_or_earlier_file_of_figures_is_as_good_as_none(fresh, tmp_path, content):
    file = tmp_path / "oneflare" / "bfloat16.json"
    file.parent.mkdir()
    file.write_text(content)
    times(fresh, always(2.0), always(1.0))
    assert bfloat16.measured(work()).speedup == 2.0
    assert [row["speedup"] for row in json.loads(file.read_text()).values()] == [2.0]


def test_explicit_precision_is_obeyed(fresh):
    times(fresh, always(1.0), always(2.0))
    assert choose_precision("float32", CPU, work(64)) == torch.float32
    assert choose_precision("bfloat16", CPU, work(8)) == torch.bfloat16


def test_a_real_encoder_is_measured(fresh):
    """In a child process: the encoder itself is as it was."""
    workload = work(16, nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.Flatten()).eval())
    before = {name: tensor.clone() for name, tensor in workload.encoder.state_dict().items()}
    figure = bfloat16.measured(workload)
    assert figure.spread < bfloat16.UNKNOWN
    assert all(torch.equal(tensor, before[name]) for name, tensor in workload.encoder.state_dict().items())
    assert not workload.encoder.training
    assert all(parameter.grad is None for parameter in workload.encoder.parameters())


def test_devices():
    assert choose_device("cpu") == CPU
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            choose_device("cuda")


def test_one_thread_is_restored():
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
