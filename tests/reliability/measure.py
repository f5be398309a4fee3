"""How much memory a piece of work took at its peak."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")


@dataclass
class Growth:
    bytes: int = 0


def memory(field: str) -> int:
    lines = STATUS.read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


@contextlib.contextmanager
def peak_growth() -> Iterator[Growth]:
    """Peak resident memory of this process above what it had at the start."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from now
    growth, before = Growth(), memory("VmRSS")
    yield growth
    growth.bytes = max(0, memory("VmHWM") - before)
