"""The paper's figures: accuracy over checkpoints, lambda, the valve, and accuracy over cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from oneflare.report.details import bound_of
from oneflare.report.figures import at_least, draw_checkpoints, lowest_drawn, tidy
from oneflare.report.from_study import study_panel
from oneflare.report.paper.material import experiment_at, place_words
from oneflare.report.paper.names import method_name, server_name
from oneflare.report.story import LambdaCurve, Panel
from oneflare.study.records import CellResult, PlaceResult, RowResult, StudyResult

COLUMN, PAGE = 3.3, 6.9
"""inches: a column, and a page of two columns; figures are printed in the size in which they are drawn"""
LETTERS = {"font.size": 8.0, "legend.fontsize": 7.5, "xtick.labelsize": 7.5, "ytick.labelsize": 7.5}
SHADES = ("#00406e", "#dd7a2b", "#2b8c6b", "#b184c4", "#5c3d00", "#6a6ad6", "#333333", "#5f9ac4")
"""dark and light ones by turns, so that neighbours differ where a page is printed in grey"""
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 1)))
MARKS = "osD^vPX<>hpd8"
FILLS = ("full", "none", "left")
"""of the mark: the first, second and third server of a method"""
ALWAYS = ("flare", "fafi", "etf_annealed", "fedavg", "meta_annealed", "autonomous")
"""recipes that look the same in all figures; others take the looks that are free"""
LONG = 1e3
"""largest over smallest value of a logarithmic axis, from which on only powers of ten get a tick"""
Figure = Any
Looks = dict[str, Any]


def drawn_sizes() -> Any:
    """The letters of figures that are printed in their own size."""
    import matplotlib as mpl

    return mpl.rc_context(LETTERS)


def canvas(width: float, height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, Any]:
    """A figure, and its axes as rows of columns."""
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def looks_of(rows: Sequence[RowResult]) -> dict[str, Looks]:
    """By the name of a method: a colour, a line and a mark, so that methods are told apart in grey too."""
    taken: dict[str, int] = {}
    for row in rows:
        if row.method in ALWAYS and ALWAYS.index(row.method) not in taken.values():
            taken.setdefault(method_name(row), ALWAYS.index(row.method))
    free = (index for index in count() if index not in taken.values())
    names = dict.fromkeys(method_name(row) for row in rows)
    chosen = {name: taken[name] if name in taken else next(free) for name in names}
    return {
        name: {
            "color": SHADES[index % len(SHADES)],
            "ls": LINES[index % len(LINES)],
            "marker": MARKS[index % len(MARKS)],
            "ms": 4,
            "lw": 1.2,
        }
        for name, index in chosen.items()
    }


def legend(figure: Figure, axes: Sequence[Any], columns: int) -> None:
    """What is named in these axes, each name once, below all of them."""
    found: dict[str, Any] = {}
    for one in axes:
        for handle, name in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found:
        figure.legend(
            list(found.values()),
            list(found),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            handlelength=2.8,
        )


def plain_numbers(axis: Any) -> None:
    """Ticks of a logarithmic axis at 1, 2, 5, 10 and so on; at powers of ten alone where it is long."""
    from matplotlib.ticker import FuncFormatter, LogFormatterMathtext, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    long = high > LONG * low
    axis.set_major_locator(LogLocator(subs=(1.0,) if long else (1.0, 2.0, 5.0), numticks=20))
    axis.set_major_formatter(LogFormatterMathtext() if long else FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _panels(content: StudyResult) -> list[Panel]:
    """What was found at each place; everything drawn here is kept in the results, so no runs are needed."""
    return [study_panel(content, place, Path()) for place in content.places]


def _by_label(content: StudyResult) -> dict[str, RowResult]:
    return {row.label: row for row in content.rows if row.main}


def _wanted(content: StudyResult, kind: str) -> set[str]:
    """Arms that the study's own figure of this kind shows."""
    for figure in content.figures:
        if figure.kind == kind and figure.arms is not None:
            return set(figure.arms)
    return {row.id for row in content.rows}


def checkpoints_figure(content: StudyResult) -> Figure:
    """Figure 1: accuracy over checkpoints, one picture for each place."""
    width = COLUMN if len(content.places) == 1 else PAGE
    figure, axes = canvas(width, 2.7, 1, len(content.places))
    for here, place, panel in zip(axes[0], content.places, _panels(content), strict=True):
        _draw_accuracies(here, content, panel)
        here.set_xlabel("epoch at which fusion is simulated")
        if len(content.places) > 1:
            here.set_title(place_words(place, content.places), fontsize=8)
    legend(figure, axes[0], 2 if width == COLUMN else 4)
    return figure


def _draw_accuracies(axes: Any, content: StudyResult, panel: Panel) -> None:
    rows, looks, wanted = _by_label(content), looks_of(content.rows), _wanted(content, "history")
    curves = [curve for curve in panel.curves if curve.main and rows[curve.label].id in wanted]
    drawn = []
    for curve in curves:
        name = method_name(rows[curve.label])
        drawn.append((curve, {"label": name, **looks[name]}))
    draw_checkpoints(axes, drawn, bars=True)
    axes.set_ylabel("test accuracy (%)")
    tidy(axes)


