"""`engine=local`: a pool of worker processes with one thread each.

Workers are forked where that is safe (Linux without a GPU): they start at once, share the images by copy-on-write and
need nothing pickled. A worker that dies takes only its own task with it, which is tried once more; when the main
process dies, its workers follow, so a restarted run never meets an old one.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from oneflare.client.observer import Observer, Relay, tell
from oneflare.core.frames import keep_lines, move_lines
from oneflare.core.plugins import load_plugins
from oneflare.core.threads import divide_cores
from oneflare.errors import OneFlareError, RunError
from oneflare.nn.given import GIVEN, take_over

Task = TypeVar("Task")
Result = TypeVar("Result")
Work = Callable[[Task, Observer], Result]

ATTEMPTS = 2
STOPPING = (signal.SIGINT, signal.SIGTERM)
STOP_SECONDS = 5.0
"""after which a worker that was told to stop is killed"""


def default_workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def map_tasks(
    work: Work[Task, Result],
    tasks: Sequence[Task],
    *,
    workers: int,
    observer: Observer | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run `work` on every task, in order of the list as workers become free; results in the order of tasks.

    work: gets a task and an observer whose events reach `observer`, in this process.
    on_result: gets every result, in this process, as soon as it is there.
    """
    observer = observer or Observer()
    if workers <= 1 or len(tasks) <= 1:
        results = []
        for task in tasks:
            results.append(work(task, observer))
            if on_result is not None:
                on_result(results[-1])
        return results
    return _Pool(work, tasks, min(workers, len(tasks))).run(observer, on_result)


def run_apart(work: Callable[[Observer], Result], observer: Observer) -> Result:
    """Run one piece of work in a process of its own, which ends with this one; its events reach `observer` here."""
    (result,) = _Pool(call, [work], 1).run(observer, None)
    return result  # type: ignore[no-any-return]


def call(task: Callable[[Observer], Result], observer: Observer) -> Result:
    """The work of `map_tasks` where every task is itself the function to call."""
    return task(observer)


@dataclass
class _Worker:
    process: Any
    connection: Connection
    task: int | None = None


class _Pool:
    def __init__(self, work: Work[Any, Any], tasks: Sequence[Any], workers: int) -> None:
        self.context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
        self.work = work
        self.tasks = tasks
        self.waiting = deque(range(len(tasks)))
        self.attempts = [0] * len(tasks)
        self.results: dict[int, Any] = {}
        self.wanted = workers
        self.workers: list[_Worker] = []

    def _start(self) -> _Worker:
        ours, theirs = self.context.Pipe()
        arguments = theirs, self.work, self.tasks, GIVEN, self.wanted
        process = self.context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def run(self, observer: Observer, on_result: Callable[[Any], None] | None) -> list[Any]:
        try:
            for _ in range(self.wanted):
                with _uninterrupted():
                    self.workers.append(self._start())
            for worker in self.workers:
                self._give(worker)
            while len(self.results) < len(self.tasks):
                self._collect(observer, on_result)
            return [self.results[index] for index in range(len(self.tasks))]
        finally:
            self._stop()

    def _give(self, worker: _Worker) -> None:
        worker.task = self.waiting.popleft() if self.waiting else None
        if worker.task is not None:
            self.attempts[worker.task] += 1
            worker.connection.send(worker.task)

    def _collect(self, observer: Observer, on_result: Callable[[Any], None] | None) -> None:
        busy = [worker for worker in self.workers if worker.task is not None]
        ready = wait([worker.connection for worker in busy] + [worker.process.sentinel for worker in busy])
        for worker in busy:
            if worker.connection in ready and worker.connection.poll():
                try:
                    kind, content = worker.connection.recv()
                except EOFError:
                    self._replace(worker)
                    continue
                assert worker.task is not None
                if kind == "event":
                    tell(observer, *content)
                elif kind == "result":
                    self.results[worker.task] = content
                    if on_result is not None:
                        on_result(content)
                    self._give(worker)
                else:
                    raise content
            elif worker.process.sentinel in ready:
                self._replace(worker)

    def _replace(self, worker: _Worker) -> None:
        """Its task is tried again in a new worker; a task that kills two workers ends the run."""
        worker.process.join()
        assert worker.task is not None
        if self.attempts[worker.task] >= ATTEMPTS:
            code = worker.process.exitcode
            cause = "was killed (out of memory?)" if code == -signal.SIGKILL else f"ended with code {code}"
            raise RunError(f"a worker process {cause} twice on the same task; set workers=1 and run again to go on")
        self.waiting.appendleft(worker.task)
        with _uninterrupted():
            self.workers[self.workers.index(worker)] = replacement = self._start()
        self._give(replacement)

    def _stop(self) -> None:
        for worker in self.workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join(STOP_SECONDS)
            if worker.process.is_alive():  # it was told to stop before it could listen
                worker.process.kill()
                worker.process.join()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Signals wait: one that arrives while a worker is being started would leave it without anybody who ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(
    connection: Connection, work: Work[Any, Any], tasks: Sequence[Any], modules: dict[str, Any], workers: int
) -> None:
    """workers: how many work at the same time"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):  # the worker was started while signals had to wait
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    import torch

    load_plugins()  # a spawned worker starts without the user's parts and the user's networks
    take_over(modules)
    torch.set_num_threads(1)
    divide_cores(workers)
    threading.Thread(target=_follow_parent, daemon=True).start()
    observer = Relay(lambda event, arguments: connection.send(("event", (event, arguments))))
    while True:
        try:
            index = connection.recv()
        except EOFError:
            return
        try:
            answer = ("result", work(tasks[index], observer))
        except OneFlareError as error:
            answer = ("error", error)
        except Exception as error:  # carried to the main process, where it is raised
            answer = ("error", _portable(error))
        connection.send(answer)


def _portable(error: Exception) -> Exception:
    """The error with the lines of its traceback; one of a kind that cannot be sent is replaced by its words."""
    keep_lines(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class of the user's own raises here
        words = RuntimeError(f"{type(error).__name__}: {error}")
        move_lines(error, words)
        return words
    return error


def _follow_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
