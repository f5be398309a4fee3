"""Pictures as files of their own: schedules, the two-well toy, lambda over progress."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneflare.core.files import write_bytes
from oneflare.core.schedules import Schedule
from oneflare.errors import ConfigError
from oneflare.report.figures import COLOURS, FORMATS, tidy
from oneflare.study.toy import TwoWells, descend, share_that_leaves

SMALLEST = 1e-3
"""lambda is drawn on a logarithmic axis"""
DOTTED: dict[str, Any] = {"color": "black", "lw": 0.9, "ls": ":"}
Traces = Mapping[int, Sequence[Mapping[str, float]]]


def check_format(path: Path) -> None:
    """Before any work."""
    if path.suffix.lower()[1:] not in FORMATS:
        raise ConfigError(f"--out {path}: choose a file that ends in {', '.join(f'.{name}' for name in FORMATS)}")


def save(figure: Any, path: Path) -> None:
    import matplotlib as mpl

    check_format(path)
    kind = path.suffix.lower()[1:]
    buffer = io.BytesIO()
    metadata = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with mpl.rc_context({"svg.hashsalt": "oneflare", "svg.fonttype": "none", "pdf.fonttype": 42, "font.size": 9}):
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    write_bytes(path, buffer.getvalue())


def _panels(width: float, height: float, rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def schedule_picture(schedule: Schedule, title: str, points: int = 1000) -> Any:
    """The curve over progress."""
    figure, axes = _panels(6.4, 3.4, 1, 1)
    _draw_schedule(axes, schedule, title, points)
    return figure


def _draw_schedule(axes: Any, schedule: Schedule, title: str, points: int, **style: Any) -> None:
    progress = [k / points for k in range(points + 1)]
    axes.plot(progress, [schedule(p) for p in progress], **({"color": COLOURS[0]} | style))
    for restart in getattr(schedule, "restarts", ()):
        axes.axvline(restart, **DOTTED)
    axes.set_xlabel("progress p")
    axes.set_ylabel("value")
    axes.set_title(title, fontsize=9)
    tidy(axes)


def toy_picture(schedule: Schedule, falling: Schedule, title: str, seed: int = 0) -> Any:
    """The two wells, both rates, and where SGD goes with each, from the same start through the same noise."""
    from matplotlib.figure import Figure

    wells = TwoWells()
    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    panels: Any = figure.subplot_mosaic([["rates", "loss"], ["path", "path"]])
    rates, loss, path = panels["rates"], panels["loss"], panels["path"]
    _draw_schedule(rates, falling, "rates", 1000, color=COLOURS[1], label="falling")
    _draw_schedule(rates, schedule, title, 1000, label="this schedule")
    rates.legend(loc="upper right")
    grid = [-1.7 + 3.4 * k / 400 for k in range(401)]
    loss.plot(grid, [wells.value(theta) for theta in grid], color="black", lw=1)
    loss.set_xlabel("theta")
    loss.set_title(f"f = theta^4 - {2 * wells.a:g} theta^2 + {wells.b:g} theta", fontsize=9)
    for name, curve, colour in (("falling", falling, COLOURS[1]), ("this schedule", schedule, COLOURS[0])):
        thetas = descend(wells, curve, seed=seed)
        share = share_that_leaves(wells, curve)
        path.plot(thetas, color=colour, lw=0.9, label=f"{name}: {100 * share:.0f} % of 200 seeds end in the deep well")
        loss.plot(thetas[-1], wells.value(thetas[-1]), "o", color=colour)
    path.axhline(wells.ridge, **DOTTED)
    path.set_xlabel("step")
    path.set_ylabel("theta (dotted: the ridge)")
    path.legend(loc="upper right")
    for axes in (loss, path):
        tidy(axes)
    return figure


def lambda_picture(runs: Mapping[str, Traces], reference: float) -> Any:
    """Raw and effective lambda, both losses, both variances and conflicts, over progress.

    One run: a colour per client. Several: a colour per run, clients thin and their mean thick. The dotted line is the
    hand-made lambda, `reference` (1 - p).
    """
    figure, panels = _panels(10.0, 8.0, 3, 2, sharex=True)
    columns = (
        ("lambda_raw", "raw lambda", True),
        ("lambda_effective", "effective lambda", True),
        ("local", "L_local", False),
        ("align", "L_align", True),
        ("sigma", "sigma_local² (solid), sigma_align² (dashed)", True),
        ("conflicts", "share of conflicting steps", False),
    )
    for axes, (key, title, logarithmic) in zip(panels.flat, columns, strict=True):
        for column, style in _lines(key):
            for curve in _curves(runs, column, logarithmic):
                axes.plot(curve.pop("x"), curve.pop("y"), **(curve | style))
        axes.set_title(title, fontsize=9)
        if logarithmic:
            axes.set_yscale("log")
        tidy(axes)
    for axes in panels[0]:
        points = [k / 100 for k in range(100)]
        line = [max(reference * (1 - p), SMALLEST) for p in points]
        axes.plot(points, line, label=f"by hand: {reference:g} (1 - p)", **DOTTED)
    panels[2, 1].set_ylim(-0.03, 1.03)
    for axes in panels[2]:
        axes.set_xlabel("progress p")
    handles, names = panels[0, 0].get_legend_handles_labels()
    if len(names) <= 2 * len(COLOURS):
        figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _lines(key: str) -> list[tuple[str, dict[str, Any]]]:
    if key == "sigma":
        return [("sigma_local2", {}), ("sigma_align2", {"ls": "--", "label": None})]
    return [(key, {})]


def _curves(runs: Mapping[str, Traces], column: str, logarithmic: bool) -> list[dict[str, Any]]:
    """What to draw for one column: x, y and style of every curve."""
    curves: list[dict[str, Any]] = []
    for number, (name, traces) in enumerate(runs.items()):
        drawn = [
            (f"client {client}", [row["progress"] for row in rows], _values(rows, column, logarithmic))
            for client, rows in traces.items()
            if rows and column in rows[0]
        ]
        if len(runs) == 1:
            for index, (label, x, y) in enumerate(drawn):
                curves.append({"x": x, "y": y, "color": COLOURS[index % len(COLOURS)], "label": label})
        elif drawn:
            colour = COLOURS[number % len(COLOURS)]
            curves += [{"x": x, "y": y, "color": colour, "lw": 0.5, "alpha": 0.45} for _, x, y in drawn]
            epochs = range(min(len(y) for *_, y in drawn))
            mean = [sum(y[k] for *_, y in drawn) / len(drawn) for k in epochs]
            along = [sum(x[k] for _, x, _ in drawn) / len(drawn) for k in epochs]
            curves.append({"x": along, "y": mean, "color": colour, "lw": 2, "label": name})
    return curves


def _values(rows: Sequence[Mapping[str, float]], column: str, logarithmic: bool) -> list[float]:
    return [max(row[column], SMALLEST) if logarithmic else row[column] for row in rows]


def growth_picture(content: Mapping[str, Any]) -> Any:
    """Time and memory over clients; images per second and step overhead over width and over image size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 10.0), layout="constrained")
    panels: Any = figure.subplots(3, 2)
    for key, colour in (("clients_8x8", COLOURS[0]), ("clients_32x32", COLOURS[1])):
        rows = content.get(key, [])
        label = key.removeprefix("clients_")
        clients = [row["clients"] for row in rows]
        panels[0][0].plot(clients, [row["seconds"] for row in rows], marker="o", color=colour, label=label)
        memory = [row["peak_memory_bytes"] / 2**20 for row in rows]
        panels[0][1].plot(clients, memory, marker="o", color=colour, label=label)
    for panel, title in ((panels[0][0], "seconds, same images"), (panels[0][1], "peak memory, MiB")):
        panel.set(xscale="log", xlabel="clients", title=title, ylim=(0, None))
        panel.legend(frameon=False)
    places = (
        ("width of resnet8 at 32x32", [(row["encoder"]["width"], row) for row in content["widths"]]),
        ("side of the image", [(row["size"], row) for row in content["sizes"]]),
    )
    for column, (label, rows) in enumerate(places):
        across = [value for value, _ in rows]
        panels[1][column].plot(across, [row["images_per_second"] for _, row in rows], marker="o", color=COLOURS[0])
        panels[1][column].set(xlabel=label, title="images per second, one core, batch 32", yscale="log")
        panels[2][column].plot(across, [row["ratio"] for _, row in rows], marker="o", color=COLOURS[0])
        panels[2][column].axhline(1.0, color="grey", linewidth=0.8)
        panels[2][column].set(xlabel=label, title="full step over bare pass, batch 32", ylim=(0, None))
    for panel in panels.flat:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    return figure
