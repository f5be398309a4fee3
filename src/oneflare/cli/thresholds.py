"""`oneflare server thresholds`: from which probability on a class is the answer, and when none is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oneflare.cli.commands import Json
from oneflare.cli.server import Folder

if TYPE_CHECKING:
    from oneflare.federation.thresholding import Chosen

Sensitivity = Annotated[
    list[str] | None,
    typer.Option(
        "--sensitivity",
        metavar="CLASS=SHARE",
        help="Answer with this class often enough to find this share of its images, such as melanoma=0.95. Repeat.",
    ),
]
Specificity = Annotated[
    list[str] | None,
    typer.Option(
        "--specificity",
        metavar="CLASS=SHARE",
        help="Answer with this class so rarely that this share of other images does not get it. Repeat.",
    ),
]
Keep = Annotated[
    float | None,
    typer.Option(
        "--keep",
        metavar="SHARE",
        help="Answer 'none of the known classes' to images that the members do not know, so that this share of "
        "their own test images keeps a class, such as 0.95.",
    ),
]


def thresholds(
    folder: Folder,
    sensitivity: Sensitivity = None,
    specificity: Specificity = None,
    keep: Keep = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove all thresholds of the model in use.")] = False,
    json: Json = False,
) -> None:
    """Choose thresholds for the model in use on the scores that members have sent.

    A class that has a threshold is the answer as soon as its probability reaches it; otherwise the most likely of the
    other classes is. Thresholds that were chosen before are replaced. They are signed, in a file beside the model, and
    `predict`, `serve` and `export` use them. They were chosen on the images that they are judged by here, so on new
    images they do a little worse.

    [bold]Examples[/bold]

      oneflare server thresholds federation --sensitivity melanoma=0.95

      oneflare server thresholds federation --keep 0.95

      oneflare server thresholds federation --remove
    """
    from oneflare.cli import show
    from oneflare.core.records import record_to_dict
    from oneflare.errors import ConfigError
    from oneflare.federation.publishing import publish
    from oneflare.federation.thresholding import Aims, choose_thresholds, drop_thresholds

    if remove:
        if sensitivity or specificity or keep is not None:
            raise ConfigError("--remove: leave out the other options, or leave out --remove to replace the thresholds")
        publish(drop_thresholds(folder))
        show.done("removed; the answer is the most likely class again")
        return
    aims = Aims(_shares("--sensitivity", sensitivity or ()), _shares("--specificity", specificity or ()), keep)
    chosen = choose_thresholds(folder, aims)
    publish(chosen.fused)
    if json:
        show.as_json(record_to_dict(chosen.decision))
    else:
        _shown(folder, chosen)


def _shown(folder: Path, chosen: Chosen) -> None:
    from oneflare.cli import show
    from oneflare.models.decisions import decision_path

    for name, rates in chosen.rates.items():
        show.line(
            f"{name}: the answer from a probability of {rates.threshold:g} on; sensitivity "
            f"{100 * rates.sensitivity:.1f} %, specificity {100 * rates.specificity:.1f} %"
        )
    content, decision = chosen.fused.content, chosen.decision
    if decision.floor is not None:
        kept = f"keeps {decision.keeps:.0%}"
        show.line(f"none of the known classes: below a familiarity of {decision.floor:.3g}; {kept}")
    show.done(
        f"{decision_path(folder / content.own.model)}: chosen on {decision.images} test images of "
        f"{', '.join(decision.members)}; goes with the model to whoever uses it"
    )


def _shares(option: str, words: Sequence[str]) -> dict[str, float]:
    """CLASS=SHARE; a class's name may itself hold a sign of equality."""
    from oneflare.errors import ConfigError

    shares: dict[str, float] = {}
    for word in words:
        name, _, share = word.rpartition("=")
        if name in shares:
            raise ConfigError(f"{option} {name} is given twice; remove one of the two")
        try:
            shares[name] = float(share if name else "")
        except ValueError:
            raise ConfigError(f"{option} {word}: give CLASS=SHARE, such as melanoma=0.95") from None
    return shares
