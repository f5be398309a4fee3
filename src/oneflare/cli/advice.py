"""The advice of `oneflare server init`: which method to use where the coordinator has not chosen one, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from oneflare.federation.recommendation import Recommendation, Situation

Privacy = Annotated[
    str,
    typer.Option(
        "--privacy",
        metavar="OPEN|MASKED|PRIVATE",
        help="open: you may read every member's sums; masked: their total only; private: noise hides every image. "
        "It chooses the method, unless you choose one.",
    ),
]
Images = Annotated[
    int | None,
    typer.Option("--images", min=1, help="About how many images a member has, if you know; for the advice only."),
]


def advised(settings: Mapping[str, Any], situation: Situation, privacy: str) -> Recommendation | None:
    """What to use where the user's settings have not decided; None where they have."""
    from oneflare.errors import ConfigError
    from oneflare.federation.recommendation import recommend, undecided

    advice = recommend(situation, privacy)
    if undecided(settings):
        return advice
    if privacy != "open" and settings.get("method") != "analytic":
        raise ConfigError(
            f"--privacy {privacy} needs method=analytic, and you have chosen another method by your settings; "
            "leave one of the two out"
        )
    return advice if privacy != "open" else None


def tell(advice: Recommendation | None) -> None:
    """Two lines on stdout say why; warnings go to stderr."""
    from oneflare.cli import show

    for text in () if advice is None else advice.why:
        show.done(text)
    for text in () if advice is None else advice.warnings:
        show.note(f"warning: {text}")
