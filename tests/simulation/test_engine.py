from __future__ import annotations

import inspect
import os
import signal
import sys
import time

import pytest

from oneflare.client.observer import Relay
from oneflare.core.frames import own_lines
from oneflare.errors import ConfigError, RunError
from oneflare.simulation.engines import default_workers, map_tasks


def square(task, observer):
    observer.cell_step("half", task)
    return task**2


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_results_and_reports_do_not_depend_on_the_number_of_workers(workers):
    reports, results = [], []
    outcome = map_tasks(
        square,
        list(range(7)),
        workers=workers,
        observer=Relay(lambda event, words: reports.append((event, *words))),
        on_result=results.append,
    )
    assert outcome == [task**2 for task in range(7)]
    assert sorted(reports) == [("cell_step", "half", task) for task in range(7)]
    assert sorted(results) == [task**2 for task in range(7)]


def test_workers_run_side_by_side():
    pids = map_tasks(lambda task, observer: (time.sleep(0.2), os.getpid())[1], [1, 2], workers=2)
    assert len(set(pids)) == 2
    assert os.getpid() not in pids


def test_an_error_in_a_worker_is_raised_here():
    def fail(task, observer):
        raise ConfigError("what, where, remedy")

    with pytest.raises(ConfigError, match="what, where, remedy"):
        map_tasks(fail, [1, 2], workers=2)

    def crash(task, observer):
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        map_tasks(crash, [1, 2], workers=2)


class Awkward(Exception):
    """Cannot be made again from what it was made of, as pickle would."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fail_awkwardly():
    raise Awkward("this", "that")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make", [lambda: 1 / 0, fail_awkwardly])
def test_the_lines_of_the_users_code_survive_the_way_from_a_worker(workers, make):
    with pytest.raises(Exception, match=r"division by zero|this and that") as caught:
        map_tasks(lambda task, observer: make(), [1, 2], workers=workers)
    lines = own_lines(caught.value)
    assert len(lines) % 2 == 0
    assert lines[-2].startswith(f'"{__file__}", line ')
    assert lines[-1].strip() in inspect.getsource(sys.modules[__name__])
    assert not any("oneflare/simulation/engines" in line for line in lines)
    if workers > 1:  # what --verbose shows
        assert caught.value.__notes__[0].startswith("In a worker process:\nTraceback")
        assert "oneflare/simulation/engines/local.py" in caught.value.__notes__[0]


def test_a_killed_worker_costs_only_its_task_which_is_tried_again(tmp_path):
    def work(task, observer):
        marker = tmp_path / str(task)
        if task == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    assert map_tasks(work, [0, 1, 2, 3], workers=2) == [0, 1, 2, 3]


def test_a_task_that_kills_every_worker_ends_the_run():
    def work(task, observer):
        if task == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    with pytest.raises(RunError, match="was killed"):
        map_tasks(work, [0, 1, 2], workers=2)


def test_default_is_one_worker_per_core():
    assert default_workers() == len(os.sched_getaffinity(0))
