"""One HTML file that opens from disk: the story's tables, its figures, and the data behind them."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.errors import RunError
from oneflare.files import write_text
from oneflare.report.story import Story, comparison_story, run_story
from oneflare.stages import read_result
from oneflare.study import Comparison
from oneflare.study.compare import FILE, read_comparison

PAGE = "report.html"
SIGNS = {"confirmed": "✔", "refuted": "✘", "undecided": "?"}


def read_story(path: Path) -> Story:
    """Of a run or a comparison, whichever the folder holds."""
    if (path / FILE).exists():
        return comparison_story(read_comparison(path))
    if not path.is_dir():
        raise RunError(f"no folder at {path}")
    return run_story(read_result(path))


def write_report(folder: Path) -> Path:
    """The page, beside what it describes."""
    return write_page(read_story(folder))


def write_comparison(comparison: Comparison) -> Path:
    return write_page(comparison_story(comparison))


def write_page(story: Story) -> Path:
    path = story.folder / PAGE
    write_text(path, render(story))
    return path


def render(story: Story) -> str:
    from jinja2 import Environment
    from markupsafe import Markup

    part = resources.files("oneflare.report").joinpath
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(part("page.html.j2").read_text()).render(
        story=story,
        sections=_sections(story),
        signs=SIGNS,
        version=__version__,
        data=Markup(json_for_html(story.to_dict())),
        css=Markup(part("page.css").read_text()),
        script=Markup(part("page.js").read_text()),
    )


def _sections(story: Story) -> list[tuple[str, str]]:
    """Anchors and their names in the order a reader asks."""
    inside = [
        ("clients", "Clients"),
        ("lambda", "Lambda"),
        ("geometry", "Geometry"),
        ("fusions", "Fusions and cost"),
        ("classes", "Classes and calibration"),
    ]
    return [
        *([("verdicts", "Verdicts")] if story.verdicts else []),
        ("comparison", "Fusions compared" if story.kind == "run" else "Methods compared"),
        ("checkpoints", "Checkpoints"),
        *(inside if story.runs else []),
        ("provenance", "How it was made"),
    ]


def json_for_html(value: Any) -> str:
    """JSON that no name inside it can break out of: `<`, `>` and `&` are written as escapes, infinities as null."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
