"""Which device and which number format: decided once per run, written into its result."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from oneflare.errors import ConfigError
from oneflare.files import write_json

SMALLEST_BFLOAT16_IMAGE = 16
"""Below this side, converting costs more than the faster arithmetic saves."""
WORTHWHILE = 1.3
"""bfloat16 becomes the default where it is at least this many times faster than float32."""


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
    """`auto` is bfloat16 where it was measured to pay and the images are large enough to gain."""
    if wanted == "auto":
        pays = image_size >= SMALLEST_BFLOAT16_IMAGE and bfloat16_speedup(device) >= WORTHWHILE
        return torch.bfloat16 if pays else torch.float32
    if wanted == "bfloat16" and device.type == "cpu" and bfloat16_speedup(device) == 0:
        raise ConfigError("train.precision: this processor cannot train in bfloat16; use train.precision=float32")
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def bfloat16_speedup(device: torch.device) -> float:
    """How many times faster than float32 this machine trains in bfloat16; 0 where it cannot.

    Processor flags do not tell: there are machines that announce AMX and then die of an illegal instruction in the
    backward pass of a strided convolution, and others on which it works and is slower. So it is measured, once per
    machine and torch version, in a child process that may die, and remembered.
    """
    if device.type == "cuda":
        return 2.0 if torch.cuda.is_bf16_supported(including_emulation=False) else 0.0
    if device.type != "cpu" or not hasattr(os, "fork"):
        return 0.0
    return _remembered_speedup()


@functools.cache
def _remembered_speedup() -> float:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oneflare" / "bfloat16.json"
    key = f"{_processor()} torch {torch.__version__} {os.environ.get('ONEDNN_MAX_CPU_ISA', '')}".strip()
    try:
        return float(json.loads(cache.read_text())[key])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    speedup = _measured_in_child()
    with contextlib.suppress(OSError):
        write_json(cache, {key: speedup})
    return speedup


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "model", "stepping", "flags")
    return hashlib.sha256("".join(line for line in lines if line.split("\t")[0] in wanted).encode()).hexdigest()[:16]


def _measured_in_child() -> float:
    """The child's last words are the ratio; no words, no bfloat16."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        faulthandler.disable()
        with contextlib.suppress(BaseException):
            os.write(writing, f"{_time_step(False) / _time_step(True):.3f}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        words = pipe.read()
    _, status = os.waitpid(child, 0)
    return float(words) if status == 0 and words else 0.0


def _time_step(bfloat16: bool) -> float:
    """Best of several forward and backward passes of a small strided network, as encoders have it."""
    torch.set_num_threads(1)
    layers = nn.Sequential(
        nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1, bias=False)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.ones(32, 16, 32, 32).contiguous(memory_format=torch.channels_last).requires_grad_()
    best = math.inf
    for _ in range(5):
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            features = layers(images)
        features.float().sum().backward()
        best = min(best, time.perf_counter() - started)
    return best


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
