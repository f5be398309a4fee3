"""The text around the paper's tables and figures: method, protocol and findings, in sentences made from the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from oneflare.methods.recipes import find_method
from oneflare.report.latex import escape
from oneflare.report.lead import listed
from oneflare.report.paper.figures import shown_places
from oneflare.report.paper.material import (
    Material,
    best_cell,
    experiment_at,
    images_words,
    main_rows,
    network_words,
    place_words,
    seeds_words,
    setting_words,
)
from oneflare.report.paper.names import CITED, citations, data_name, method_name, recipe_name, server_name
from oneflare.report.paper.tables import is_clear, number
from oneflare.study.records import CellResult, RowResult, StudyResult
from oneflare.study.summary import JUDGING, tally

SECTIONS = {
    "table1": ("Methods and servers", "table1", "tab:main"),
    "figure1": ("", "figure1", "fig:checkpoints"),
    "table2": ("What the parts of FLARE are worth", "table2", "tab:ablation"),
    "figure2": ("", "figure2", "fig:lambda"),
    "table3": ("The valve", "table3", "tab:valve"),
    "figure3": ("", "figure3", "fig:valve"),
    "peers": ("Published methods and their costs", "peers", "tab:peers"),
}
"""by study: the heading (none: it belongs to the one before), the file, and the label of its table or figure"""
PREAMBLE = r"""% Written by `oneflare paper` from the results of the studies; written anew when the command is repeated.
\documentclass[10pt,twocolumn]{article}
\usepackage[utf8]{inputenc}
\usepackage[margin=0.8in]{geometry}
\usepackage{array,booktabs,graphicx,longtable,url}
\IfFileExists{microtype.sty}{\usepackage[expansion=false]{microtype}}{}
\setlength{\emergencystretch}{2em}
\raggedbottom
\renewcommand{\topfraction}{0.9}
\renewcommand{\dbltopfraction}{0.9}
\renewcommand{\textfraction}{0.07}
\renewcommand{\floatpagefraction}{0.8}
\renewcommand{\dblfloatpagefraction}{0.8}
\setcounter{topnumber}{3}
\setcounter{dbltopnumber}{3}
\title{One-shot federated learning under label skew:\\FLARE and its peers, measured}
\author{OneFlare}
\date{}
"""
METHOD = r"""In one-shot federated learning every client trains alone and sends one message; a server fuses the messages
into one classifier, and nothing flows back. All trained methods here use one network with a prototype for each
class. FAFI~\cite{zeng2025} minimises a local objective $L_{\mathrm{local}}$ of cross-entropy, a supervised
contrastive term and two terms of its prototypes. FLARE adds $\lambda L_{\mathrm{align}}$, the squared distance of the
prototypes to a simplex equiangular tight frame that all clients share. It learns $\lambda=\sigma^2_{\mathrm{local}}/
\sigma^2_{\mathrm{align}}$ from the uncertainty of both tasks~\cite{kendall2018}, apart from the weights, lets a
schedule weaken the pull during training, and holds the raw $\lambda$ below a bound by a penalty, the valve."""


MOST_PLACES = 4
"""of which each gets a sentence"""
OURS = (
    "All methods are run by our own implementation, on the same partitions; it may differ from the code that their "
    "authors released."
)


def document(material: Material) -> str:
    """`paper.tex`: a short paper that inputs every table and figure."""
    parts = [PREAMBLE, r"\begin{document}", r"\maketitle"]
    warning = _warning(material)
    if warning:
        parts.append(rf"\noindent\textbf{{{warning}}}")
    parts += [r"\section{Method}", METHOD, _peers(material), _variants(material)]
    parts += [r"\section{Protocol}", _protocol(material), r"\section{Results}"]
    for study, content in material.studies.items():
        heading, file, label = SECTIONS[study]
        if heading:
            parts.append(rf"\subsection{{{heading}}}")
        parts.append(rf"\input{{{_folder(file)}/{file}}}")
        if study == "peers":
            parts.append(r"\input{figures/peers}")
        parts.append(_finding(study, content, label))
        verdicts = [judged for judged in material.claims if judged.study.study == study]
        if verdicts:
            parts.append(rf"Claims of this part (Table~\ref{{tab:claims}}): {escape(tally(verdicts))}.")
    parts += [r"\clearpage\onecolumn", r"\bibliographystyle{plain}", r"\bibliography{references}"]
    if material.claims:
        parts += [r"\section*{Claims and verdicts}", r"\input{tables/claims}"]
    return "\n\n".join(part for part in [*parts, r"\end{document}"] if part) + "\n"


def _folder(file: str) -> str:
    return "figures" if file.startswith("figure") else "tables"


def _warning(material: Material) -> str:
    """That some or all figures are not to be relied on."""
    tried = [study for study, content in material.studies.items() if content.scale not in JUDGING]
    if not tried:
        return ""
    what = (
        "These figures" if len(tried) == len(material.studies) else f"The figures of {listed(map(_reference, tried))}"
    )
    return (
        f"{what} are of the scale smoke: small images, a small network and a few epochs. They show how this paper is "
        "made; they judge no method."
    )


def _reference(study: str) -> str:
    _, file, label = SECTIONS[study]
    return rf"{'Figure' if file.startswith('figure') else 'Table'}~\ref{{{label}}}"


def _peers(material: Material) -> str:
    """The published methods in the tables, each with its citation."""
    known = {"FLARE", "FAFI"}
    found = [f"{escape(name)}~\\cite{{{key}}}" for name, key in citations(material.names) if name not in known]
    return f"Published methods beside it are {listed(found)}. {OURS}" if found else ""


def _variants(material: Material) -> str:
    """What the other rows are, in the words of the recipes."""
    contents = material.studies.values()
    recipes = dict.fromkeys(row.method for content in contents for row in content.rows)
    published = {*CITED, "FLARE"}
    found = [name for name in recipes if recipe_name(name) not in published]
    lines = [rf"\item[{escape(recipe_name(name))}] {escape(_sentence(name))}" for name in found]
    if not lines:
        return ""
    return (
        "The other rows are these.\n\\begin{description}\\setlength{\\itemsep}{0pt}\\setlength{\\parskip}{0pt}\\small\n"
        + "\n".join(lines)
        + "\n\\end{description}"
    )


def _sentence(method: str) -> str:
    """A recipe's summary as a sentence that names other recipes as the paper does."""
    text = find_method(method).summary.replace("`", "")
    for word in text.split():
        plain = word.strip(",;:.")
        if "_" in plain:
            text = text.replace(plain, recipe_name(plain))
    return f"{text[:1].upper()}{text[1:]}."


