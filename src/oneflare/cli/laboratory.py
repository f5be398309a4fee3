"""Commands that explain: a method in equations, schedules and lambda as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oneflare.cli import names
from oneflare.cli.options import Json

Picture = Annotated[Path, typer.Option("--out", "-o", help="Write the picture to this file: .png, .svg or .pdf.")]


def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A method by its name or version number, or another part (fusion, controller, ...) by its name.",
            autocompletion=names.complete_explained,
        ),
    ],
    json: Json = False,
) -> None:
    """Explain a method: its loss terms, what decides lambda, its anchors, fusions, defaults and origin.

    For a part (see `oneflare methods --parts`), print what it computes and its options. Where a method and a part have
    the same name, KIND:NAME names the part.

    [bold]Examples[/bold]

      oneflare explain flare

      oneflare explain uncertainty_coupled

      oneflare explain robust_prototypes

      oneflare explain fusion:analytic
    """
    from oneflare.cli import show
    from oneflare.cli.parts import find_parts, named_parts
    from oneflare.core.plugins import load_plugins
    from oneflare.errors import ConfigError, did_you_mean
    from oneflare.methods import METHODS
    from oneflare.methods.explain import explain as explanation_of

    load_plugins()
    parts = find_parts(name)
    if name not in METHODS and parts:
        if json:
            show.as_json(parts)
        else:
            show.explained_parts(parts)
        return
    numbers = {number.lower() for method in METHODS.values() for number in method.numbers}
    if name not in METHODS and name.lower() not in numbers:
        known = {*METHODS, *(part["name"] for part in named_parts())}
        close = did_you_mean(name, known) or "; `oneflare methods --parts` lists them"
        raise ConfigError(f"no method and no part is called '{name}'{close}")
    explanation = explanation_of(name)
    if json:
        show.as_json(explanation.to_dict())
    else:
        show.explanation(explanation)
        for part in parts:
            show.line(f"\nThere is also a {part['kind']} of this name: oneflare explain {part['kind']}:{name}")


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The schedule: constant, linear, cosine or cosine_restarts.",
            autocompletion=names.complete_schedules,
        ),
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Options of the schedule.", show_default=False)
    ] = None,
    out: Picture = Path("schedule.png"),
    toy: Annotated[
        bool, typer.Option("--toy", help="Also draw what the schedule does on a loss with two wells.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the noise in the drawn trajectories.")] = 0,
) -> None:
    """Draw a schedule over progress; with --toy, why one restarts.

    [bold]Examples[/bold]

      oneflare schedule cosine_restarts cycles=4 growth=2 decay=3 --out restarts.png

      oneflare schedule cosine_restarts cycles=8 --toy --out toy.svg
    """
    from oneflare.cli import show
    from oneflare.core.layers import parse_overrides
    from oneflare.core.schedules import SCHEDULES, build_schedule
    from oneflare.report import pictures
    from oneflare.study.toy import FALLING

    pictures.check_format(out)
    spec = {"name": name, **parse_overrides(options or [])}
    chosen = SCHEDULES.build(spec)
    title = f"{name}: {SCHEDULES[name].summary}"
    figure = (
        pictures.toy_picture(chosen, build_schedule(FALLING), name, seed)
        if toy
        else pictures.schedule_picture(chosen, title)
    )
    pictures.save(figure, out)
    show.done(f"picture: {out}")


def lambda_picture(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    out: Picture = Path("lambda.png"),
    reference: Annotated[
        float, typer.Option("--reference", help="Also draw the line lambda_0 (1 - p) that starts at this value.")
    ] = 20.0,
) -> None:
    """Draw lambda over progress: raw and effective, both losses, both variances, conflicts.

    [bold]Examples[/bold]

      oneflare lambda runs/demo/flare-s0

      oneflare lambda runs/meta_annealed runs/flare --out figure2.svg
    """
    from oneflare.cli import show
    from oneflare.report import pictures
    from oneflare.report.details import traces_of
    from oneflare.simulation.stages import read_result

    pictures.check_format(out)
    results = [read_result(folder) for folder in runs]
    names = [result.content.method for result in results]
    if len(set(names)) < len(names):
        names = [f"{name} ({folder.name})" for name, folder in zip(names, runs, strict=True)]
    drawn = {name: traces_of(result) for name, result in zip(names, results, strict=True)}
    pictures.save(pictures.lambda_picture(drawn, reference), out)
    show.done(f"picture: {out}")
