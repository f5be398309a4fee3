"""The paper's tables: methods, ablation, valve, peers with their costs, and claims with their verdicts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from oneflare.report.latex import (
    NOTHING,
    Frame,
    best_printed,
    bold,
    escape,
    escape_numbers,
    floating,
    percent,
    tabular,
)
from oneflare.report.paper.material import NBSP, best_cell, main_rows, place_words, seeds_words, setting_words
from oneflare.report.paper.names import data_name, in_words, method_name, server_name
from oneflare.study.markdown import points
from oneflare.study.records import CellResult, PlaceResult, RowResult, StudyResult
from oneflare.study.summary import JUDGING, JudgedClaim, figure_words, tally
from oneflare.study.verdicts import ERROR, student_p

WIDEST = 8
"""columns of figures that fit side by side across a page"""
SMALL, SMALLEST = 4, 7
"""columns of figures from which on the letters are small, and very small"""
PEERS_SIDE_BY_SIDE = 2
"""places of the table of peers, which has four figures for each"""
NOT_CLEAR = r"$^{\dagger}$"
FEWER = r"$^{\ddagger}$"
Cells = Sequence[CellResult]


def is_clear(best: CellResult, other: CellResult) -> bool:
    """Whether the best mean is above another by Student's paired test over the seeds that both have."""
    mine = dict(zip(best.seeds, best.accuracies, strict=True))
    theirs = dict(zip(other.seeds, other.accuracies, strict=True))
    p_value = student_p([mine[seed] - theirs[seed] for seed in mine if seed in theirs], "above")
    return p_value is not None and p_value < ERROR


def accuracies(cells: Cells) -> list[str]:
    """One column of a table: the best mean in bold, a dagger where the best is not clearly better."""
    best = best_cell(cells)
    first = best_printed([None if cell.mean is None else 100 * cell.mean for cell in cells], 1)
    texts = []
    for cell, leads in zip(cells, first, strict=True):
        if cell.mean is None or best is None:
            texts.append(NOTHING)
            continue
        alike = not leads and len(best.seeds) > 1 and not is_clear(best, cell)
        marks = (NOT_CLEAR if alike else "") + (FEWER if cell.missing else "")
        texts.append(percent(cell.mean, cell.std, leads) + marks)
    return texts


def notes(cells: Cells, columns: Sequence[Sequence[str]]) -> list[str]:
    """What the marks in the columns mean, as far as they are there."""
    texts = [text for column in columns for text in column]
    found = []
    if any(NOT_CLEAR in text for text in texts):
        found.append(
            rf"{NOT_CLEAR}The difference to the best mean of the column is not clear (Student's test, paired by seed, "
            rf"one-sided, {100 * ERROR:g}\,\%, uncorrected)."
        )
    if any(FEWER in text for text in texts):
        found.append(rf"{FEWER}Some of the planned seeds have not been run.")
    if any(cell.mean is None for cell in cells):
        found.append(f"{NOTHING}: not run yet.")
    return found


def over_seeds(cells: Cells) -> str:
    """How the accuracies are to be read."""
    seeds = seeds_words(cells)
    if not any(cell.seeds for cell in cells):
        return r"Test accuracy (\%); no seed has been run yet."
    if seeds == "one seed":
        return r"Test accuracy (\%) of one seed, which says nothing about the spread over seeds; bold: the best."
    return (
        rf"Test accuracy (\%) at the end of training, mean $\pm$ standard deviation over {seeds} on shared partitions; "
        "bold: the best mean of a column, which need not be clearly the best."
    )


def setting(content: StudyResult) -> str:
    return escape(setting_words(content))


