"""The figures of a story as files for papers: PNG, PDF or SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from oneflare.errors import ConfigError, did_you_mean
from oneflare.report.story import Curve, LambdaCurve, Panel, Row, Story, Sweep

COLOURS = ("#0067a8", "#c14a00", "#00795b", "#a3307a", "#8a6100", "#5b3fb0", "#50565e", "#2e88b8")
"""told apart by colour-blind readers too; the page uses the same, and marks differ as well"""
MARKS = "os^DvP"
FORMATS = ("png", "pdf", "svg")
SMALLEST = 1e-5
"""of the largest lambda drawn: where a logarithmic axis ends"""
WIDE = 4.5
"""inches: text of 10 points is still above 7 when a paper's column (3.3 inches) takes the figure in"""
MOST_BARS = 5
"""curves whose spread over seeds is drawn at every checkpoint; of more, only at the last"""
Figure = Any


def write_figures(story: Story, folder: Path, kind: str = "pdf") -> list[Path]:
    """One file per figure; of single runs, the first seed of each method in the first setting."""
    from oneflare.report.pictures import save

    if kind not in FORMATS:
        raise ConfigError(f"--format: unknown format '{kind}'{did_you_mean(kind, FORMATS)}")
    paths = []
    for name, build in _figures(story):
        path = folder / f"{name}.{kind}"
        save(build(), path)
        paths.append(path)
    return paths


def _figures(story: Story) -> Iterator[tuple[str, Callable[[], Figure]]]:
    several = len(story.panels) > 1
    for panel in story.panels:
        end = f"-{slug(panel.title)}" if several else ""
        rows = panel.rows if story.kind == "run" else panel.main
        if rows:
            yield f"accuracy{end}", partial(accuracy, rows, story.kind == "run")
        if any(len(curve.epochs) > 1 for curve in panel.curves):
            yield f"checkpoints{end}", partial(checkpoints, panel, story.kind == "run")
        if panel.lambdas and story.kind != "run":
            yield f"lambda{end}", partial(lambda_by_method, panel.lambdas, story.labels)
    if several:
        yield "settings", partial(settings, story)
    for number, sweep in enumerate(story.sweeps):
        yield f"sweep-{number}-{slug(sweep.title)}", partial(over_number, sweep)
    shown: set[str] = set()
    for run in story.runs:
        if run["panel"] == 0 and run["name"] not in shown:
            shown.add(run["name"])
            end = "" if story.kind == "run" else f"-{slug(run['label'])}"
            if len(shown) == 1:  # methods share the partition of a seed
                yield "clients", partial(client_class, run)
            yield from _of_run(run, end)


def _of_run(run: Mapping[str, Any], end: str) -> Iterator[tuple[str, Callable[[], Figure]]]:
    if run["lambda"] is not None:
        yield f"lambda-clients{end}", partial(lambda_by_client, run["lambda"])
    if run["geometry"] is not None:
        yield f"cosines{end}", partial(cosines, run)
        yield f"plane{end}", partial(plane, run)
    yield f"classes{end}", partial(per_class, run)
    if any(row.get("reliability") for row in run["fusions"].values()):
        yield f"reliability{end}", partial(reliability, run)


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "figure"


def new(width: float, height: float) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def legend_below(figure: Figure, columns: int) -> None:
    """Outside the axes: it covers nothing."""
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKS[index % len(MARKS)]}


