"""`oneflare report`: writes the page of a result, and its figures and tables as files for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="WHAT",
            help="The folder of a run, a comparison or a federation, or the JSON file with a study's results.",
        ),
    ],
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write the figures as files into this folder.")
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="Format of the figures: pdf, png or svg.")] = "pdf",
    latex: Annotated[bool, typer.Option("--latex", help="Also write the tables as LaTeX, beside the page.")] = False,
    runs: Annotated[Path, typer.Option("--runs", help="For a study, the folder of its runs.")] = Path("runs"),
) -> None:
    """Write one page that tells what was run and what came out: open it in any browser, no network needed.

    [bold]Examples[/bold]

      oneflare report runs/demo

      oneflare report federation

      oneflare report results/table2/smoke.json --latex

      oneflare report runs/demo --figures figures --format pdf
    """
    from oneflare.cli import show
    from oneflare.core.files import write_text
    from oneflare.errors import ConfigError, did_you_mean
    from oneflare.federation.page import is_federation, read_federation, write_federation_page
    from oneflare.report.figures import FORMATS, write_figures
    from oneflare.report.latex import latex as tables_of
    from oneflare.report.page import read_story, write_page

    if kind not in FORMATS:
        raise ConfigError(f"--format: unknown format '{kind}'{did_you_mean(kind, FORMATS)}")
    if is_federation(path):
        if figures is not None or latex:
            raise ConfigError(f"{path} is a federation; its page has no figures or tables to write as files")
        show.done(f"report: {write_federation_page(read_federation(path))}")
        return
    story = read_story(path, runs)
    show.done(f"report: {write_page(story)}")
    if latex:
        tables = story.page.with_suffix(".tex")
        write_text(tables, tables_of(story))
        show.done(f"tables: {tables}")
    if figures is not None:
        written = write_figures(story, figures, kind)
        show.done(f"figures: {len(written)} in {figures}")
