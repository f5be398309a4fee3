"""`oneflare study`: runs the declared studies and prints which claims their figures support."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneflare.cli import names as complete
from oneflare.cli.commands import split_words
from oneflare.cli.options import Json, Quiet

if TYPE_CHECKING:
    from oneflare.client.observer import Outcome
    from oneflare.study.cells import Cell, StudyPlan

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]... [KEY=VALUE]...",
        help="Names of studies, a declaration of your own (.yaml), or 'all' of this scale; then settings for every "
        "cell. Without a name, the studies are listed.",
        show_default=False,
        autocompletion=complete.complete_studies,
    ),
]
ScaleName = Annotated[
    str,
    typer.Option(
        "--scale", "-s", help="The scale: smoke, small, decisive or paper.", autocompletion=complete.complete_scales
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds",
        "-n",
        min=1,
        help="Run this many seeds; default: 3. At the scale decisive: at most this many (default: 20), "
        "beginning with 5 and adding seeds while a claim is undecided.",
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Also run the additional data sets and alphas of each study.")]
Runs = Annotated[Path, typer.Option("--runs", help="Keep the runs in the folder cells/ of this folder.")]
Results = Annotated[Path, typer.Option("--out", "-o", help="Write the results into this folder.")]
Archive = Annotated[
    Path | None,
    typer.Option(
        "--figures",
        help="Keep the figures of every finished cell in this folder, one small file each, and do not run cells again "
        "whose figures are there. The studies' own are in results/cells.",
    ),
]
FirstSeed = Annotated[
    int,
    typer.Option("--first-seed", min=0, help="Count seeds from this number on, to repeat a study with other seeds."),
]
Processes = Annotated[
    int | None, typer.Option("--processes", "-p", min=1, help="Run this many cells at once; default: one per core.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the cells and an estimate of their time.")]
CollectOnly = Annotated[
    bool, typer.Option("--collect", help="Make the results from the finished cells, without running any.")
]


def study(
    words: Words = None,
    scale: ScaleName = "smoke",
    seeds: Seeds = None,
    first_seed: FirstSeed = 0,
    full: Full = False,
    runs: Runs = Path("runs"),
    out: Results = Path("results"),
    figures: Archive = None,
    processes: Processes = None,
    dry_run: DryRun = False,
    collect_only: CollectOnly = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a declared study, and report its tables, figures and claims with verdicts.

    Repeating the command continues where it stopped. Several processes may work on one folder of runs.

    [bold]Examples[/bold]

      oneflare study

      oneflare study table2 --scale smoke

      oneflare study table1 c8 c15 --scale small --dry-run

      oneflare study lambda epochs=4 --seeds 1 --out /tmp/quick
    """
    from oneflare.cli import show
    from oneflare.errors import WorkError
    from oneflare.study.cells import make_plan
    from oneflare.study.declare import declared, find_declaration
    from oneflare.study.scales import find_scale

    names, layer = split_words(words or ())
    if not names:
        show.studies([find_declaration(name) for name in declared()])
        return
    size = find_scale(scale)
    chosen = [find_declaration(name) for name in (declared() if names == ["all"] else names)]
    if names == ["all"]:
        chosen = [declaration for declaration in chosen if declaration.grids(scale)]
    plans = [
        make_plan(declaration, size, seeds=seeds, first_seed=first_seed, full=full, overrides=layer)
        for declaration in chosen
    ]
    if figures is not None:
        _take(plans, runs, figures)
    if dry_run:
        _dry_run(plans, runs, processes, json=json)
        return
    failed = [] if collect_only else _run(plans, runs, figures, processes, quiet=quiet)
    _report(plans, runs, out, json=json, quiet=quiet)
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise WorkError(f"{failed[0].cell} failed{more}: {failed[0].reason}")


def _take(plans: list[StudyPlan], runs: Path, archive: Path) -> None:
    """Lay kept figures into the folder of runs, and keep those of runs that have finished without being kept."""
    from oneflare.study.archive import keep_missing, take_figures
    from oneflare.study.cells import merged
    from oneflare.study.execute import is_complete

    cells = merged(cell for plan in plans for cell in plan.cells.values())
    take_figures(cells, runs, archive)
    keep_missing([cell for cell in cells if is_complete(cell, runs)], runs, archive)


def _run(
    plans: list[StudyPlan], runs: Path, archive: Path | None, processes: int | None, *, quiet: bool
) -> list[Outcome]:
    """Run what the plans need, with the progress of every round; returns the cells that failed."""
    from oneflare.cli import show
    from oneflare.cli.study_progress import study_progress
    from oneflare.study.estimate import estimate
    from oneflare.study.execute import run_cells
    from oneflare.study.sequential import run_until_clear

    def work(cells: list[Cell], round_number: int) -> list[Outcome]:
        if round_number and not quiet:
            show.note(f"undecided claims need {len(cells)} more cells")
        with study_progress(enabled=not quiet, seconds=estimate(cells, runs)) as observer:
            return run_cells(cells, runs, processes=processes, observer=observer, archive=archive)

    return run_until_clear(plans, runs, work)


def _report(plans: list[StudyPlan], runs: Path, out: Path, *, json: bool, quiet: bool) -> None:
    """Write the results and the page of every study from its finished cells, and show them."""
    from oneflare.cli import show
    from oneflare.report import write_study
    from oneflare.study.results import collect, write_results

    contents = [collect(plan, runs) for plan in plans]
    paths = [write_results(content, out) for content in contents]
    pages = [write_study(path, runs) for path in paths]
    if json:
        found = [content.to_dict() for content in contents]
        show.as_json(found[0] if len(found) == 1 else found)
    elif not quiet:
        for content, path, page in zip(contents, paths, pages, strict=True):
            show.study_results(content)
            show.line(f"results: {path}, {path.with_suffix('.md')}")
            show.line(f"report: {page}")


def _dry_run(plans: list[StudyPlan], runs: Path, processes: int | None, *, json: bool) -> None:
    from oneflare.cli import show
    from oneflare.simulation.engines import default_workers
    from oneflare.study.cells import merged, unique_cells
    from oneflare.study.estimate import duration, estimate
    from oneflare.study.execute import is_complete

    cells = unique_cells(plans)
    seconds = estimate(cells, runs)
    done = {cell.name: is_complete(cell, runs) for cell in cells}
    if json:
        show.as_json(
            [
                {
                    "cell": cell.name,
                    "folder": str(cell.folder(runs)),
                    "done": done[cell.name],
                    "seconds": round(seconds[cell.name], 1),
                    "layer": cell.layer,
                    "fusions": list(cell.fusions),
                }
                for cell in cells
            ]
        )
        return
    for cell in cells:
        show.line(f"{cell.name}  {'done' if done[cell.name] else duration(seconds[cell.name])}")
    at_once = processes or default_workers()
    show.line(
        f"{len(cells)} cells, {sum(done.values())} done; about {duration(_left(cells, runs) / at_once)} left with "
        f"{at_once} at once"
    )
    most = merged(cell for plan in plans for cell in plan.cells.values())
    if len(most) > len(cells):
        show.line(
            f"up to {len(most)} cells and {duration(_left(most, runs) / at_once)} if every claim needs all its seeds"
        )


def _left(cells: list[Cell], runs: Path) -> float:
    """Estimated seconds of one core for what is not complete."""
    from oneflare.study.estimate import estimate
    from oneflare.study.execute import is_complete

    seconds = estimate(cells, runs)
    return sum(seconds[cell.name] for cell in cells if not is_complete(cell, runs))
