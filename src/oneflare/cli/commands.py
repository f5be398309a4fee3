"""The commands. Each parses, calls the library and prints; results go to stdout, everything else to stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oneflare.cli import names

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings. Short forms: data= alpha= clients= method= epochs= seed= encoder=; "
        "everything else dotted, e.g. train.lr=0.05 partition.kind=iid.",
        show_default=False,
        autocompletion=names.complete_settings,
    ),
]
Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file with settings.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Folder for the files; default: runs/NAME, derived from the settings."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables; files and --json as always.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="Log to tensorboard or mlflow as it runs (extra `track`); repeatable."),
]


def run(
    overrides: Overrides = None,
    config: Config = None,
    out: Out = None,
    track: Track = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train every client alone, fuse their uploads, measure the result.

    The same command again resumes an interrupted run, or says that it is complete.

    [bold]Examples[/bold]

      oneflare run

      oneflare run method=fafi data=cifar10 data.train_size=5000 alpha=0.1 epochs=20

      oneflare run --config experiment.yaml seed=3 --json

      oneflare run method=flare --track tensorboard
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.cli.tracking import tracked
    from oneflare.core.config import parse_overrides, read_yaml
    from oneflare.methods.resolve import resolve
    from oneflare.simulation.stages import choose_folder, run_experiment

    layers = [read_yaml(config)] if config else []
    experiment = resolve(*layers, parse_overrides(overrides or []))
    with progress(enabled=not quiet, table=not json) as display, tracked(display, track) as observer:
        folder = choose_folder(experiment, out, observer)
        result = run_experiment(experiment, folder, observer=observer)
    if json:
        show.as_json(result.to_dict())
    elif not quiet:
        show.run_result(result)


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD... [KEY=VALUE]...",
            help="Methods by name, then settings they share.",
            autocompletion=names.complete_comparison,
        ),
    ],
    seeds: Annotated[int, typer.Option("--seeds", "-n", min=1, help="Seeds per method, 0 to n-1.")] = 3,
    config: Config = None,
    out: Out = None,
    track: Track = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods x seeds on shared partitions: mean, deviation, paired difference to the first.

    [bold]Examples[/bold]

      oneflare compare fafi flare

      oneflare compare fedavg fafi flare alpha=0.1 epochs=20 --seeds 5
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.cli.tracking import tracked
    from oneflare.core.config import parse_overrides, read_yaml
    from oneflare.errors import ConfigError
    from oneflare.report import write_comparison
    from oneflare.study import compare_methods

    methods = [word for word in words if "=" not in word]
    layers = [read_yaml(config)] if config else []
    layers.append(parse_overrides(word for word in words if "=" in word))
    if out is not None and (out / "experiment.yaml").exists():
        raise ConfigError(f"--out {out} is the folder of one run; choose another for the comparison")
    for key in ("method", "seed"):
        if any(key in layer for layer in layers):
            raise ConfigError(f"{key}= is what compare varies; name methods first and use --seeds")
    with progress(enabled=not quiet, table=not json) as display, tracked(display, track) as observer:
        comparison = compare_methods(methods, layers, seeds=seeds, folder=out, observer=observer)
    page = write_comparison(comparison)
    if json:
        show.as_json(comparison.to_dict())
    elif not quiet:
        show.comparison(comparison)
        show.line(f"report: {page}")


def bench(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the figures go (JSON; curves beside it).")] = Path(
        "results/bench.json"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what takes minutes.")] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Measure this section again (and what is missing); repeatable.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 where a target is missed.")] = False,
    json: Json = False,
) -> None:
    """Measure this machine: step overhead, start-up, clients, fusion, upload formats. All as ratios in one run.

    [bold]Example[/bold]

      oneflare bench --quick --out /tmp/bench.json
    """
    from oneflare.cli import show
    from oneflare.cli.progress import Remarks
    from oneflare.report.pictures import growth_picture
    from oneflare.study.bench.suite import run_suite

    content, targets = run_suite(out, quick=quick, only=only or (), observer=Remarks())
    growth_picture(content).savefig(out.with_suffix(".png"), dpi=130)
    if json:
        show.as_json(content)
    else:
        show.bench(content["machine"], targets)
        show.done(f"figures: {out}, curves: {out.with_suffix('.png')}")
    if strict and not all(target.held for target in targets):
        raise typer.Exit(1)
