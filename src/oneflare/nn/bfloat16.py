"""Measures how much faster this machine trains an encoder in bfloat16 than in float32, and keeps the figure.

Processor flags do not tell: some machines announce AMX and die of an illegal instruction in the backward pass of a
strided convolution, on others bfloat16 works and is slower. So both formats are timed on the encoder and the image size
in question, in a child process that may die. Steps in the two formats alternate and are timed in processor time, and
the fastest of each counts, so that other programs on the machine do not decide. Where even the fastest steps disagree
with each other the figure is used for the present process and not remembered.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import json
import math
import os
import platform
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
from torch import nn

from oneflare.core.files import write_json
from oneflare.nn.encoders import build_encoder

BATCH = 8
"""images per timed step"""
FEWEST_PAIRS, MOST_PAIRS = 4, 40
"""timed steps in each format"""
BUDGET_SECONDS = 1.0
"""processor time after which no further pair of steps is timed, unless there are fewer than FEWEST_PAIRS"""
LONGEST_SECONDS = 120.0
"""after which the child process is ended"""
SETTLED = 0.03
"""Timing ends early when the three fastest steps of each format lie within this fraction of each other."""
DOUBTFUL = 0.15
"""A figure whose three fastest steps lie further apart than this is not remembered."""
UNKNOWN = 1e9
"""spread of a figure that rests on no measurement"""
KEPT = timedelta(days=30)
"""Older figures are measured again: drivers, kernels and neighbours change."""
MOST_REMEMBERED = 100
CRASHES = {signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT}
"""signals by which a processor shows that it cannot do the arithmetic"""


@dataclass(frozen=True)
class Workload:
    """What is to be trained: an encoder, and the shape `(channels, size, size)` of its images."""

    encoder: nn.Module
    channels: int
    size: int

    @functools.cached_property
    def digest(self) -> str:
        """The architecture and the image size, without the weights."""
        shapes = [tuple(parameter.shape) for parameter in self.encoder.parameters()]
        return hashlib.sha256(f"{self.encoder!r} {shapes} {self.channels} {self.size}".encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        thousands = sum(parameter.numel() for parameter in self.encoder.parameters()) / 1000
        name = type(self.encoder).__name__
        return f"{name} with {thousands:,.0f} thousand weights, {self.channels} x {self.size} x {self.size}"


@functools.cache
def reference() -> Workload:
    """The default encoder on colour images of 32 pixels."""
    return Workload(build_encoder({"name": "resnet8"}, 3), 3, 32)


@dataclass(frozen=True)
class SpeedMeasurement:
    """One measurement."""

    speedup: float
    """float32's time over bfloat16's; 0 where bfloat16 does not work"""
    spread: float
    """by which fraction the third fastest step of a format was slower than its fastest; the larger of the two"""
    measured: str
    """date and time, UTC"""
    torch: str
    processor: str
    workload: str

    @property
    def doubtful(self) -> bool:
        return not (math.isfinite(self.speedup) and self.speedup >= 0 and 0 <= self.spread <= DOUBTFUL)

    @property
    def old(self) -> bool:
        return not timedelta(0) <= _now() - datetime.fromisoformat(self.measured) <= KEPT


_ANSWERS: dict[str, SpeedMeasurement] = {}
"""Of this process: a run keeps its answer, and forked workers inherit it."""


def measured(workload: Workload) -> SpeedMeasurement:
    """The figure for a workload on this machine's processor: known, or remembered, or measured now."""
    key = _key(workload)
    if key not in _ANSWERS:
        figure = _remembered().get(key)
        if figure is None:
            figure = _measure(workload)
            if not figure.doubtful:
                _remember(key, figure)
        _ANSWERS[key] = figure
    return _ANSWERS[key]


def remembered() -> list[SpeedMeasurement]:
    """What is remembered of this machine's processor, the newest first."""
    here = _machine()
    figures = [figure for key, figure in _remembered().items() if key.startswith(here)]
    return sorted(figures, key=lambda figure: figure.measured, reverse=True)


def forget() -> None:
    """Measure everything again when it is next asked for."""
    _ANSWERS.clear()
    with contextlib.suppress(OSError):
        _cache().unlink(missing_ok=True)


def _now() -> datetime:
    return datetime.now(UTC)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oneflare" / "bfloat16.json"


