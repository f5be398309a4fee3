"""`oneflare fuse`: fuses the uploads of finished runs in other ways or with other members, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oneflare.cli import names
from oneflare.cli.options import Json, Quiet

if TYPE_CHECKING:
    from oneflare.fusion.membership import Membership
    from oneflare.simulation.results import DiagnosticsResult
    from oneflare.study.fusing import BenchTable, Spread

WIDTH = 150
MEGA, MEBI = 1e6, 2**20


Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs, or a comparison.")]
Fusions = Annotated[
    list[str] | None,
    typer.Option(
        "--fusion",
        "-f",
        help="A fusion by its name, or '{name: ..., option: ...}'; may be repeated.",
        autocompletion=names.complete_fusions,
    ),
]
Everything = Annotated[
    bool, typer.Option("--all", help="Run every fusion that these uploads allow, and measure its cost.")
]
WithTraining = Annotated[
    bool,
    typer.Option("--with-training", help="With --all, also run the fusions that train a network on the server."),
]
Without = Annotated[list[int] | None, typer.Option("--without", help="Leave this client out; may be repeated.")]
Joining = Annotated[
    list[Path] | None, typer.Option("--with", help="Add the upload of another client; may be repeated.")
]
Diagnostics = Annotated[
    bool,
    typer.Option("--diagnostics", help="Also measure neural collapse, CKA, cosines and distances between clients."),
]


def fuse(
    folders: Runs,
    fusion: Fusions = None,
    everything: Everything = False,
    with_training: WithTraining = False,
    without: Without = None,
    joining: Joining = None,
    diagnostics: Diagnostics = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fuse the uploads of finished runs in another way, or of other members, without training.

    --all prints one table of everything the uploads can feed: quality, cost of a prediction, and what fusing took on
    the server. Over several seeds: mean, deviation and paired difference to the first fusion.

    [bold]Examples[/bold]

      oneflare fuse runs/demo/flare-s0 --fusion iffi_released

      oneflare fuse runs/demo/flare-s0 --fusion '{name: robust_prototypes, count_cap: 50}'

      oneflare fuse runs/demo --all

      oneflare fuse runs/demo/flare-s0 --without 3
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.fusion.membership import Membership
    from oneflare.study.compare import FILE
    from oneflare.study.fusing import bench_runs

    membership = Membership(tuple(without or ()), tuple(joining or ()))
    asked = [_spec(text) for text in fusion or ()]
    more = everything or diagnostics or not membership.unchanged
    _check_words(asked, everything=everything, with_training=with_training, more=more)
    if not more and len(folders) == 1 and not (folders[0] / FILE).exists():
        _fuse_one(folders[0], asked, json=json, quiet=quiet)
        return
    with progress(enabled=not quiet, table=False) as observer:
        tables = bench_runs(
            folders,
            names=None if everything else _wanted(asked, folders, membership),
            with_training=with_training,
            membership=membership,
            diagnostics=diagnostics,
            observer=observer,
        )
    if json:
        show.as_json({"tables": [table.to_dict() for table in tables]})
    elif not quiet:
        for table in tables:
            _print(table)


def _wanted(
    asked: Sequence[Mapping[str, Any]], folders: Sequence[Path], membership: Membership
) -> Sequence[str | Mapping[str, Any]]:
    """The fusions that were asked for; other members without a named fusion mean the runs' own fusions."""
    from oneflare.study.fusing import own_fusions

    return asked if asked or membership.unchanged else own_fusions(folders)


def _check_words(asked: Sequence[Mapping[str, Any]], *, everything: bool, with_training: bool, more: bool) -> None:
    """Refuse options that contradict each other, and a command that asks for nothing."""
    from oneflare.errors import ConfigError

    if everything and asked:
        raise ConfigError("--all already names every fusion; give --all or --fusion, not both")
    if with_training and not everything:
        raise ConfigError("--with-training belongs to --all; a fusion that is named trains anyway")
    if not (asked or more):
        raise ConfigError("nothing to do; name a --fusion, or use --all, --diagnostics, --without or --with")


