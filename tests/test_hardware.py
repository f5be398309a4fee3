from __future__ import annotations

import os
import signal

import pytest
import torch

from oneflare.errors import ConfigError
from oneflare.nn import hardware
from oneflare.nn.hardware import choose_device, choose_precision, one_thread

CPU = torch.device("cpu")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hardware._remembered_speedup.cache_clear()
    yield monkeypatch
    hardware._remembered_speedup.cache_clear()


def test_bfloat16_is_chosen_where_it_pays(fresh):
    fresh.setattr(hardware, "_time_step", lambda bfloat16: 1.0 if bfloat16 else 2.0)
    assert choose_precision("auto", CPU, 32) == torch.bfloat16
    assert choose_precision("auto", CPU, 8) == torch.float32


def test_float32_is_chosen_where_bfloat16_is_slower(fresh):
    fresh.setattr(hardware, "_time_step", lambda bfloat16: 2.0 if bfloat16 else 1.0)
    assert choose_precision("auto", CPU, 32) == torch.float32


def test_a_processor_that_dies_of_bfloat16_is_survived(fresh):
    def die(bfloat16):
        if bfloat16:
            os.kill(os.getpid(), signal.SIGILL)
        return 1.0

    fresh.setattr(hardware, "_time_step", die)
    assert hardware.bfloat16_speedup(CPU) == 0
    assert choose_precision("auto", CPU, 64) == torch.float32
    with pytest.raises(ConfigError, match=r"cannot train in bfloat16; use train\.precision=float32"):
        choose_precision("bfloat16", CPU, 64)


def test_it_is_measured_once_per_machine(fresh, tmp_path):
    fresh.setattr(hardware, "_time_step", lambda bfloat16: 1.0 if bfloat16 else 3.0)
    assert hardware.bfloat16_speedup(CPU) == 3.0
    fresh.setattr(hardware, "_time_step", lambda bfloat16: pytest.fail("measured again"))
    hardware._remembered_speedup.cache_clear()
    assert hardware.bfloat16_speedup(CPU) == 3.0
    assert (tmp_path / "oneflare" / "bfloat16.json").exists()


def test_explicit_precision_is_obeyed(fresh):
    fresh.setattr(hardware, "_time_step", lambda bfloat16: 2.0 if bfloat16 else 1.0)
    assert choose_precision("float32", CPU, 64) == torch.float32
    assert choose_precision("bfloat16", CPU, 8) == torch.bfloat16


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
