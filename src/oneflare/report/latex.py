"""The tables of a story for LaTeX: booktabs, one `table` environment each."""

from __future__ import annotations

import re
from collections.abc import Sequence

from oneflare.report.story import Panel, Row, Story

ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "\N{NO-BREAK SPACE}": "~", "[": "{[}",
}  # fmt: skip
NOTHING = "--"


def escape(text: str) -> str:
    """Text as LaTeX prints it; a bracket is shielded, since after a line's end it would begin an option."""
    return "".join(ESCAPES.get(sign, sign) for sign in text)


def escape_numbers(text: str) -> str:
    """The same with real minus signs before numbers."""
    return re.sub(r"(?<![\w-])-(?=\d)", lambda _: "$-$", escape(text))


def latex(story: Story) -> str:
    """All tables in one file, to be read with `\\input`; needs the package booktabs."""
    several = len(story.panels) > 1
    parts = [f"% {story.title.replace(chr(10), ' ')}; needs \\usepackage{{booktabs}}"]
    if several:
        parts.append(_overview(story))
    for panel in story.panels:
        parts.append(_accuracy(panel))
        if len(panel.main) > 1:
            parts.append(_differences(panel))
        parts.append(_cost(panel))
    if story.verdicts:
        parts.append(_verdicts(story))
    return "\n\n".join(parts) + "\n"


def table(caption: str, columns: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells come escaped."""
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _value(row: Row | None, bold: bool = False) -> str:
    if row is None:
        return NOTHING
    mean = f"{100 * row.mean:.1f}"
    mean = rf"\textbf{{{mean}}}" if bold else mean
    return mean if row.std is None else rf"{mean} $\pm$ {100 * row.std:.1f}"


def _over_seeds(panel: Panel) -> str:
    return rf", mean $\pm$ standard deviation over {panel.seeds} seeds" if panel.seeds > 1 else ""


def _overview(story: Story) -> str:
    best = {panel.title: max((row.mean for row in panel.main), default=0.0) for panel in story.panels}
    rows = []
    for label in story.labels:
        found = [(panel.title, panel.main_row(label)) for panel in story.panels]
        rows.append(
            [escape(label), *(_value(row, row is not None and row.mean == best[title]) for title, row in found)]
        )
    head = ["method", *(escape(panel.title) for panel in story.panels)]
    caption = rf"Test accuracy (\%){_over_seeds(story.panels[0])}; bold: the best mean of a column."
    return table(caption, "l" + "r" * len(story.panels), head, rows)


def _accuracy(panel: Panel) -> str:
    rows = []
    for label in panel.labels:
        cells = [panel.row(label, fusion) for fusion in panel.fusions]
        rows.append([escape(label), *(_value(row, row is not None and row.main) for row in cells)])
    caption = rf"{escape(panel.title)}: test accuracy (\%){_over_seeds(panel)}; bold: each method's main fusion."
    return table(caption, "l" + "r" * len(panel.fusions), ["method", *map(escape, panel.fusions)], rows)


def _differences(panel: Panel) -> str:
    rows = []
    for row in panel.main:
        gap = NOTHING
        if row.gap is not None:
            gap = f"${100 * row.gap.mean:+.1f}$"
            if row.gap.low is not None and row.gap.high is not None:
                gap += f" $[{100 * row.gap.low:+.1f}, {100 * row.gap.high:+.1f}]$"
        rows.append([escape(row.label), escape(row.fusion), _value(row), gap])
    interval = r", with its 95\,\% bootstrap interval" if panel.seeds > 1 else ""
    caption = (
        rf"{escape(panel.title)}: final test accuracy (\%) and paired difference to {escape(panel.baseline)} "
        rf"in points{interval}."
    )
    return table(caption, "llrr", ["method", "fusion", "accuracy", "difference"], rows)


def _cost(panel: Panel) -> str:
    rows = [
        [
            escape(row.label),
            escape(row.fusion),
            *(f"{100 * value:.1f}" for value in (row.mean, row.balanced, row.worst_class, row.calibration_error)),
            str(row.passes),
            f"{row.parameters:,}".replace(",", r"\,"),
        ]
        for row in panel.rows
    ]
    head = ["method", "fusion", "accuracy", "balanced", "worst class", "calibration error", "passes", "parameters"]
    return table(rf"{escape(panel.title)}: what each fusion gives (\%) and costs.", "llrrrrrr", head, rows)


def _verdicts(story: Story) -> str:
    rows = [
        [
            escape(verdict.name),
            escape(verdict.claim),
            escape(verdict.verdict),
            escape_numbers("; ".join(verdict.evidence)),
        ]
        for verdict in story.verdicts
    ]
    head = ["", "claim", "verdict", "evidence"]
    return table("Claims and verdicts.", r"lp{0.35\linewidth}lp{0.35\linewidth}", head, rows)