def _protocol(material: Material) -> str:
    contents = list(material.studies.values())
    first = contents[0]
    scales = listed(f"{scale}" for scale in material.scales)
    by_data: dict[str, str] = {}
    networks: dict[str, None] = {}
    for content in contents:
        for place in content.places:
            by_data.setdefault(data_name(place.data), images_words(content, place))
            networks.setdefault(network_words(content, place))
    alphas = sorted({place.alpha for content in contents for place in content.places})
    clients = sorted({place.clients for content in contents for place in content.places})
    experiment = experiment_at(first, first.places[0])
    train = experiment.train
    optimiser = str((train.optimiser or {"name": "sgd"})["name"]).upper()
    sentences = [
        f"Data: {escape('; '.join(f'{name}, {words}' for name, words in by_data.items()))}.",
        rf"Each class is divided among {listed(map(str, clients))} clients by a Dirichlet draw with "
        rf"$\alpha$ = {listed(f'{alpha:g}' for alpha in alphas)}, so that every image has one owner.",
        f"The encoder is {escape('; or '.join(networks))}, trained by {escape(optimiser)} with rate "
        f"{train.lr:g} and batches of {train.batch_size}.",
        f"All methods share the partition of a seed, and differences are paired by seed "
        f"({escape(seeds_words([cell for content in contents for cell in content.cells]))}).",
        "Accuracy is that at the end of training on test images that choose nothing.",
        "Intervals are bootstrapped over seeds and, where the answers to single images are kept, over images as "
        r"well~\cite{owen2007}. A claim also needs Student's paired test; a difference below a point is shown by two "
        r"one-sided tests~\cite{schuirmann1987}; over all claims the false discovery rate is "
        r"5\,\%~\cite{benjamini1995}.",
        f"Scale of the studies: {escape(scales)}; OneFlare {escape(first.provenance.oneflare)}, PyTorch "
        f"{escape(first.provenance.torch)}.",
    ]
    return "\n".join(sentences)


def _finding(study: str, content: StudyResult, label: str) -> str:
    """A sentence or two on what a table or figure shows."""
    if study.startswith("figure"):
        return rf"Figure~\ref{{{label}}} {FIGURE_SAYS[study]}"
    return f"Table~\\ref{{{label}}} {TABLE_SAYS[study]} {' '.join(SENTENCES[study](content))}"


