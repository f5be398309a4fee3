"""The figures, as SVG text that needs no network and no script."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

Curve = tuple[Sequence[float], Sequence[float]]
COLOURS = ("#0f62fe", "#da1e28", "#198038", "#8a3ffc", "#ff832b", "#007d79", "#9f1853", "#6f6f6f")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "oneflare", "svg.fonttype": "none", "font.size": 9}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def accuracy_over_checkpoints(curves: Mapping[str, Curve]) -> str:
    """Simulated fusion during training; only the last point is the real system."""
    figure, axes = _figure(6.4, 3.4)
    for index, (name, (epochs, accuracies)) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(epochs, [100 * value for value in accuracies], marker="o", ms=3.5, color=colour, label=name)
    axes.set_xlabel("epoch at which fusion is simulated")
    axes.set_ylabel("test accuracy %")
    axes.legend(frameon=False)
    _tidy(axes)
    return _svg(figure)


def lambda_curves(traces: Mapping[int, Sequence[Mapping[str, float]]], bound: float | None) -> str:
    """Raw (dashed) and effective (solid) lambda of every client, on a logarithmic axis."""
    figure, axes = _figure(6.4, 3.4)
    for index, (client, rows) in enumerate(traces.items()):
        colour = COLOURS[index % len(COLOURS)]
        epochs = [row["epoch"] for row in rows]
        axes.plot(
            epochs,
            [max(row["lambda_effective"], 1e-3) for row in rows],
            color=colour,
            label=f"client {client}",
        )
        axes.plot(epochs, [max(row["lambda_raw"], 1e-3) for row in rows], color=colour, ls="--", lw=0.9)
    if bound is not None:
        axes.axhline(bound, color="black", lw=0.8, ls=":")
        axes.annotate(f"valve {bound:g}", (1, bound), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("lambda (dashed: raw)")
    if len(traces) <= len(COLOURS):
        axes.legend(frameon=False)
    _tidy(axes)
    return _svg(figure)


def client_class_picture(table: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """Samples per client and class as a heat map."""
    clients = len(table)
    figure, axes = _figure(6.4, min(1.2 + 0.32 * clients, 9.0))
    axes.imshow([[count**0.5 for count in row] for row in table], aspect="auto", cmap="Blues", interpolation="none")
    if len(classes) <= 20:
        axes.set_xticks(range(len(classes)), classes, rotation=45 if max(map(len, classes)) > 3 else 0)
        peak = max(max(row) for row in table) or 1
        if clients <= 30:
            for client, row in enumerate(table):
                for label, count in enumerate(row):
                    colour = "white" if count > 0.4 * peak else "black"
                    axes.text(label, client, count or "", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    if clients <= 30:
        axes.set_yticks(range(clients))
    return _svg(figure)
