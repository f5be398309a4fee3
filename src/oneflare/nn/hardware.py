"""Chooses the device and the number format once per run, and describes them for its result."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from oneflare.errors import ConfigError
from oneflare.nn import bfloat16
from oneflare.nn.bfloat16 import Workload

SMALLEST_BFLOAT16_IMAGE = 16
"""Below this side, converting costs more than the faster arithmetic saves."""
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORTHWHILE = 1.3
"""bfloat16 becomes the default where it is at least this many times faster than float32."""


DEVICES = ("auto", "cpu", "cuda", "mps")


def choose_device(wanted: str, option: str = "train.device") -> torch.device:
    """Where networks compute; `auto` is a GPU where there is one. option: what the user said it by"""
    if wanted not in DEVICES:
        raise ConfigError(f"{option}: must be one of {', '.join(DEVICES)} (got {wanted})")
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{option}: no CUDA device was found; use auto or cpu")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"{option}: no Apple GPU was found; use auto or cpu")
    return torch.device(wanted)


def choose_precision(wanted: str, device: torch.device, workload: Workload) -> torch.dtype:
    """`auto` is bfloat16 where it was measured to pay and the images are large enough to gain."""
    if wanted == "auto":
        pays = workload.size >= SMALLEST_BFLOAT16_IMAGE and bfloat16_speedup(device, workload) >= WORTHWHILE
        return torch.bfloat16 if pays else torch.float32
    if wanted == "bfloat16" and device.type == "cpu" and bfloat16_speedup(device, workload) == 0:
        raise ConfigError(
            "train.precision: this encoder cannot be trained in bfloat16 on this processor; use train.precision=float32"
        )
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def precision_name(precision: torch.dtype) -> str:
    """As results and options spell it: `float32` or `bfloat16`."""
    return next(name for name, dtype in PRECISIONS.items() if dtype == precision)


def bfloat16_speedup(device: torch.device, workload: Workload | None = None) -> float:
    """How many times faster than float32 this machine trains in bfloat16; 0 where it cannot.

    workload: default, the default encoder on colour images of 32 pixels. `oneflare.nn.bfloat16` measures processors.
    """
    if device.type == "cuda":
        return 2.0 if torch.cuda.is_bf16_supported(including_emulation=False) else 0.0
    if device.type != "cpu" or not hasattr(os, "fork"):
        return 0.0
    return bfloat16.measured(workload or bfloat16.reference()).speedup


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