def by_arm(rows: Sequence[RowResult], columns: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Lines of a table: a method's name stands once above its servers, and a gap parts such groups."""
    said = ""
    several = {row.arm for row in rows if not row.main}
    for index, (row, *cells) in enumerate(zip(rows, *columns, strict=True)):
        name = method_name(row)
        if index and row.arm != rows[index - 1].arm:
            said = ""
            if {row.arm, rows[index - 1].arm} & several:
                yield []
        yield ["" if name == said else escape(name), escape(server_name(row.fusion)), *cells]
        said = name


def main_table(content: StudyResult) -> str:
    """Table 1: every method under every server, at every place."""
    columns = {
        place.id: accuracies([content.cell(place.id, row.id) for row in content.rows]) for place in content.places
    }
    blocks = []
    for groups in packed(content.places, WIDEST):
        places = [place for group in groups for place in group]
        head = ["Method", "Server", *(rf"$\alpha={place.alpha:g}$" for place in places)]
        above, start = [], 3
        names, rules = ["", ""], []
        for group in groups:
            names.append(rf"\multicolumn{{{len(group)}}}{{c}}{{{escape(group_title(group, content.places))}}}")
            rules.append(rf"\cmidrule(lr){{{start}-{start + len(group) - 1}}}")
            start += len(group)
        above = [" & ".join(names) + r" \\", "".join(rules)]
        rows = list(by_arm(content.rows, [columns[place.id] for place in places]))
        blocks.append(tabular("ll" + "r" * len(places), head, rows, above))
    wide = len(content.places) > 1
    caption = f"Methods under their servers: {setting(content)}. {over_seeds(content.cells)}"
    size = letters(min(len(content.places), WIDEST) if wide else SMALL)
    frame = Frame("tab:main", wide, size, notes(content.cells, list(columns.values())))
    return floating(caption, blocks, frame)


def letters(columns: int) -> str:
    """The size of the letters in a table across the page that has so many columns of figures."""
    if columns >= SMALLEST:
        return r"\scriptsize\setlength{\tabcolsep}{2pt}"
    return r"\footnotesize\setlength{\tabcolsep}{4pt}" if columns >= SMALL else r"\small"


def group_title(group: Sequence[PlaceResult], places: Sequence[PlaceResult]) -> str:
    clients = "" if len({place.clients for place in places}) == 1 else f", {group[0].clients} clients"
    return data_name(group[0].data) + clients


def packed(places: Sequence[PlaceResult], most: int) -> list[list[list[PlaceResult]]]:
    """Places by data set and number of clients, in blocks of at most so many columns."""
    groups: dict[tuple[str, int], list[PlaceResult]] = {}
    for place in places:
        groups.setdefault((place.data, place.clients), []).append(place)
    blocks: list[list[list[PlaceResult]]] = [[]]
    for group in groups.values():
        if blocks[-1] and sum(map(len, blocks[-1])) + len(group) > most:
            blocks.append([])
        blocks[-1].append(group)
    return blocks


Column = tuple[str, Callable[[PlaceResult], list[str]]]


def ablation_table(content: StudyResult) -> str:
    """Table 2: FLARE without each of its parts."""
    arms = main_rows(content)
    baseline = method_name(content.row(content.baseline))
    main, *others = dict.fromkeys(row.fusion for row in content.rows)

    def gaps(place: PlaceResult) -> list[str]:
        found = [(row, content.cell(place.id, row.id).difference) for row in arms]
        return ["" if row.id == content.baseline else escape_numbers(points(gap)) or NOTHING for row, gap in found]

    columns: list[Column] = [
        (server_name(main), lambda place: accuracies([content.cell(place.id, row.id) for row in arms])),
        (f"to {baseline}", gaps),
        *((server_name(fusion), _under(content, fusion)) for fusion in others),
    ]
    caption = (
        f"What each part of {escape(baseline)} is worth: {setting(content)}. {over_seeds(content.cells)} "
        rf"``To {escape(baseline)}'': the paired difference under the first server in points, with its 95\,\% "
        "bootstrap interval."
    )
    return _arms_table(content, caption, "tab:ablation", columns)


def valve_table(content: StudyResult) -> str:
    """Table 3: what guards lambda, what it grows to without them, and what that costs."""
    arms = main_rows(content)
    main, *others = dict.fromkeys(row.fusion for row in content.rows)

    def peaks(place: PlaceResult) -> list[str]:
        found = [content.cell(place.id, row.id).peak for row in arms]
        return [NOTHING if peak is None else f"{100 * peak.mean:.1f}" for peak in found]

    def largest(place: PlaceResult) -> list[str]:
        found = [content.cell(place.id, row.id).lambda_ for row in arms]
        return [NOTHING if pull is None else number(max(pull.largest_raw)) for pull in found]

    columns: list[Column] = [
        (server_name(main), lambda place: accuracies([content.cell(place.id, row.id) for row in arms])),
        ("peak", peaks),
        *((server_name(fusion), _under(content, fusion)) for fusion in others),
        ("raw λ", largest),
    ]
    caption = (
        f"Guards of the learned $\\lambda$: {setting(content)}. {over_seeds(content.cells)} Peak: the mean over seeds "
        "of each seed's best checkpoint, chosen on the test images and shown only beside the final value. Raw "
        "$\\lambda$: the largest of any client and seed; in these two columns nothing is in bold."
    )
    return _arms_table(content, caption, "tab:valve", columns)


def _under(content: StudyResult, fusion: str) -> Callable[[PlaceResult], list[str]]:
    """The column of accuracies of every arm under another server; a dash where an arm does not have it."""
    arms = main_rows(content)
    rows = {row.arm: row for row in content.rows if row.fusion == fusion}

    def column(place: PlaceResult) -> list[str]:
        texts = iter(accuracies([content.cell(place.id, rows[row.arm].id) for row in arms if row.arm in rows]))
        return [next(texts) if row.arm in rows else NOTHING for row in arms]

    return column


def _arms_table(content: StudyResult, caption: str, label: str, columns: Sequence[Column]) -> str:
    arms = main_rows(content)
    blocks, texts = [], []
    for place in content.places:
        found = [column(place) for _, column in columns]
        texts += found
        title = escape(place_words(place, content.places)) if len(content.places) > 1 else "Variant"
        rows = [[escape(method_name(row)), *cells] for row, *cells in zip(arms, *found, strict=True)]
        blocks.append(tabular("l" + "r" * len(columns), [title, *(escape(name) for name, _ in columns)], rows))
    frame = Frame(label, True, r"\small", notes(content.cells, texts))
    return floating(caption, blocks, frame)


def number(value: float) -> str:
    """Four figures; large ones as a power of ten: `1.77 \\times 10^{6}`."""
    if 0.01 <= abs(value) < 10000 or value == 0:
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    mantissa, power = f"{value:.2e}".split("e")
    return rf"${mantissa} \times 10^{{{int(power)}}}$"


def peers_table(content: StudyResult) -> str:
    """Accuracy, seconds and megabytes of published methods and ours."""
    blocks, texts = [], []
    for start in range(0, len(content.places), PEERS_SIDE_BY_SIDE):
        places = content.places[start : start + PEERS_SIDE_BY_SIDE]
        columns: list[list[str]] = []
        for place in places:
            cells = [content.cell(place.id, row.id) for row in content.rows]
            columns += [accuracies(cells), *costs(cells)]
        texts += columns
        titles = (rf"\multicolumn{{4}}{{c}}{{{escape(place_words(place, content.places))}}}" for place in places)
        rules = (rf"\cmidrule(lr){{{3 + 4 * k}-{6 + 4 * k}}}" for k in range(len(places)))
        above = [" & ".join(["", "", *titles]) + r" \\", "".join(rules)]
        head = ["Method", "Server", *["accuracy", "clients (s)", "server (s)", "MB"] * len(places)]
        rows = list(by_arm(content.rows, columns))
        blocks.append(tabular("ll" + r"@{\hspace{9pt}}".join(["rrrr"] * len(places)), head, rows, above))
    caption = (
        f"Published one-shot methods beside ours: {setting(content)}. {over_seeds(content.cells)} Clients: seconds of "
        "training of all clients together; server: seconds of fusion; MB: all uploads together, with what any server "
        "of the method reads; means over seeds, the smallest in bold. Seconds are by the clock, while other cells "
        "of the study ran beside. A server "
        "``standardised by batch'' looks at all test images at once."
    )
    found = notes(content.cells, texts)
    if any(cell.cost is not None and cell.cost.fuse_seconds is None for cell in content.cells):
        found.append("Seconds of the server are not in these results; collect the study again to have them.")
    size = letters(SMALL if len(content.places) == 1 else WIDEST)
    return floating(caption, blocks, Frame("tab:peers", True, size, found))


def costs(cells: Cells) -> list[list[str]]:
    """Three columns: seconds of the clients, seconds of the server, megabytes; the smallest in bold."""
    found: list[list[float | None]] = [
        [None if cell.cost is None else cell.cost.train_seconds for cell in cells],
        [None if cell.cost is None else cell.cost.fuse_seconds for cell in cells],
        [None if cell.cost is None else cell.cost.upload_bytes / 1e6 for cell in cells],
    ]
    columns = []
    for values in found:
        texts = [NOTHING if value is None else amount(value) for value in values]
        least = amount(min((value for value in values if value is not None), default=0.0))
        columns.append([bold(text, text == least) for text in texts])
    return columns


def amount(value: float) -> str:
    """Seconds or megabytes with two or three figures: `1,234`, `23.6`, `0.031`."""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 1:
        return f"{value:.1f}"
    return f"{value:#.2g}" if value >= 0.001 else r"\textless{}0.001"


def claim_name(judged: JudgedClaim) -> str:
    """`C8`, `ours-1`, `valve (Table 2)`, `average (servers)`"""
    study, _, claim = judged.name.rpartition(": ")
    if not study:
        return claim
    return f"{claim} ({re.sub('^table', 'Table' + NBSP, study)})"


def claims_table(claims: Sequence[JudgedClaim]) -> str:
    """All claims with their verdicts, as a table that may run over several pages of one column."""
    scales = list(dict.fromkeys(judged.study.scale for judged in claims))
    several = len(scales) > 1
    rows = []
    for judged in claims:
        figures = [escape_numbers(figure_words(test)) for test in judged.claim.tests]
        where = f" (scale {escape(judged.study.scale)})" if several else ""
        cells = [
            escape(claim_name(judged)) + where,
            escape(in_words(judged.claim.text)),
            escape(judged.words),
            r"\newline ".join(figures),
            escape_numbers(in_words(judged.claim.log)) or NOTHING,
        ]
        rows.append(" & ".join(cells) + r" \\")
    caption = (
        f"Claims and verdicts: {escape(tally(claims))}. Our figures: the mean over seeds of each test, with its "
        r"95\,\% bootstrap interval, one line for each test and place. Earlier figures are those of the research log "
        f"that made the claim, of one seed and other settings; they enter no test. Scale: {escape(', '.join(scales))}."
    )
    if not any(scale in JUDGING for scale in scales):
        caption += " This scale tries things out; what it shows is no verdict to rely on."
    head = r"Claim & What it says & Verdict & Our figures & Earlier figures \\"
    columns = "".join(rf">{{\raggedright\arraybackslash}}p{{{width}\linewidth}}" for width in CLAIM_WIDTHS)
    lines = [
        r"{\footnotesize\setlength{\tabcolsep}{4pt}\setlength{\LTcapwidth}{\linewidth}",
        rf"\begin{{longtable}}{{{columns}}}",
        rf"\caption{{{caption}}}\label{{tab:claims}} \\",
        rf"\toprule {head} \midrule \endfirsthead",
        rf"\toprule {head} \midrule \endhead",
        r"\bottomrule \endfoot",
        "\n\\addlinespace\n".join(rows),
        r"\end{longtable}}",
    ]
    return "\n".join(lines)


CLAIM_WIDTHS = (0.10, 0.28, 0.13, 0.23, 0.18)
"""of the columns, in parts of the line"""
