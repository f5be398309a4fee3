"""The settings of many runs: what all share is stated once, and each run adds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from oneflare.core.strict import strict_yaml

Flat = dict[str, Any]


def flat(content: Mapping[str, Any], prefix: str = "") -> Flat:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`; lists and empty tables are values."""
    found: Flat = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def nested(content: Flat) -> dict[str, Any]:
    """The inverse of `flat`."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def split(rows: Sequence[Flat]) -> tuple[Flat, list[Flat]]:
    """What all rows have alike, and the rest of each."""
    first, *others = rows
    shared = {key: value for key, value in first.items() if all(key in row and row[key] == value for row in others)}
    return shared, [{key: value for key, value in row.items() if key not in shared} for row in rows]


def settings_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """For the end of a page: settings and provenance of its runs, each said once."""
    if not runs:
        return None
    shared, own = split([flat(strict_yaml(run["configuration"])) for run in runs])
    everywhere, each = split([run["provenance"] for run in runs])
    columns = list(dict.fromkeys(name for row in each for name in row))
    return {
        "shared": yaml.safe_dump(nested(shared), sort_keys=False, allow_unicode=True),
        "facts": everywhere,
        "columns": columns,
        "rows": [
            {
                "label": run["label"],
                "panel": run["panel"],
                "own": ", ".join(f"{name} {_short(value)}" for name, value in mine.items()),
                "cells": [row.get(name, "") for name in columns],
            }
            for run, mine, row in zip(runs, own, each, strict=True)
        ]
        if len(runs) > 1
        else [],
    }


def _short(value: Any) -> str:
    if isinstance(value, list):
        return (
            "[" + ", ".join(_short(item.get("name", item) if isinstance(item, dict) else item) for item in value) + "]"
        )
    return "none" if value is None else str(value)
