"""Writes one self-contained HTML file: the story's tables, its figures, and the data behind them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oneflare.core.files import write_text
from oneflare.errors import RunError
from oneflare.report.collect import comparison_story, run_story
from oneflare.report.forest import forest
from oneflare.report.from_study import is_study, study_story
from oneflare.report.rendering import render_page
from oneflare.report.settings import settings_of
from oneflare.report.story import Story
from oneflare.report.words import ABOUT, has_checkpoints, words_of
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import read_result
from oneflare.study import Comparison
from oneflare.study.compare import FILE, read_comparison

SIGNS = {"confirmed": "✔", "refuted": "✘", "no difference": "≈", "undecided": "?"}
SCRIPTS = ("chart.js", "figures.js", "page.js", "frame.js")
STYLES = ("page.css",)
SHOW_ALL_PANELS = 3
"""up to here the tables of all settings are open at once"""


def read_story(path: Path, runs: Path = Path("runs")) -> Story:
    """Of a run, a comparison (folders) or a study (its JSON, or the folder that holds nothing else)."""
    if is_study(path):
        return study_story(path, runs)
    if not path.exists():
        raise RunError(f"nothing at {path}; give the folder of a run or a comparison, or the JSON of a study")
    if (path / FILE).exists():
        return comparison_story(read_comparison(path))
    if not RunFiles(path).experiment.exists():
        scales = sorted(path.glob("*.json"))
        if len(scales) == 1:
            return study_story(scales[0], runs)
        if scales:
            raise RunError(f"{path} holds several results; choose one of {', '.join(str(scale) for scale in scales)}")
    return run_story(read_result(path))


def write_report(path: Path, runs: Path = Path("runs")) -> Path:
    """The page, beside what it describes."""
    return write_page(read_story(path, runs))


def write_comparison(comparison: Comparison) -> Path:
    return write_page(comparison_story(comparison))


def write_study(path: Path, runs: Path) -> Path:
    """path: a study's results (JSON); the page has the same name and ends in .html"""
    return write_page(study_story(path, runs))


def write_page(story: Story) -> Path:
    write_text(story.page, render(story))
    return story.page


def render(story: Story) -> str:
    parts = _parts(story)
    return render_page(
        "page.html.j2",
        story.to_dict(),
        SCRIPTS,
        STYLES,
        title=story.title,
        story=story,
        sections=_sections(story, parts),
        parts=parts,
        about=ABOUT,
        words=list(words_of(story)),
        settings=settings_of(story.runs),
        marks=forest([verdict.tests for verdict in story.verdicts]),
        signs=SIGNS,
        main_words="the study's main fusion" if story.kind == "study" else "the method's own fusion",
        show_all=len(story.panels) <= SHOW_ALL_PANELS,
        start=_first_to_show(story),
    )


def _sections(story: Story, parts: Mapping[str, bool]) -> list[tuple[str, str]]:
    """Anchors and their names in the order a reader asks."""
    found = [
        ("verdicts", "Verdicts", bool(story.verdicts)),
        ("comparison", "Fusions compared" if story.kind == "run" else "Methods compared", True),
        ("log", "The research log", bool(story.log)),
        ("checkpoints", "Over training", parts["checkpoints"]),
        ("fusions", "Fusions and cost", True),
        ("lambdas", "Lambda by method", parts["lambdas"]),
        ("clients", "Clients", bool(story.runs)),
        ("lambda", "Lambda by client", parts["lambda"]),
        ("geometry", "Geometry", parts["geometry"]),
        ("classes", "Classes and calibration", bool(story.runs)),
        ("words", "Words used here", True),
        ("provenance", "How it was made", True),
    ]
    return [(anchor, name) for anchor, name, there in found if there]


def _parts(story: Story) -> dict[str, bool]:
    """Sections that have something to show; a run shows its clients' lambda, several methods also theirs."""
    return {
        "checkpoints": has_checkpoints(story),
        "lambdas": story.kind != "run" and any(panel.lambdas for panel in story.panels),
        "lambda": any(run["lambda"] is not None for run in story.runs),
        "geometry": any(run["geometry"] is not None for run in story.runs),
    }


def _first_to_show(story: Story) -> int:
    """The run to open: the first whose lambda has a valve, else the first that has a lambda to look at."""
    pulled = [number for number, run in enumerate(story.runs) if run["lambda"] is not None]
    return next((number for number in pulled if story.runs[number]["lambda"]["bound"]), pulled[0] if pulled else 0)
