"""Figures of the long tests: one JSON file each, from which the table of docs/reliability.md is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.files import write_json

RESULTS = Path(__file__).parents[2] / "results" / "trust"


def record(name: str, figures: dict[str, Any]) -> None:
    write_json(RESULTS / f"{name}.json", {"oneflare": __version__, **figures})
    print(f"{name}: {figures}")
