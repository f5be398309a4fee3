"""Commands about trust: what uploads reveal, and what hostile uploads do to a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneflare.cli.options import Json, Quiet

if TYPE_CHECKING:
    from oneflare.study.audit import Audit

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]


def audit(folder: RunFolder, json: Json = False, quiet: Quiet = False) -> None:
    """Attack the uploads of a finished run: who was trained on, and how many images of each class a client has.

    Every row is one way to send the same message, with and without the privacy switches; * marks the run's own.

    [bold]Example[/bold]

      oneflare audit runs/demo/flare-s0
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.study.audit import audit_run

    with progress(enabled=not quiet, table=False) as observer:
        found = audit_run(folder, observer)
    if json:
        show.as_json(found.to_dict())
    elif not quiet:
        _print(found)


def attacks(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Write attacks.json and attacks.md into this folder.")
    ] = Path("results/trust"),
    runs: Annotated[
        Path, typer.Option("--runs", help="Keep the runs in this folder; finished runs are not repeated.")
    ] = Path("runs/attacks"),
    seeds: Annotated[int, typer.Option("--seeds", "-n", min=1, help="Run this many seeds, from 0 to n-1.")] = 3,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Poison the uploads of some members in many ways (networks, counts, statistics, densities); measure every fusion.

    [bold]Example[/bold]

      oneflare attacks --seeds 1 --out /tmp/attacks
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.study.attack_study import attack_study, attack_tables, write_study

    with progress(enabled=not quiet, table=False) as observer:
        content = attack_study(runs, seeds=seeds, observer=observer)
    write_study(content, out)
    if json:
        show.as_json(content)
    elif not quiet:
        show.line(attack_tables(content))


def _print(found: Audit) -> None:
    from rich.table import Table

    from oneflare.cli import show
    from oneflare.study.audit import FALSE_POSITIVES

    table = Table(title="what a reader of the uploads learns", title_justify="left", title_style="bold")
    table.add_column("sent as")
    for name in ("membership AUC", f"found at {FALSE_POSITIVES:.0%} false alarms", "images"):
        table.add_column(name, justify="right")
    for name in ("class shares off by", "by guessing", "correlation"):
        table.add_column(name, justify="right")
    for row in found.rows:
        member, labels = row.membership, row.labels
        cells = (
            ["–"] * 3 if member is None else [f"{member.auc:.3f}", f"{member.true_positives:.1%}", f"{member.images}"]
        )
        if labels is None:
            cells += ["–"] * 3
        else:
            correlation = "–" if labels.correlation is None else f"{labels.correlation:.2f}"
            cells += [f"{labels.total_variation:.3f}", f"{labels.guessing:.3f}", correlation]
        table.add_row(row.switches + (" *" if row.used else ""), *cells)
    console = show.console_for()
    console.print(table)
    console.print(
        "Membership: 0.5 and "
        f"{FALSE_POSITIVES:.0%} are no better than guessing. Class shares: total variation distance, 0 is exact."
    )
    console.print(f"file: {found.folder / 'audit.json'}")
