from __future__ import annotations

import threading

import pytest
import torch

from oneflare.core import threads
from oneflare.core.threads import divide_cores, idle_cores, in_threads
from oneflare.nn.hardware import one_thread


@pytest.fixture
def cores(monkeypatch):
    """Four cores, whatever the machine has."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_processes", 1)
    with one_thread():
        yield


def test_results_are_in_the_order_of_their_pieces(cores):
    assert in_threads(lambda one, other: one - other, range(50), range(50, 0, -1)) == list(range(-50, 50, 2))
    assert in_threads(len, []) == []


def test_pieces_run_at_the_same_time(cores):
    """Four pieces wait for each other, which only threads of their own let them do."""
    together = threading.Barrier(4, timeout=20)
    assert sorted(in_threads(lambda _: together.wait(), range(4))) == [0, 1, 2, 3]


def test_the_first_error_is_raised(cores):
    def fail(number):
        raise ValueError(f"piece {number}")

    with pytest.raises(ValueError, match="piece 0"):
        in_threads(fail, range(4))


def test_cores_are_divided_among_processes_and_threads_of_torch(cores, monkeypatch):
    assert idle_cores() == 4
    divide_cores(2)
    assert idle_cores() == 2
    divide_cores(9)
    assert idle_cores() == 1
    divide_cores(1)
    torch.set_num_threads(2)
    assert idle_cores() == 2
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert idle_cores() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert idle_cores() == 4
