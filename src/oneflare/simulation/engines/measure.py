"""Measures the seconds and the additional memory that a piece of work takes.

The work runs in a forked process of its own, so nothing it leaves behind enters the next measurement. Before it starts
freed memory is given back to the system and the kernel's high-water mark of resident memory is reset. Short work is
done twice and measured the second time, when imports and first touches of library pages are past; in long work they
do not matter.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing as mp
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from oneflare.errors import RunError

T = TypeVar("T")
K = TypeVar("K")

SMALLEST_MAPPED = 1 << 16
"""allocations from this size on are returned to the system when freed, so that resident memory follows them"""
LONG = 2.0
"""processor seconds from which on work is not done twice"""
_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Usage:
    seconds: float
    """by the clock"""
    cpu_seconds: float
    """of the processor, which does not depend on who else uses it"""
    peak_memory_bytes: int | None
    """resident high-water mark above the start; None where the system does not tell"""


def measure(work: Callable[[], T], keep: Callable[[T], K], *, rehearse: bool = True) -> tuple[Usage, K]:
    """Do `work` in a process of its own and `keep` its result there, which writes it to a file; an error arrives here.

    Returns the cost, and what `keep` returned: something small that can be sent from one process to another.
    """
    if sys.platform != "linux" or _gpu_in_use():
        return _measure(work, keep, rehearse)
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, work, keep, rehearse), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        cause = "was killed (out of memory?)" if process.exitcode == -signal.SIGKILL else f"ended ({process.exitcode})"
        raise RunError(f"the measured process {cause}; use fewer clients or a smaller encoder") from None
    finally:
        process.terminate()
        process.join()
        ours.close()
    if isinstance(answer, Exception):
        raise answer
    found: tuple[Usage, K] = answer
    return found


def _child(connection: Connection, work: Callable[[], Any], keep: Callable[[Any], Any], rehearse: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        connection.send(_measure(work, keep, rehearse))
    except Exception as error:  # carried to the main process, where it is raised
        connection.send(error)


def _measure(work: Callable[[], T], keep: Callable[[T], K], rehearse: bool) -> tuple[Usage, K]:
    libc = _libc()
    if libc is not None:
        libc.mallopt(_MMAP_THRESHOLD, SMALLEST_MAPPED)
    cost, result = _once(work, libc)
    if rehearse and cost.cpu_seconds < LONG:
        del result
        cost, result = _once(work, libc)
    return cost, keep(result)


def _once(work: Callable[[], T], libc: Any) -> tuple[Usage, T]:
    gc.collect()
    if libc is not None:
        libc.malloc_trim(0)
    before = _reset_high_water()
    started, cpu = time.monotonic(), time.process_time()
    result = work()
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    peak = None if before is None else max(0, _status("VmHWM") - before)
    return Usage(seconds, cpu, peak), result


def _reset_high_water() -> int | None:
    """Resident bytes now, from which on the high-water mark counts."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except (OSError, StopIteration):
        return None


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _libc() -> Any:
    """glibc, or None where the C library has no such controls."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def _gpu_in_use() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())
