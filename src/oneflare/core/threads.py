"""Independent pieces of work on all cores of this process, each with the arithmetic that it has alone.

A piece runs in one thread from its beginning to its end, so its result does not depend on how many others run beside
it. Pieces should spend their time in torch, LAPACK or numpy on large arrays, which let other threads of Python run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

MOST = 8
"""threads at a time, because every piece of work has memory of its own"""

_processes = 1


def divide_cores(processes: int) -> None:
    """Tells this process that so many like it work at the same time, itself among them."""
    global _processes
    _processes = processes


def idle_cores() -> int:
    """How many threads there may be: cores for each thread of torch in each process, at most OMP_NUM_THREADS."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdecimal() and int(stated) > 0:
        allowed = min(allowed, int(stated))
    return max(1, min(MOST, allowed // (_processes * torch.get_num_threads())))


def in_threads(work: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
    """`list(map(work, *arguments))`, several at a time; the error of the first piece that fails is raised."""
    pieces = list(zip(*arguments, strict=True))
    threads = min(idle_cores(), len(pieces))
    if threads <= 1:
        return [work(*piece) for piece in pieces]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda piece: work(*piece), pieces))
