"""Functions of progress p in [0, 1], for the learning rate and for the strength of alignment a(p), s(p)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from oneflare.registry import Registry

Schedule = Callable[[float], float]
SCHEDULES: Registry[Schedule] = Registry("schedule")


@SCHEDULES.register("constant")
def constant(*, value: float = 1.0) -> Schedule:
    """a(p) = value"""
    return lambda _: value


@SCHEDULES.register("linear")
def linear(*, start: float = 1.0, end: float = 0.0) -> Schedule:
    """a(p) = start + (end - start) p"""
    return lambda p: start + (end - start) * p


@SCHEDULES.register("cosine")
def cosine(*, start: float = 1.0, end: float = 0.0) -> Schedule:
    """a(p) = end + (start - end) (1 + cos(pi p)) / 2"""
    return lambda p: end + (start - end) * (1 + math.cos(math.pi * p)) / 2


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _complete(value: Mapping[str, Any]) -> dict[str, Any]:
    return SCHEDULES.complete(value, "schedule")


ScheduleSpec = Annotated[dict[str, Any], BeforeValidator(_named), AfterValidator(_complete)]


def build_schedule(spec: Mapping[str, Any] | str) -> Schedule:
    return SCHEDULES.build(_named(spec))