def _fuse_one(folder: Path, asked: Sequence[Mapping[str, Any]], *, json: bool, quiet: bool) -> None:
    """Add fusions to the result of one run, and show that result."""
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.simulation.stages import fuse_run

    with progress(enabled=not quiet, table=False) as observer:
        result = fuse_run(folder, asked, observer)
    show.result(result, json=json, quiet=quiet)


def _spec(text: str) -> dict[str, Any]:
    """`name`, or `{name: ..., option: ...}` as in a file of settings."""
    from oneflare.core.strict import strict_yaml
    from oneflare.errors import ConfigError

    try:
        spec = strict_yaml(text) if text.lstrip().startswith("{") else {"name": text}
    except ValueError:
        spec = None
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise ConfigError(
            f"--fusion: '{text}' is neither a name nor '{{name: NAME, OPTION: VALUE}}'; `oneflare methods`"
        )
    return spec


def _print(table: BenchTable) -> None:
    from oneflare.cli import show

    console = show.console_for()
    console.width = max(console.width, WIDTH)
    experiment = table.experiment
    skew = f" alpha {experiment.partition.alpha:g}" if "dirichlet" in experiment.partition.kind else ""
    seeds = ", ".join(str(run.experiment.seed) for run in table.runs)
    console.print(
        f"[bold]{experiment.method}[/bold] on {experiment.data.name}, {experiment.partition.kind}{skew}, seed {seeds}"
    )
    clients = {run.clients for run in table.runs}
    if len(clients) == 1:
        console.print(f"clients {', '.join(map(str, *clients))}")
    if table.names:
        console.print(_figures(table))
        console.print(
            f"difference: accuracy minus that of {table.first} on the same uploads, points; server s, MiB: processor "
            "time and resident memory that fusing took in a process of its own; MB: what it reads of all uploads"
        )
    for name, reason in table.left_out.items():
        console.print(f"not in the table: {name} {reason}", soft_wrap=True)
    for run in table.runs:
        if run.diagnostics is not None:
            console.print(_diagnostics(run.diagnostics, f"diagnostics, seed {run.experiment.seed}"))
        console.print(f"files: {run.folder}")


def _figures(table: BenchTable) -> Any:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("fusion")
    headings = (
        "accuracy %", "difference", "balanced %", "worst class %", "calib. error %", "parameters", "passes",
        "server s", "MiB", "MB",
    )  # fmt: skip
    for heading in headings:
        shown.add_column(heading, justify="right")
    for name in table.names:
        percent = [
            _spread(table.figure(name, key), 100)
            for key in ("accuracy", "balanced_accuracy", "worst_class", "calibration_error")
        ]
        difference = "" if name == table.first else _spread(table.difference(name), 100, sign="+")
        shown.add_row(
            name,
            percent[0],
            difference,
            *percent[1:],
            _number(table.figure(name, "parameters"), "{:,.0f}"),
            _number(table.figure(name, "forward_passes"), "{:.3g}"),
            _number(table.figure(name, "fuse_cpu_seconds"), "{:.2f}"),
            _number(table.figure(name, "peak_memory_bytes"), "{:.1f}", MEBI),
            _number(table.figure(name, "needed_bytes"), "{:.2f}", MEGA),
        )
    return shown


def _spread(spread: Spread | None, factor: float, sign: str = "") -> str:
    if spread is None:
        return "–"
    text = f"{factor * spread.mean:{sign}.1f}"
    return text if spread.std is None else f"{text} ± {factor * spread.std:.1f}"


def _number(spread: Spread | None, pattern: str, unit: float = 1.0) -> str:
    return "–" if spread is None else pattern.format(spread.mean / unit)


def _diagnostics(content: DiagnosticsResult, title: str) -> Any:
    from rich.table import Table

    from oneflare.study.fusing import DIAGNOSTICS

    shown = Table(title=title, title_justify="left", title_style="bold")
    shown.add_column("figure")
    shown.add_column("value", justify="right")
    shown.add_column("what it is")
    for key, text in DIAGNOSTICS.items():
        value = getattr(content, key)
        if isinstance(value, list):
            cell = " ".join(f"{item:.2f}" for item in value)
        else:
            cell = "–" if value is None else f"{value:.4g}"
        shown.add_row(key, cell, text)
    return shown