def _remembered() -> dict[str, SpeedMeasurement]:
    """Figures that still count; a file that is damaged or of another version is as good as none."""
    try:
        content = json.loads(_cache().read_text())
        figures = {key: SpeedMeasurement(**row) for key, row in content.items()}
        return {key: figure for key, figure in figures.items() if not (figure.doubtful or figure.old)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _remember(key: str, figure: SpeedMeasurement) -> None:
    figures = {**_remembered(), key: figure}
    latest = sorted(figures.items(), key=lambda item: item[1].measured)[-MOST_REMEMBERED:]
    with contextlib.suppress(OSError):
        write_json(_cache(), {name: asdict(kept) for name, kept in latest})


def _key(workload: Workload) -> str:
    return f"{_machine()} {workload.digest}"


def _machine() -> str:
    """The processor, torch, and the settings that choose among a processor's instructions."""
    chosen = "/".join(os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"))
    return hashlib.sha256(f"{_processor()} torch {torch.__version__} {chosen}".encode()).hexdigest()[:16]


@functools.cache
def _processor() -> tuple[str, ...]:
    """What `/proc/cpuinfo` says of the first processor: its name first, then model, stepping and flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return (platform.processor(),)
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return tuple(said.get(name, "") for name in ("model name", "model", "stepping", "flags"))


def _measure(workload: Workload) -> SpeedMeasurement:
    speedup, spread = _judge(_in_child(lambda: _time_pairs(workload)))
    name = _processor()[0] or platform.machine()
    return SpeedMeasurement(
        speedup, spread, _now().isoformat(timespec="seconds"), torch.__version__, name, workload.label
    )


def _judge(pairs: list[list[float]] | None) -> tuple[float, float]:
    """(speed-up, spread) of pairs of times (float32, bfloat16), as `_in_child` returns them."""
    if pairs is None:
        return 0.0, 0.0
    if len(pairs) < FEWEST_PAIRS:
        return (1.0 if pairs else 0.0), UNKNOWN
    columns = [sorted(times) for times in zip(*pairs, strict=True)]
    return round(columns[0][0] / columns[1][0], 3), round(max(map(_spread, columns)), 3)


def _spread(times: list[float]) -> float:
    """times: ascending"""
    return times[2] / times[0] - 1


def _in_child(work: Callable[[], list[list[float]]]) -> list[list[float]] | None:
    """What `work` returns in a child process.

    None: the processor cannot do it. []: it raised an error. One pair of ones: it was ended, so nothing is known.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        faulthandler.disable()
        code = 1
        with contextlib.suppress(BaseException):
            os.write(writing, json.dumps(work()).encode())
            code = 0
        os._exit(code)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], LONGEST_SECONDS)
            if not ready:
                os.kill(child, signal.SIGKILL)
            words = pipe.read()
    except BaseException:  # an interrupted command leaves no process behind
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None if os.WTERMSIG(status) in CRASHES else [[1.0, 1.0]]
    answer: list[list[float]] = json.loads(words) if os.WEXITSTATUS(status) == 0 else []
    return answer


def _time_pairs(workload: Workload) -> list[list[float]]:
    """Processor seconds of steps in float32 and in bfloat16, alternately."""
    torch.set_num_threads(1)
    for bfloat16 in (False, True):  # the first step prepares
        _time_step(workload, bfloat16)
    pairs: list[list[float]] = []
    spent = 0.0
    while len(pairs) < MOST_PAIRS:
        pairs.append([_time_step(workload, False), _time_step(workload, True)])
        spent += sum(pairs[-1])
        if len(pairs) >= FEWEST_PAIRS:
            settled = all(_spread(sorted(times)) <= SETTLED for times in zip(*pairs, strict=True))
            if settled or spent >= BUDGET_SECONDS:
                break
    return pairs


def _time_step(workload: Workload, bfloat16: bool) -> float:
    """Processor seconds of one forward and backward pass."""
    encoder = workload.encoder.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    shape = (BATCH, workload.channels, workload.size, workload.size)
    images = torch.rand(shape, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=torch.channels_last)
    images.requires_grad_(not any(parameter.requires_grad for parameter in encoder.parameters()))
    started = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        features = encoder(images)
    features.float().sum().backward()
    spent = time.process_time() - started
    encoder.zero_grad()
    return max(spent, 1e-9)
