"""Figures of the long tests: one JSON file each, from which the table of docs/reliability.md is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.core.files import write_json

RESULTS = Path(__file__).parents[2] / "results" / "trust"


def record(name: str, figures: dict[str, Any]) -> None:
    write_json(RESULTS / f"{name}.json", {"oneflare": __version__, **figures})
    print(f"{name}: {figures}")


def record_door(name: str, *, promise: str, tried: str, outcome: str) -> None:
    """One row of the table about somebody who wants in where they do not belong, in a file of its own.

    promise: what must not be possible; tried: by whom and how often; outcome: what they were answered, with figures.
    """
    record(f"doors/{name}", {"promise": promise, "tried": tried, "outcome": outcome})
