"""The first paragraph of a page, from the figures: what was compared, who won, by how much, how sure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from oneflare.stages import Result

if TYPE_CHECKING:
    from oneflare.report.story import Panel, Row

NORMAL_95 = 1.959963984540054


def of_run(result: Result) -> list[str]:
    """One run: its own fusion, how exact the test set makes it, and the other fusions of the same uploads."""
    content = result.content
    own = result.headline
    accuracy, images = result.accuracy, content["data"]["test"]
    low, high = wilson(accuracy, images)
    fused, asked = len(content["fused_clients"]), content["partition"]["clients"]
    sentences = [
        f"{_clients(fused)} trained alone with {content['method']} on {content['data']['name']} "
        f"for {content['epochs']} epochs and each uploaded one file"
        + (f"; {asked - fused} of {asked} were left out." if fused < asked else "."),
        f"Fused by {own}, the method's own rule, they classify {percent(accuracy)} of {images:,} test images correctly "
        f"(95 % interval {percent(low)} to {percent(high)} from the size of the test set alone).",
    ]
    others = {name: row["accuracy"] for name, row in result.fusions.items() if name != own}
    if others:
        best = max(others, key=lambda name: others[name])
        if others[best] > accuracy:
            sentences.append(
                f"Of {len(others)} other fusions of the same uploads {best} does better here, {percent(others[best])}; "
                "it is named after looking at the test set, so take that as a hint."
            )
        else:
            sentences.append(f"None of {len(others)} other fusions of the same uploads does better.")
    sentences.append("One seed says nothing about the spread between partitions: compare several before concluding.")
    return sentences


def of_panel(panel: Panel, first: Result, seeds: int) -> list[str]:
    """Several methods: the best under its own fusion against the next one."""
    content = first.content
    ranking = sorted(panel.own, key=lambda row: -row.mean)
    sentences = [
        f"{listed([row.label for row in panel.own])} "
        + ("were" if len(ranking) > 1 else "was")
        + f" trained on {content['data']['name']}, {content['data']['train']:,} images split over "
        f"{_clients(content['partition']['clients'])}, with {seeds} seed{'s' if seeds > 1 else ''}; "
        "methods share each seed's partition, and every method is fused by its own rule."
    ]
    return sentences + winner(ranking)


def winner(ranking: list[Row]) -> list[str]:
    """Best mean first: who leads, by how much over the next, and how sure that is."""
    best = ranking[0]
    reached = f"{percent(best.mean)}" + ("" if best.std is None else f" ± {100 * best.std:.1f} over seeds")
    if len(ranking) == 1:
        return [f"{best.label} with {best.fusion} reaches {reached}."]
    second = ranking[1]
    gaps = [a - b for a, b in zip(best.accuracies, second.accuracies, strict=True)]
    mean = sum(gaps) / len(gaps)
    ahead = sum(gap > 0 for gap in gaps)
    sentences = [
        f"{best.label} with {best.fusion} leads with {reached}, {points(mean)} ahead of {second.label} "
        f"with {second.fusion}, which reaches {percent(second.mean)}."
    ]
    if len(gaps) == 1:
        return [*sentences, "With one seed nobody can say whether that would repeat."]
    return [*sentences, f"It is ahead on {ahead} of {len(gaps)} seeds."]


def wilson(share: float, number: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927): the p with |share - p| <= z sqrt(p (1-p)/n)."""
    z2 = NORMAL_95**2 / number
    centre = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def listed(names: list[str]) -> str:
    """`a, b and c`"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def points(value: float) -> str:
    return f"{100 * value:.1f} point{'' if f'{100 * value:.1f}' == '1.0' else 's'}"


def _clients(number: int) -> str:
    return f"{number} client{'' if number == 1 else 's'}"
