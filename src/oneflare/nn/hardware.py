"""Which device and which number format: decided once per run, written into its result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from oneflare.errors import ConfigError

BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16"}
SMALLEST_BFLOAT16_IMAGE = 16
"""Below this side, converting costs more than the faster arithmetic saves (benchmarks/precision)."""


def choose_device(wanted: str) -> torch.device:
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device: no CUDA device was found; use train.device=auto or cpu")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("train.device: no Apple GPU was found; use train.device=auto or cpu")
    return torch.device(wanted)


def choose_precision(wanted: str, device: torch.device, image_size: int) -> torch.dtype:
    """`auto` is bfloat16 where the processor multiplies it natively and the images are large enough to gain."""
    if wanted == "auto":
        native = _native_bfloat16(device) and image_size >= SMALLEST_BFLOAT16_IMAGE
        return torch.bfloat16 if native else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return bool(BFLOAT16_FLAGS & set(flags.split()))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Results that do not depend on the machine's load or its number of cores.

    Two threads per process also stall badly on a busy machine (50 times slower steps), so parallelism here is
    processes, one thread each.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