def lambda_figure(content: StudyResult) -> Figure:
    """Figure 2: effective lambda above, raw lambda below, over epochs."""
    figure, axes = canvas(COLUMN if len(content.places) == 1 else PAGE, 3.7, 2, len(content.places), sharex=True)
    for column, (place, panel) in enumerate(zip(content.places, _panels(content), strict=True)):
        for here, what in zip(axes[:, column], ("effective", "raw"), strict=True):
            _draw_lambda(here, content, panel, what)
        axes[1][column].set_xlabel("epoch")
        if len(content.places) > 1:
            axes[0][column].set_title(place_words(place, content.places), fontsize=8)
    legend(figure, axes[:, 0], 2)
    return figure


def _draw_lambda(axes: Any, content: StudyResult, panel: Panel, what: str) -> None:
    rows, looks, wanted = _by_label(content), looks_of(content.rows), _wanted(content, "lambda")
    curves = [curve for curve in panel.lambdas if rows[curve.label].id in wanted]
    series = [_series(curve, what) for curve in curves]
    floor = lowest_drawn([value for values in series for value in values])
    for curve, values in zip(curves, series, strict=True):
        name = method_name(rows[curve.label])
        every = max(1, len(curve.epochs) // 8)
        axes.plot(curve.epochs, at_least(floor, values), label=name, markevery=every, **looks[name])
    if curves:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    axes.set_ylabel(f"{what} λ")
    tidy(axes)


def _series(curve: LambdaCurve, what: str) -> list[float | None]:
    return curve.raw if what == "raw" else curve.effective


def valve_figure(content: StudyResult) -> Figure:
    """Figure 3: accuracy over checkpoints above, raw lambda below, with the bound of the valve."""
    figure, axes = canvas(COLUMN if len(content.places) == 1 else PAGE, 3.9, 2, len(content.places), sharex=True)
    for column, (place, panel) in enumerate(zip(content.places, _panels(content), strict=True)):
        above, below = axes[:, column]
        _draw_accuracies(above, content, panel)
        _draw_lambda(below, content, panel, "raw")
        bound = _bound(content, place)
        if bound is not None:
            low, high = below.get_ylim()
            below.set_ylim(low, max(high, 1.6 * bound))
            below.axhline(bound, color="black", lw=0.8, ls=(0, (1, 2)), label=f"valve at {bound:g}")
        below.set_xlabel("epoch")
        if len(content.places) > 1:
            above.set_title(place_words(place, content.places), fontsize=8)
    legend(figure, axes[:, 0], 2)
    return figure


def _bound(content: StudyResult, place: PlaceResult) -> float | None:
    """Where the valve of one of the drawn arms holds lambda."""
    arms = dict.fromkeys(row.arm for row in content.rows if row.id in _wanted(content, "lambda"))
    bounds = (bound_of(experiment_at(content, place, arm).controller) for arm in arms)
    return next((bound for bound in bounds if bound is not None), None)


def shown_places(content: StudyResult) -> list[PlaceResult]:
    """The places of the picture of peers: those at the smallest alpha."""
    smallest = min(place.alpha for place in content.places)
    return [place for place in content.places if place.alpha == smallest]


def peers_figure(content: StudyResult) -> Figure:
    """Accuracy over seconds and over megabytes; a mark for each method, its filling for the server."""
    places = shown_places(content)
    figure, axes = canvas(PAGE, 0.6 + 2.3 * len(places), len(places), 2, sharey="row")
    looks = _points(content)
    measures: tuple[tuple[str, Callable[[CellResult], float]], ...] = (
        ("seconds, all clients and the server", seconds_of),
        ("megabytes, all uploads", megabytes_of),
    )
    for row_of_axes, place in zip(axes, places, strict=True):
        for here, (title, cost) in zip(row_of_axes, measures, strict=True):
            for row in content.rows:
                cell = content.cell(place.id, row.id)
                if cell.mean is not None:
                    bar = None if cell.std is None else 100 * cell.std
                    here.errorbar(cost(cell), 100 * cell.mean, yerr=bar, elinewidth=0.7, **looks[row.id])
            here.set_xscale("log")
            plain_numbers(here.xaxis)
            here.set_xlabel(title)
            tidy(here)
        name = f"{place_words(place, content.places)}\n" if len(places) > 1 else ""
        row_of_axes[0].set_ylabel(f"{name}test accuracy (%)")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=7)
    return figure


def _points(content: StudyResult) -> Mapping[str, Looks]:
    """By row: colour and mark of its method, filled by the place of its server among the method's."""
    looks = looks_of(content.rows)
    found: dict[str, Looks] = {}
    seen: dict[str, int] = {}
    for row in content.rows:
        name = method_name(row)
        nth = seen[name] = seen.get(name, -1) + 1
        alone = sum(method_name(other) == name for other in content.rows) == 1
        label = name if alone else f"{name}, {server_name(row.fusion)}"
        fill = FILLS[nth % len(FILLS)]
        found[row.id] = {"label": label, "fillstyle": fill, "markerfacecoloralt": "white"}
        found[row.id] |= looks[name] | {"ls": "none", "ms": 5.5}
    return found


def seconds_of(cell: CellResult) -> float:
    """Of all clients and the server; of the clients alone where results do not say more."""
    return 0.0 if cell.cost is None else cell.cost.train_seconds + (cell.cost.fuse_seconds or 0.0)


def megabytes_of(cell: CellResult) -> float:
    return 0.0 if cell.cost is None else cell.cost.upload_bytes / 1e6
