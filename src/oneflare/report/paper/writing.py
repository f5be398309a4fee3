"""Writes the folder of the paper: tables, figures, text and references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oneflare.core.files import write_text
from oneflare.report.paper import figures, tables, text
from oneflare.report.paper.material import Material
from oneflare.report.pictures import save
from oneflare.study.records import StudyResult

TABLES: dict[str, Callable[[StudyResult], str]] = {
    "table1": tables.main_table,
    "table2": tables.ablation_table,
    "table3": tables.valve_table,
    "peers": tables.peers_table,
}
FIGURES: dict[str, tuple[str, Callable[[StudyResult], Any]]] = {
    "figure1": ("fig:checkpoints", figures.checkpoints_figure),
    "figure2": ("fig:lambda", figures.lambda_figure),
    "figure3": ("fig:valve", figures.valve_figure),
    "peers": ("fig:peers", figures.peers_figure),
}
REFERENCES = Path(__file__).with_name("references.bib")
HEADER = "% Written by `oneflare paper`; needs \\usepackage{{{packages}}}\n"


def write_paper(material: Material, folder: Path) -> list[Path]:
    """Everything that LaTeX needs, written into the folder; returns the files, `paper.tex` first.

    What an earlier paper left there and this one does not have is removed, so that no old table is read with new ones.
    """
    contents: dict[Path, str] = {folder / "paper.tex": text.document(material)}
    contents[folder / "references.bib"] = REFERENCES.read_text(encoding="utf-8")
    for study, make in TABLES.items():
        if study in material.studies:
            contents[folder / "tables" / f"{study}.tex"] = _table(make(material.studies[study]))
    if material.claims:
        claims = tables.claims_table(material.claims)
        contents[folder / "tables" / "claims.tex"] = HEADER.format(packages="array,booktabs,longtable") + claims + "\n"
    for study, (label, _) in FIGURES.items():
        if study in material.studies:
            contents[folder / "figures" / f"{study}.tex"] = _figure(study, label, material.studies[study])
    drawn = [study for study in FIGURES if study in material.studies]
    pictures = [folder / "figures" / f"{study}.pdf" for study in drawn]
    _remove_others(folder, {*contents, *pictures})
    for path, content in contents.items():
        write_text(path, content)
    for study, path in zip(drawn, pictures, strict=True):
        with figures.drawn_sizes():
            save(FIGURES[study][1](material.studies[study]), path)
    return [*contents, *pictures]


def _remove_others(folder: Path, wanted: set[Path]) -> None:
    """Only files that this module writes under these names, and the PDF made of them."""
    known = [folder / "paper.pdf", folder / "paper.log"]
    known += [folder / "tables" / f"{name}.tex" for name in (*TABLES, "claims")]
    known += [folder / "figures" / f"{name}.{kind}" for name in FIGURES for kind in ("tex", "pdf")]
    for path in known:
        if path not in wanted:
            path.unlink(missing_ok=True)


def _table(body: str) -> str:
    return HEADER.format(packages="booktabs") + body + "\n"


def _figure(study: str, label: str, content: StudyResult) -> str:
    """The picture with its caption, to be read with `\\input`."""
    wide = study == "peers" or len(content.places) > 1
    kind = "figure*" if wide else "figure"
    lines = [
        HEADER.format(packages="graphicx").rstrip(),
        rf"\begin{{{kind}}}",
        r"\centering",
        rf"\includegraphics[width=\linewidth]{{figures/{study}.pdf}}",
        rf"\caption{{{text.caption(study, content)}}}",
        rf"\label{{{label}}}",
        rf"\end{{{kind}}}",
    ]
    return "\n".join(lines) + "\n"
