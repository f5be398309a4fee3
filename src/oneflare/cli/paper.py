"""`oneflare paper`: writes the paper's tables, figures and text from the results of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oneflare.cli import names as complete


def paper(
    results: Annotated[
        Path, typer.Option("--results", "-r", help="Read the results of the studies from this folder.")
    ] = Path("results"),
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the paper into this folder.")] = Path("build/paper"),
    scale: Annotated[
        str | None,
        typer.Option(
            "--scale",
            "-s",
            help="Use the results of this scale: smoke, small, decisive or paper. Default: for each study, the largest "
            "that is there.",
            autocompletion=complete.complete_scales,
        ),
    ] = None,
    pdf: Annotated[bool, typer.Option("--pdf/--no-pdf", help="Make paper.pdf if LaTeX is installed.")] = True,
) -> None:
    """Write the paper: tables and figures for LaTeX, a short text that reads them, and the references.

    Studies without results are left out. LaTeX is needed for the PDF only.

    [bold]Examples[/bold]

      oneflare study table1 table2 table3 figure1 figure2 figure3 peers --scale smoke

      oneflare paper

      oneflare paper --results results --scale decisive --out build/paper --no-pdf
    """
    from oneflare.cli import show
    from oneflare.report.paper import build_pdf, read_material, write_paper
    from oneflare.report.paper.material import command

    material = read_material(results, scale)
    files = write_paper(material, out)
    show.done(f"paper: {files[0]} and {len(files) - 1} files beside it, scale {', '.join(material.scales)}")
    if material.missing:
        show.note(
            f"left out, for lack of results: {', '.join(material.missing)}; "
            f"`{command(material.missing, material.scales[0], results)}` makes them"
        )
    if not pdf:
        return
    built = build_pdf(out)
    if built.pdf is None:
        show.note(built.missing)
        return
    show.done(f"pdf: {built.pdf}")
    if built.undefined:
        show.note(f"warning: LaTeX did not find {', '.join(built.undefined)}")
    if built.overfull:
        show.note(f"LaTeX found {len(built.overfull)} lines that are wider than their column: {built.overfull[0]}")
