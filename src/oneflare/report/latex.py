"""Tables for LaTeX: escaped text, booktabs, one `table` environment each, and all tables of a story."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from oneflare.report.story import Panel, Row, Story

ESCAPES = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "–": "--", "—": "---", "\N{NO-BREAK SPACE}": "~", "[": "{[}", "×": r"$\times$", "≥": r"$\geq$",
    "≤": r"$\leq$", "≈": r"$\approx$", "−": "$-$", "²": r"$^2$", "α": r"$\alpha$", "λ": r"$\lambda$", "σ": r"$\sigma$",
    "γ": r"$\gamma$", "‘": "`", "’": "'", "“": "``", "”": "''", "…": r"\ldots{}",
    "|": r"\textbar{}",
}  # fmt: skip
NOTHING = "--"


def escape(text: str) -> str:
    """Text as LaTeX prints it, in one paragraph; a bracket is shielded, since after a line's end it would begin an
    option."""
    return "".join(ESCAPES.get(sign, sign) for sign in re.sub(r"[ \t\r\n]+", " ", text))


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


@dataclass(frozen=True)
class Frame:
    """How a table stands on the page, beside its caption."""

    label: str = ""
    """for `\\ref`"""
    wide: bool = False
    """across both columns of a page"""
    size: str = ""
    """of the letters: a command such as `\\small`"""
    notes: Sequence[str] = ()
    """sentences below the table; they come escaped"""


def table(
    caption: str, columns: str, head: Sequence[str], rows: Sequence[Sequence[str]], frame: Frame | None = None
) -> str:
    """A table of one block; cells come escaped."""
    return floating(caption, [tabular(columns, head, rows)], frame or Frame())


def tabular(columns: str, head: Sequence[str], rows: Sequence[Sequence[str]], above: Sequence[str] = ()) -> str:
    """A block of rows; cells come escaped. A row without cells is a gap; above: lines of LaTeX over the head."""
    lines = [
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        *above,
        " & ".join(head) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" if row else r"\addlinespace" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


def floating(caption: str, blocks: Sequence[str], frame: Frame) -> str:
    """Blocks of rows, one below the other, as one table with one caption."""
    kind = "table*" if frame.wide else "table"
    lines = [rf"\begin{{{kind}}}", r"\centering", rf"\caption{{{caption}}}"]
    lines += [rf"\label{{{frame.label}}}"] if frame.label else []
    lines.append(r"\par\smallskip" + frame.size)
    lines.append("\n\\par\\medskip\n".join(blocks))
    if frame.notes:
        lines += [r"\par\smallskip", rf"\parbox{{\linewidth}}{{\footnotesize {' '.join(frame.notes)}}}"]
    return "\n".join([*lines, rf"\end{{{kind}}}"])


def best_printed(values: Sequence[float | None], digits: int, *, lowest: bool = False) -> list[bool]:
    """Which values are the best as they are printed, with so many digits after the point: ties are all best."""
    shown = [None if value is None else round(value, digits) for value in values]
    known = [value for value in shown if value is not None]
    best = (min(known) if lowest else max(known)) if known else None
    return [value is not None and value == best for value in shown]


def bold(text: str, wanted: bool = True) -> str:
    return rf"\textbf{{{text}}}" if wanted else text


def percent(mean: float, std: float | None, best: bool = False) -> str:
    """`40.6 $\\pm$ 1.2` for a mean and a deviation in parts of 1, the mean in bold where it is the best."""
    text = bold(f"{100 * mean:.1f}", best)
    return text if std is None else rf"{text} $\pm$ {100 * std:.1f}"


def _value(row: Row | None, best: bool = False) -> str:
    return NOTHING if row is None else percent(row.mean, row.std, best)


def _over_seeds(panel: Panel) -> str:
    return rf", mean $\pm$ standard deviation over {panel.seeds} seeds" if panel.seeds > 1 else ""


def _overview(story: Story) -> str:
    columns = []
    for panel in story.panels:
        found = [panel.main_row(label) for label in story.labels]
        best = best_printed([None if row is None else 100 * row.mean for row in found], 1)
        columns.append([_value(row, here) for row, here in zip(found, best, strict=True)])
    rows = [[escape(label), *cells] for label, cells in zip(story.labels, zip(*columns, strict=True), strict=True)]
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
