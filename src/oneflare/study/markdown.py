"""A study's results as Markdown, from its JSON."""

from __future__ import annotations

from collections.abc import Sequence

from oneflare.study.records import CellResult, DifferenceResult, PlaceResult, StatementResult, StudyResult

MISSING = "–"


def percent(cell: CellResult) -> str:
    """`40.6 ± 1.2`, or a dash"""
    if cell.mean is None:
        return MISSING
    text = f"{100 * cell.mean:.1f}"
    if cell.std is not None:
        text += f" ± {100 * cell.std:.1f}"
    return text + (f" ({len(cell.seeds)} seeds)" if cell.missing else "")


def points(difference: DifferenceResult | None) -> str:
    """`+1.2 [-0.3, +2.8]`"""
    if difference is None:
        return ""
    text = f"{100 * difference.mean:+.1f}"
    if difference.interval is not None:
        low, high = difference.interval
        text += f" [{100 * low:+.1f}, {100 * high:+.1f}]"
    return text


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """words: how many columns on the left are not figures"""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * words + "---:|" * (len(columns) - words)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def place_name(place: PlaceResult) -> str:
    clients = "" if place.clients == 5 else f", {place.clients} clients"
    return f"{place.data}, alpha {place.alpha:g}{clients}"


def to_markdown(content: StudyResult) -> str:
    baseline = content.row(content.baseline).label
    seeds = len(content.seeds)
    spread = "mean ± deviation over seeds" if seeds > 1 else "of the one seed"
    lines = [
        f"# {content.title}",
        "",
        content.question,
        "",
        f"Scale `{content.scale}`: {content.scale_summary}. {seeds} seed{'s' if seeds > 1 else ''} on shared "
        f"partitions; {content.provenance.train_seconds:.0f} s of training over all clients. Test accuracy in "
        f"per cent, {spread}; in brackets the 95 % bootstrap interval of the paired difference.",
    ]
    if not content.complete:
        lines += ["", f"**Not complete**: {_missing(content)}."]
    lines += _verdicts(content)
    for place in content.places:
        lines += ["", f"## {place_name(place)}", ""]
        lines += _place(content, [content.cell(place.id, row.id) for row in content.rows], baseline)
    lines += _log(content)
    if content.note:
        lines += ["", content.note]
    if content.claims:
        lines += ["", "## The rule", "", content.rule]
    return "\n".join(lines) + "\n"


def _place(content: StudyResult, cells: Sequence[CellResult], baseline: str) -> list[str]:
    aligned = any(cell.lambda_ for cell in cells)
    columns = ["method", "server", "accuracy %", f"difference to {baseline}", "peak over checkpoints %", "g_protos_std"]
    columns += ["largest raw lambda"] if aligned else []
    rows = []
    for row, cell in zip(content.rows, cells, strict=True):
        peak = MISSING if cell.peak is None else f"{100 * cell.peak.mean:.1f}"
        spread = MISSING
        if cell.diagnostics is not None:
            values = cell.diagnostics["g_protos_std"]
            spread = f"{sum(values) / len(values):.3f}"
        line = [
            row.short_label,
            row.fusion,
            percent(cell),
            points(cell.difference),
        ]
        line += [peak, spread]
        if aligned:
            line.append(MISSING if cell.lambda_ is None else f"{max(cell.lambda_.largest_raw):.4g}")
        rows.append(line)
    return table(columns, rows, words=2)


def _missing(content: StudyResult) -> str:
    """Which methods have not been run with all seeds of the first look."""
    labels = {row.id: row.label for row in content.rows}
    found = dict.fromkeys(labels[cell.row] for cell in content.cells if cell.missing)
    return f"not all seeds were run for {', '.join(found)}"


def _verdicts(content: StudyResult) -> list[str]:
    if not content.claims:
        return []
    lines = ["", "## Claims"]
    for claim in content.claims:
        verdict = claim.verdict if content.measured(claim) else "not measured yet"
        lines += ["", f"**{claim.id}: {verdict}.** {claim.text}."]
        if claim.exploratory:
            lines += ["This was asked after figures had been seen; it is not counted among the claims."]
        if claim.log:
            lines += [f"The log: {claim.log}."]
        lines += [""]
        lines += [f"- {_tested(test)}" for test in claim.tests]
    return lines


def _tested(test: StatementResult) -> str:
    text = f"{test.verdict}, {test.place}: {test.text}"
    if not test.values:
        return text + "; not run"
    unit = f" {test.unit}" if test.unit else ""
    text += f"; by seed {', '.join(f'{value:.3g}' for value in test.values)}{unit}"
    if test.interval is not None:
        low, high = test.interval
        text += f", mean {test.mean:.3g} in [{low:.3g}, {high:.3g}], p = {test.p_value:.2g}"
    return text


def _log(content: StudyResult) -> list[str]:
    if not content.log:
        return []
    labels = {row.id: row.label for row in content.rows}
    lines = ["", "## The log's figures", "", "One run each, other settings than ours: beside, not against them.", ""]
    for reference in content.log:
        values = ", ".join(f"{labels.get(row, row)} {value}" for row, value in reference.values.items())
        lines.append(f"- {reference.settings}: {values}")
    return lines