def _leaders(content: StudyResult) -> Iterator[str]:
    """Who has the best mean at each place, and how many others are not clearly below it; of many places, how often."""
    if len(content.places) > MOST_PLACES:
        yield from _often(content)
        return
    for place in content.places:
        cells = [content.cell(place.id, row.id) for row in content.rows]
        best = best_cell(cells)
        if best is not None:
            yield _leader(content, best, cells, escape(place_words(place, content.places)))


def _often(content: StudyResult) -> Iterator[str]:
    """At how many places each row has the best mean."""
    best = [best_cell([content.cell(place.id, row.id) for row in content.rows]) for place in content.places]
    counts = Counter(cell.row for cell in best if cell is not None)
    named = [f"{_with_server(content.row(row))} in {times}" for row, times in counts.most_common()]
    if named:
        yield f"Of {len(content.places)} settings, the best mean is that of {listed(named)}."


def _with_server(row: RowResult) -> str:
    return f"{escape(method_name(row))} with the server ``{escape(server_name(row.fusion))}''"


def _leader(content: StudyResult, best: CellResult, cells: Sequence[CellResult], where: str) -> str:
    others = [cell for cell in cells if cell is not best and cell.mean is not None]
    text = f"On {where}, the best mean is {100 * (best.mean or 0):.1f}\\,\\%, of {_with_server(content.row(best.row))}"
    if not others or len(best.seeds) < 2:
        return f"{text}."
    alike = sum(not is_clear(best, cell) for cell in others)
    if not alike:
        return f"{text}; all {len(others)} others are clearly below it."
    if alike == len(others):
        return f"{text}; none of the {len(others)} others is clearly below it."
    verb = "is" if alike == 1 else "are"
    return f"{text}; {alike} of the {len(others)} others {verb} not clearly below it."


def _largest(content: StudyResult) -> Iterator[str]:
    """What raw lambda grew to."""
    yield from _leaders(content)
    for place in content.places:
        cells = [(row, content.cell(place.id, row.id).lambda_) for row in main_rows(content)]
        found = [f"{number(max(pull.largest_raw))} ({escape(method_name(row))})" for row, pull in cells if pull]
        if found:
            yield rf"The largest raw $\lambda$ on {escape(place_words(place, content.places))} is {listed(found)}."


TABLE_SAYS = {
    "table1": "compares methods under the servers that their uploads can feed.",
    "table2": "takes FLARE apart.",
    "table3": "shows FLARE beside the same training with weaker guards or none.",
    "peers": r"puts accuracy beside cost, and Figure~\ref{fig:peers} draws it.",
}
FIGURE_SAYS = {
    "figure1": "shows what fusion would give during training; only the last point is the real system.",
    "figure2": r"shows what becomes of $\lambda$ where it is learned, and where it falls by hand.",
    "figure3": r"shows accuracy and raw $\lambda$ with and without the valve.",
}
SENTENCES: dict[str, Callable[[StudyResult], Iterator[str]]] = {
    "table1": _leaders,
    "table2": _leaders,
    "table3": _largest,
    "peers": _leaders,
}


def caption(study: str, content: StudyResult) -> str:
    """Of a figure, escaped."""
    setting, seeds = escape(setting_words(content)), escape(seeds_words(content.cells))
    bars = "" if seeds == "one seed" else " Bars reach from the smallest to the largest seed."
    servers = listed(dict.fromkeys(server_name(row.fusion) for row in main_rows(content)))
    missing = [method_name(content.row(cell.row)) for cell in content.cells if cell.mean is None]
    gap = f" Not run yet: {escape(listed(dict.fromkeys(missing)))}." if missing else ""
    texts = {
        "figure1": f"Accuracy over checkpoints: {setting}; means over {seeds}.{bars} Server: {escape(servers)}.",
        "figure2": rf"Effective and raw $\lambda$: {setting}; means over clients and {seeds}.",
        "figure3": rf"Accuracy and raw $\lambda$ with and without the valve: {setting}; means over {seeds}, of "
        rf"$\lambda$ also over clients.{bars} Server: {escape(servers)}.",
        "peers": f"Accuracy over cost: {_shown(content)}; means over {seeds}, bars: one standard deviation. The "
        "filling of a mark tells the servers of one method apart.",
    }
    return texts[study] + gap


def _shown(content: StudyResult) -> str:
    places = shown_places(content)
    named = escape("; ".join(place_words(place, content.places) for place in places))
    return f"{named}, the settings of Table~\\ref{{tab:peers}}"
