"""Functions of progress p in [0, 1], for the learning rate and for the strength of alignment a(p), s(p).

Every schedule takes two more options. `warmup`: over that part of training the value rises linearly from 0, and the
curve has the rest; `decay`: an envelope 1/(1 + decay p) over the whole. With decay in proportion to the number of
steps, sum eta diverges and sum eta^2 converges, which is what the convergence of SGD asks for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from oneflare.core.registry import Registry

Schedule = Callable[[float], float]
SCHEDULES: Registry[Schedule] = Registry("schedule")

Warmup = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(ge=0)]
ROUNDING = 1e-9
"""p = step/total is not exact, and a restart belongs to the step it is due at"""


@dataclass(frozen=True)
class Shaped:
    """warm-up, envelope and curve: a(p) = min(p/warmup, 1) curve(q)/(1 + decay p), q = (p - warmup)/(1 - warmup)"""

    curve: Schedule
    warmup: float = 0.0
    decay: float = 0.0
    cycle_starts: tuple[float, ...] = ()
    """restarts, in the progress of the curve"""

    def __call__(self, p: float) -> float:
        if p < self.warmup:
            return self.curve(0.0) * (p / self.warmup) / (1 + self.decay * p)
        return self.curve((p - self.warmup) / (1 - self.warmup)) / (1 + self.decay * p)

    @property
    def restarts(self) -> tuple[float, ...]:
        """Progress at which a new cycle begins."""
        return tuple(self.warmup + (1 - self.warmup) * start for start in self.cycle_starts)


@SCHEDULES.register("constant")
def constant(*, value: float = 1.0, warmup: Warmup = 0.0, decay: Decay = 0.0) -> Schedule:
    """a(p) = value"""
    return Shaped(lambda _: value, warmup, decay)


@SCHEDULES.register("linear")
def linear(*, start: float = 1.0, end: float = 0.0, warmup: Warmup = 0.0, decay: Decay = 0.0) -> Schedule:
    """a(p) = start + (end - start) p"""
    return Shaped(lambda p: start + (end - start) * p, warmup, decay)


@SCHEDULES.register("cosine")
def cosine(*, start: float = 1.0, end: float = 0.0, warmup: Warmup = 0.0, decay: Decay = 0.0) -> Schedule:
    """a(p) = end + (start - end) (1 + cos(pi p)) / 2"""
    return Shaped(lambda p: _half_wave(start, end, p), warmup, decay)


@SCHEDULES.register("cosine_restarts")
def cosine_restarts(
    *,
    cycles: Annotated[int, Field(ge=1)] = 4,
    growth: Annotated[float, Field(ge=1)] = 1.0,
    start: float = 1.0,
    end: float = 0.0,
    warmup: Warmup = 0.0,
    decay: Decay = 0.0,
) -> Schedule:
    """cosine with warm restarts (SGDR): a cosine per cycle, each cycle `growth` times as long as the one before"""
    lengths = [growth**k for k in range(cycles)]
    starts = [sum(lengths[:k]) / sum(lengths) for k in range(cycles)]
    ends = [*starts[1:], 1.0]

    def curve(p: float) -> float:
        cycle = bisect_right(starts, p + ROUNDING) - 1
        within = (p - starts[cycle]) / (ends[cycle] - starts[cycle])
        return _half_wave(start, end, min(max(within, 0.0), 1.0))

    return Shaped(curve, warmup, decay, tuple(starts[1:]))


def _half_wave(start: float, end: float, p: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * p)) / 2


def restart_steps(schedule: Schedule, total_steps: int) -> frozenset[int]:
    """Steps that open a new cycle; empty for a schedule without restarts."""
    points = getattr(schedule, "restarts", ())
    return frozenset(math.ceil((point - ROUNDING) * total_steps) for point in points)


def peak(schedule: Schedule, points: int = 1000) -> float:
    """The largest value it takes."""
    return max(schedule(k / points) for k in range(points + 1))


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _complete(value: Mapping[str, Any]) -> dict[str, Any]:
    return SCHEDULES.complete(value, "schedule")


ScheduleSpec = Annotated[dict[str, Any], BeforeValidator(_named), AfterValidator(_complete)]


def build_schedule(spec: Mapping[str, Any] | str) -> Schedule:
    return SCHEDULES.build(_named(spec))
