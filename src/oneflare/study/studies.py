"""The declared studies: what each runs, and which claims are tested on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneflare.client.observer import Observer
from oneflare.core.files import digest_of, write_json, write_text
from oneflare.core.layers import Layer, merge
from oneflare.errors import ConfigError, did_you_mean
from oneflare.methods.resolve import resolve
from oneflare.study.compare import Comparison, compare_methods


@dataclass(frozen=True)
class CheckedClaim:
    """A statement, whether the runs bear it out, and the figures that say so."""

    text: str
    holds: bool
    evidence: str


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """what a reader must know to judge it"""


@dataclass(frozen=True)
class MethodBlock:
    """Methods that are run under shared settings, and what is read off them."""

    name: str
    methods: tuple[str, ...]
    settings: Layer
    table: Callable[[Comparison], Table]
    claims: tuple[Callable[[Comparison], CheckedClaim], ...]


@dataclass(frozen=True)
class Study:
    name: str
    summary: str
    blocks: tuple[MethodBlock, ...]


@dataclass(frozen=True)
class StudyReport:
    study: str
    path: Path
    seeds: int
    seconds: float
    """of this call; runs that were there already cost nothing"""
    train_seconds: float
    """of all clients of all runs, whenever they were trained"""
    blocks: tuple[Table, ...]
    claims: tuple[CheckedClaim, ...]
    runs: dict[str, list[str]]
    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        content = asdict(self)
        for key in ("path", "seconds"):
            content.pop(key)
        return content

    def to_markdown(self) -> str:
        lines = [
            f"# Study: {self.study}",
            "",
            f"{self.seeds} seeds, paired partitions; {self.train_seconds:.0f} s of training over all clients.",
        ]
        for block in self.blocks:
            lines += ["", f"## {block.title}", "", "| " + " | ".join(block.columns) + " |"]
            lines += ["|" + "---|" * len(block.columns)]
            lines += ["| " + " | ".join(row) + " |" for row in block.rows]
            lines += ["", block.note] if block.note else []
        lines += ["", "## Claims", ""]
        lines += [f"- {'confirmed' if c.holds else '**not confirmed**'}: {c.text} ({c.evidence})" for c in self.claims]
        return "\n".join(lines) + "\n"


def studies() -> dict[str, Study]:
    from oneflare.study.laboratory import LAMBDA

    return {study.name: study for study in (LAMBDA,)}


def find_study(name: str) -> Study:
    known = studies()
    if name not in known:
        raise ConfigError(f"unknown study '{name}'{did_you_mean(name, known)}")
    return known[name]


def run_study(
    study: Study,
    layer: Layer,
    *,
    seeds: int = 3,
    folder: Path = Path("results"),
    observer: Observer | None = None,
) -> StudyReport:
    """Run what is missing, test the claims, write `<folder>/<study>/<data>.json` and `.md`."""
    started = time.monotonic()
    tables: list[Table] = []
    claims: list[CheckedClaim] = []
    runs: dict[str, list[str]] = {}
    settings: dict[str, Any] = {}
    data, train_seconds = "", 0.0
    for block in study.blocks:
        comparison = _compare(study, block, layer, seeds, observer)
        data = resolve(block.settings, layer, {"method": block.methods[0]}).data.name
        tables.append(block.table(comparison))
        claims += [claim(comparison) for claim in block.claims]
        for method, results in comparison.results.items():
            runs[f"{block.name}/{method}"] = [str(result.folder) for result in results]
            train_seconds += sum(result.content.cost.train_seconds for result in results)
        settings[block.name] = merge(block.settings, layer)
    findings = StudyReport(
        study.name,
        folder / study.name / f"{data}.json",
        seeds,
        time.monotonic() - started,
        train_seconds,
        tuple(tables),
        tuple(claims),
        runs,
        settings,
    )
    write_json(findings.path, findings.to_dict())
    write_text(findings.path.with_suffix(".md"), findings.to_markdown())
    return findings


def _compare(study: Study, block: MethodBlock, layer: Layer, seeds: int, observer: Observer | None) -> Comparison:
    layers: Sequence[Layer] = [block.settings, layer]
    digest = digest_of([resolve(*layers, {"method": name}).training_digest() for name in block.methods])
    folder = Path("runs") / f"study-{study.name}-{block.name}-{digest[:8]}"
    return compare_methods(block.methods, layers, seeds=seeds, folder=folder, observer=observer)
