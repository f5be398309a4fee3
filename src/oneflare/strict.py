"""JSON from strangers: what two readers could understand differently is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


def strict_json(text: str | bytes) -> Any:
    """Parse JSON as UTF-8; a key given twice, NaN, infinity and numbers that overflow are a ValueError."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key is given twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number overflows")
    return value


def _integer(text: str) -> int:
    if len(text) > 20:
        raise ValueError("a whole number is too long")
    return int(text)