def accuracy(rows: Sequence[Row], by_fusion: bool) -> Figure:
    """Mean over seeds with its deviation; rings are single seeds."""
    figure, axes = new(WIDE, 0.8 + 0.36 * len(rows))
    for index, row in enumerate(rows):
        colour = COLOURS[index % len(COLOURS)]
        bar = (
            None
            if row.low is None or row.high is None
            else [[100 * (row.mean - row.low)], [100 * (row.high - row.mean)]]
        )
        axes.errorbar([100 * row.mean], [index], xerr=bar, capsize=3, ls="none", **style(index))
        if len(row.accuracies) > 1:
            seeds = [100 * value for value in row.accuracies]
            axes.plot(seeds, [index + 0.25] * len(seeds), "o", ms=3.5, mfc="none", color=colour)
    axes.set_yticks(range(len(rows)), [row.fusion if by_fusion else row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("test accuracy %")
    tidy(axes)
    return figure


def checkpoints(panel: Panel, by_fusion: bool) -> Figure:
    """Simulated fusion during training; only the last point is the real system."""
    figure, axes = new(WIDE, 3.6)
    curves = panel.curves if by_fusion else [curve for curve in panel.curves if curve.main]
    drawn = [
        (curve, {"label": curve.fusion if by_fusion else curve.label, "ms": 4} | style(index))
        for index, curve in enumerate(curves)
    ]
    draw_checkpoints(axes, drawn, bars=not by_fusion)
    axes.set_xlabel("epoch at which fusion is simulated")
    axes.set_ylabel("test accuracy %")
    legend_below(figure, 2)
    tidy(axes)
    return figure


def draw_checkpoints(axes: Any, curves: Sequence[tuple[Curve, dict[str, Any]]], *, bars: bool) -> None:
    """Curves, each with its looks; bars: from the smallest to the largest seed, moved apart a little."""
    for index, (curve, looks) in enumerate(curves):
        below = [100 * (mean - low) for mean, low in zip(curve.mean, curve.low, strict=True)]
        above = [100 * (high - mean) for mean, high in zip(curve.mean, curve.high, strict=True)]
        shift = (index - (len(curves) - 1) / 2) * 0.008 * curve.epochs[-1] if bars else 0.0
        if len(curves) > MOST_BARS:
            below[:-1] = above[:-1] = [0.0] * (len(below) - 1)
        axes.errorbar(
            [epoch + shift for epoch in curve.epochs],
            [100 * value for value in curve.mean],
            yerr=[below, above] if bars else None,
            elinewidth=0.8,
            **looks,
        )


def settings(story: Story) -> Figure:
    """Every method over all settings."""
    labels = story.labels
    figure, axes = new(max(WIDE, 0.8 * len(story.panels)), 3.8)
    for index, label in enumerate(labels):
        shift = (index - (len(labels) - 1) / 2) * min(0.1, 0.6 / len(labels))
        rows = [(place + shift, row) for place, panel in enumerate(story.panels) if (row := panel.main_row(label))]
        axes.errorbar(
            [x for x, _ in rows],
            [100 * row.mean for _, row in rows],
            yerr=[100 * (row.std or 0.0) for _, row in rows],
            capsize=2,
            ms=4,
            label=label,
            ls="none",  # settings are no scale: nothing joins them
            **style(index),
        )
    axes.set_xticks(range(len(story.panels)), [panel.title for panel in story.panels], rotation=20, ha="right")
    axes.set_ylabel("test accuracy %")
    legend_below(figure, 3)
    tidy(axes)
    return figure


def over_number(sweep: Sweep) -> Figure:
    """Accuracy over a number that was varied, on a logarithmic axis."""
    figure, axes = new(WIDE, 3.2)
    for index, series in enumerate(sweep.series):
        bars = [100 * (value or 0.0) for value in series["std"]]
        means = [100 * value for value in series["mean"]]
        axes.errorbar(series["x"], means, yerr=bars, capsize=2, label=series["name"], **style(index))
    if sweep.level is not None:
        axes.axhline(100 * sweep.level["mean"], color="black", ls=":", lw=0.9, label=sweep.level["name"])
    numbers = sorted({x for series in sweep.series for x in series["x"]})
    axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:g}" for number in numbers])
    axes.minorticks_off()
    axes.set_xlabel(sweep.axis)
    axes.set_ylabel("test accuracy %")
    axes.legend(frameon=False)
    tidy(axes)
    return figure


def lambda_by_method(curves: Sequence[LambdaCurve], labels: Sequence[str]) -> Figure:
    """Mean over clients and seeds; solid: effective, dashed: raw. A method looks as in the other figures."""
    drawn = [(labels.index(curve.label), curve.label, curve.epochs, curve.raw, curve.effective) for curve in curves]
    return _lambda(drawn, None)


def lambda_by_client(content: Mapping[str, Any]) -> Figure:
    """Of every client of a run, with the valve."""
    drawn = [
        (index, f"client {row['client']}", row["epochs"], row["raw"], row["effective"])
        for index, row in enumerate(content["clients"])
    ]
    return _lambda(drawn, content["bound"])


def _lambda(
    curves: Sequence[tuple[int, str, list[int], list[float | None], list[float | None]]], bound: float | None
) -> Figure:
    figure, axes = new(WIDE, 3.5)
    floor = lowest_drawn([value for _, _, _, raw, effective in curves for value in (*raw, *effective)])
    for index, label, epochs, raw, effective in curves:
        every = {"ms": 4, "markevery": max(1, len(epochs) // 8)}
        for values, line in ((effective, {"label": label} | every), (raw, {"ls": "--", "lw": 0.9, "ms": 0})):
            axes.plot(epochs, at_least(floor, values), **(style(index) | line))
    if bound is not None:
        axes.axhline(bound, color="black", lw=0.9, ls=":")
        axes.annotate(f"valve at {bound:g}", (1, bound), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("lambda (dashed: raw)")
    if len(curves) <= len(COLOURS):
        legend_below(figure, 3 if max(len(label) for _, label, *_ in curves) < 14 else 2)
    tidy(axes)
    return figure


def lowest_drawn(values: Sequence[float | None]) -> float:
    """Where the logarithmic axis of these lambdas ends."""
    return SMALLEST * max((value for value in values if value), default=1.0)


def at_least(floor: float, values: Sequence[float | None]) -> list[float | None]:
    """Zero has no place on a logarithmic axis."""
    return [None if value is None else max(value, floor) for value in values]


def client_class(run: Mapping[str, Any]) -> Figure:
    """Samples per client and class as a heat map."""
    table, classes = run["table"], run["classes"]
    figure, axes = new(WIDE, min(1.2 + 0.28 * len(table), 9.0))
    axes.imshow([[count**0.5 for count in row] for row in table], aspect="auto", cmap="Blues", interpolation="none")
    peak = max(max(row) for row in table) or 1
    if len(classes) <= 20 and len(table) <= 30:
        for client, row in enumerate(table):
            for label, count in enumerate(row):
                colour = "white" if count > 0.4 * peak else "black"
                axes.text(label, client, count or "", ha="center", va="center", fontsize=9, color=colour)
    _class_ticks(axes.set_xticks, classes)
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    if len(table) <= 30:
        axes.set_yticks(range(len(table)))
    return figure


def cosines(run: Mapping[str, Any]) -> Figure:
    """Between the fused prototypes of the classes."""
    figure, axes = new(4.6, 4.0)
    picture = axes.imshow(run["geometry"]["cosines"], vmin=-1, vmax=1, cmap="PuOr_r", interpolation="none")
    _class_ticks(axes.set_xticks, run["classes"])
    _class_ticks(axes.set_yticks, run["classes"], turn=False)
    figure.colorbar(picture, ax=axes, label="cosine")
    return figure


def plane(run: Mapping[str, Any]) -> Figure:
    """Fused prototypes (squares), those of clients (dots; rings where they hardly saw the class), anchors (crosses)."""
    geometry = run["geometry"]
    figure, axes = new(4.6, 4.6)
    for number, name in enumerate(run["classes"]):
        colour = COLOURS[number % len(COLOURS)]
        for position, points in enumerate(geometry["points"]):
            known = geometry["counts"] is None or geometry["counts"][position][number] >= geometry["least"]
            axes.plot(*points[number], "o", ms=4, color=colour, mfc=colour if known else "none")
        axes.plot(*geometry["server"][number], "s", ms=6, color=colour)
        if geometry["anchors"] is not None:
            axes.plot(*geometry["anchors"][number], "+", color="grey")
        if len(run["classes"]) <= 40:
            axes.annotate(name, geometry["server"][number], textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set_aspect("equal", adjustable="datalim")
    first, second = (100 * share for share in (*geometry["kept"], 0.0)[:2])
    axes.set_xlabel(f"first direction ({first:.0f} % of the variance)")
    axes.set_ylabel(f"second direction ({second:.0f} %)")
    tidy(axes)
    return figure


def per_class(run: Mapping[str, Any]) -> Figure:
    """Share of each class that is recognised, by fusion."""
    figure, axes = new(WIDE, 3.4)
    classes, fusions = run["classes"], run["fusions"]
    for index, (name, row) in enumerate(fusions.items()):
        shift = (index - (len(fusions) - 1) / 2) * 0.7 / len(fusions)
        values = [None if value is None else 100 * value for value in row["per_class"]]
        axes.plot([k + shift for k in range(len(classes))], values, ls="none", ms=4, label=name, **style(index))
    _class_ticks(axes.set_xticks, classes)
    axes.set_ylabel("recognised %")
    axes.set_ylim(-3, 103)
    axes.set_xlabel("class")
    legend_below(figure, 3)
    tidy(axes)
    return figure


def reliability(run: Mapping[str, Any]) -> Figure:
    """Accuracy over confidence; a calibrated model lies on the diagonal."""
    figure, axes = new(4.0, 4.4)
    axes.plot([0, 100], [0, 100], color="grey", ls="--", lw=0.9)
    for index, (name, row) in enumerate(run["fusions"].items()):
        bins = row.get("reliability") or []
        confidence = [100 * entry["confidence"] for entry in bins]
        axes.plot(confidence, [100 * entry["accuracy"] for entry in bins], ms=4, label=name, **style(index))
    axes.set_xlabel("confidence %")
    axes.set_ylabel("right %")
    legend_below(figure, 2)
    tidy(axes)
    return figure


def _class_ticks(ticks: Callable[..., Any], classes: Sequence[str], turn: bool = True) -> None:
    every = max(1, len(classes) // 25)
    long = max(len(name) for name in classes) > 3
    places = range(0, len(classes), every)
    ticks(
        places,
        [classes[k] for k in places],
        rotation=45 if turn and long else 0,
        fontsize=8 if len(classes) > 12 else 10,
    )
