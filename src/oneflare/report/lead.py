"""Writes the first paragraph of a page from the figures: what was compared, what won, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from oneflare.report.story import Panel, Row, TestedClaim
from oneflare.simulation.stages import Result
from oneflare.study.verdicts import FEWEST_SEEDS, difference, judge

NORMAL_95 = 1.959963984540054


def of_run(result: Result) -> list[str]:
    """One run: its own fusion, how exact the test set makes it, and the other fusions of the same uploads."""
    content = result.content
    own = result.headline
    accuracy, images = result.accuracy, content.data.test
    low, high = wilson(accuracy, images)
    fused, asked = len(content.fused_clients), content.partition.clients
    deep = content.epochs > 0 and content.diagnostics is not None
    sentences = [
        f"{_clients(fused)} {'trained' if deep else 'measured'} alone with {content.method} on "
        f"{content.data.name}"
        + (f" for {content.epochs} epochs" if deep else "")
        + " and each uploaded one file"
        + (f"; {asked - fused} of {asked} were left out." if fused < asked else "."),
        f"Fused by {own}, the method's own rule, they classify {percent(accuracy)} of {images:,} test images correctly "
        f"(95\N{NO-BREAK SPACE}% interval {100 * low:.1f} to {percent(high)}, from the size of the test set alone).",
    ]
    others = {name: row.accuracy for name, row in result.fusions.items() if name != own}
    if others:
        best = max(others, key=lambda name: others[name])
        kinds = "the other fusion" if len(others) == 1 else f"{len(others)} other fusions"
        if others[best] > accuracy:
            sentences.append(
                f"On the same uploads {best} reaches {percent(others[best])}"
                + (f", the best of {kinds}" if len(others) > 1 else "")
                + "; it is picked by looking at the test set, so take that as a hint."
            )
        else:
            sentences.append(f"On the same uploads {kinds} {'does' if len(others) == 1 else 'do'} no better.")
    sentences.append("One seed says nothing about the spread between partitions: compare several before concluding.")
    return sentences


def of_panel(panel: Panel, first: Result) -> list[str]:
    """Several methods: the best under its own fusion against the next one."""
    content = first.content
    rows = panel.main
    seeds = panel.seeds
    opening = (
        f"{listed([row.label for row in rows])} {'were' if len(rows) > 1 else 'was'} run on "
        f"{content.data.name}, {content.data.train:,} images split over "
        f"{_clients(content.partition.clients)}, with {_seeds(seeds)}; "
        "methods share each seed's partition, and each is fused by its own rule."
    )
    return [opening, *winner(rows)]


ENDINGS = {
    "confirmed": ("is confirmed", "are confirmed"),
    "refuted": ("is refuted", "are refuted"),
    "no difference": ("shows no difference of a point or more", "show no difference of a point or more"),
    "undecided": ("is undecided", "are undecided"),
}
"""what is said of one claim, and of several"""


def of_study(
    panels: Sequence[Panel], verdicts: Sequence[TestedClaim], scale: str, seeds: int, missing: int
) -> list[str]:
    """What was run, how the claims fared, who leads."""
    labels = list(dict.fromkeys(label for panel in panels for label in panel.labels))
    where = panels[0].title if len(panels) == 1 else f"{len(panels)} settings"
    sentences = [f"{len(labels)} variants were run on {where} with {_seeds(seeds)}: {scale}."]
    if missing:
        sentences.append(f"{missing} of the runs are not there yet, so this is a preliminary page.")
    if verdicts:
        sentences.append(tally(verdicts))
    if len(panels) == 1:
        return sentences + winner(panels[0].main)
    best = [max(panel.main, key=lambda row: row.mean).label for panel in panels if panel.main]
    if not best:
        return sentences
    wins = {label: best.count(label) for label in dict.fromkeys(best)}
    ranked = sorted(wins, key=lambda label: -wins[label])
    places = [f"{label} at {wins[label]}" for label in ranked]
    return [*sentences, f"The best mean belongs to {listed(places)} of {len(best)} settings."]


def tally(verdicts: Sequence[TestedClaim]) -> str:
    """How the claims fared."""
    found = [verdict.verdict for verdict in verdicts]
    counts = [(found.count(word), word) for word in ENDINGS if word in found]
    if len(found) == 1:
        return f"The claim {ENDINGS[found[0]][0]}."
    if len(counts) == 1:
        return f"{'Both' if len(found) == 2 else f'All {len(found)}'} claims {ENDINGS[found[0]][1]}."
    parts = [f"{number} {ENDINGS[word][0 if number == 1 else 1]}" for number, word in counts]
    return f"Of {len(found)} claims {listed(parts)}."


def winner(rows: Sequence[Row]) -> list[str]:
    """Who leads, by how much over the next, and how sure that is."""
    if not rows:
        return ["No run is finished yet."]
    best, *rest = sorted(rows, key=lambda row: -row.mean)
    reached = percent(best.mean) + ("" if best.std is None else f" (± {100 * best.std:.1f} over seeds)")
    if not rest:
        return [f"{best.label} with {best.fusion} reaches {reached}."]
    second = rest[0]
    shared = [seed for seed in best.seeds if seed in second.seeds]
    ours, theirs = (
        dict(zip(best.seeds, best.accuracies, strict=True)),
        dict(zip(second.seeds, second.accuracies, strict=True)),
    )
    found = difference([ours[seed] - theirs[seed] for seed in shared])
    both = best.fusion == second.fusion
    ours_by, theirs_by = ("" if both or row.label == row.fusion else f" with {row.fusion}" for row in (best, second))
    start = f"Fused by {best.fusion}, " if both else ""
    sentence = (
        f"{start}{best.label}{ours_by} leads with {reached}, {points(found.mean)} ahead of {second.label}{theirs_by}"
    )
    if found.interval is None:
        return [f"{sentence}; with one seed nobody can say whether that would repeat."]
    low, high = found.interval
    ahead = sum(value > 0 for value in found.values)
    certain = judge(found, 0.0, "above").verdict == "confirmed"
    sure = "which is more than chance" if certain else "which may be chance"
    few = f" (fewer than {FEWEST_SEEDS} seeds decide nothing)" if len(shared) < FEWEST_SEEDS else ""
    interval = f"95\N{NO-BREAK SPACE}% interval {signed(100 * low)} to {signed(100 * high)}"
    return [f"{sentence} ({interval}, ahead on {ahead} of {len(shared)} seeds), {sure}{few}."]


def wilson(share: float, number: int) -> tuple[float, float]:
    """95 % interval of a proportion (Wilson 1927): the p with |share - p| <= z sqrt(p (1-p)/n)."""
    z2 = NORMAL_95**2 / number
    centre = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(share * (1 - share) * z2 + z2 * z2 / 4) / (1 + z2)
    return max(0.0, centre - half), min(1.0, centre + half)


def listed(names: Iterable[str]) -> str:
    """`a`, `a and b`, `a, b and c`; there is at least one"""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def percent(value: float) -> str:
    return f"{100 * value:.1f}\N{NO-BREAK SPACE}%"


def points(value: float) -> str:
    text = f"{100 * value:.1f}"
    return f"{text} point{'' if text == '1.0' else 's'}"


def signed(value: float, digits: str = ".1f") -> str:
    """With its sign, a minus as wide as the plus."""
    return f"{value:+{digits}}".replace("-", "\N{MINUS SIGN}")


def _clients(number: int) -> str:
    return f"{number} client{'' if number == 1 else 's'}"


def _seeds(number: int) -> str:
    return f"{number} seed{'' if number == 1 else 's'}"
