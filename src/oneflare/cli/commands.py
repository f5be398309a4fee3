"""Commands that run experiments and benchmarks: `run`, `compare` and `bench`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from oneflare.cli import names
from oneflare.cli.options import Config, Json, Out, Overrides, Quiet, Track


def run(
    overrides: Overrides = None,
    config: Config = None,
    out: Out = None,
    track: Track = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train every client by itself, fuse the uploads and measure the resulting model.

    Repeating the command resumes an interrupted run, or reports that the run is complete.

    [bold]Examples[/bold]

      oneflare run

      oneflare run method=fafi data=cifar10 data.train_size=5000 alpha=0.1 epochs=20

      oneflare run --config experiment.yaml seed=3 --json

      oneflare run method=flare --track tensorboard
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.cli.tracking import tracked
    from oneflare.core.layers import parse_overrides, read_yaml
    from oneflare.methods.resolve import resolve
    from oneflare.simulation.stages import choose_folder, run_experiment

    layers = [read_yaml(config)] if config else []
    experiment = resolve(*layers, parse_overrides(overrides or []))
    with progress(enabled=not quiet, table=not json) as display, tracked(display, track) as observer:
        folder = choose_folder(experiment, out, observer)
        result = run_experiment(experiment, folder, observer=observer)
    show.result(result, json=json, quiet=quiet)


def split_words(words: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """The names among the words of a command, and its settings `KEY=VALUE` as a layer."""
    from oneflare.core.layers import parse_overrides

    given = list(words)
    return [word for word in given if "=" not in word], parse_overrides(word for word in given if "=" in word)


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD... [KEY=VALUE]...",
            help="The names of the methods, then the settings that they share.",
            autocompletion=names.complete_comparison,
        ),
    ],
    seeds: Annotated[
        int, typer.Option("--seeds", "-n", min=1, help="Run each method with this many seeds, from 0 to n-1.")
    ] = 3,
    config: Config = None,
    out: Out = None,
    track: Track = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare methods over several seeds on the same partitions: means, deviations, paired differences.

    [bold]Examples[/bold]

      oneflare compare fafi flare

      oneflare compare fedavg fafi flare alpha=0.1 epochs=20 --seeds 5
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.cli.tracking import tracked
    from oneflare.core.layers import read_yaml
    from oneflare.errors import ConfigError
    from oneflare.report import write_comparison
    from oneflare.study import compare_methods

    methods, settings = split_words(words)
    layers = [*([read_yaml(config)] if config else []), settings]
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
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Write the figures to this JSON file, and the curves beside it.")
    ] = Path("results/bench.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the measurements that take minutes.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Measure only this section again, and those that are missing; may be repeated."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if a target is missed.")] = False,
    json: Json = False,
) -> None:
    """Measure the speed of OneFlare on this machine: training steps, start-up, clients, fusion, upload formats.

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
