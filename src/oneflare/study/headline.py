"""Writes the README's figures, the list of claims and the Markdown of every study from the JSON in `results/`.

`python -m oneflare.study.headline` writes them anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oneflare.core.files import read_json, write_text
from oneflare.errors import ConfigError
from oneflare.fusion import older_code
from oneflare.study.cells import CELLS
from oneflare.study.declare import declared, find_declaration
from oneflare.study.markdown import MISSING, percent, place_name, table, to_markdown
from oneflare.study.records import StudyResult
from oneflare.study.summary import (
    SCALES,
    best_results,
    exploratory_claims,
    judged_claims,
    summary_page,
    tally,
    waiting_claims,
)
from oneflare.study.verdicts import Spread

START = "<!-- figures: written by `make headline` from results/, not by hand -->"
END = "<!-- end of figures -->"
CLAIMS = "claims.md"
MAIN = "table1"

MEASURED_AGAIN = (
    "Some studies, and with them the main table, still wait for their runs: "
    "[which, and with which commands](results/README.md)."
)


SAME_UPLOADS = {
    "CIFAR-10, alpha 0.05": ("cifar10_16", "cifar10", 0.05),
    "CIFAR-10, alpha 0.5": ("cifar10_16_a5", "cifar10", 0.5),
    "SVHN, alpha 0.05": ("svhn_16", "svhn", 0.05),
    "SVHN, alpha 0.5": ("svhn_16_a5", "svhn", 0.5),
}
"""files of `python -m benchmarks.density`, data and alpha by what was run; shown until table 1 has results"""
CHOICES = {
    ("FedAvg", "fedavg"): ("average", "ensemble"),
    ("FAFI", "fafi"): ("feature_mean", "density_ratio"),
    ("FLARE", "flare"): ("density_ratio",),
    ("analytic", "analytic"): ("analytic",),
    ("FLARE with statistics", "flare_analytic"): ("flare_analytic",),
}
"""methods and the servers under which a user would choose between them"""
SAME_NETWORKS = {"flare": "flare_analytic"}
"""methods whose networks are in the uploads of another one as well"""
COMMON = {"train_size": 10000, "image_size": 16}
"""images of those runs; kept cells with others are not shown beside them"""
BATCH = 32
"""images in a batch of those runs, likewise"""


def same_uploads(results: Path) -> str | None:
    """The table of servers over the same uploads; None where it was not measured."""
    if not any((results / "density" / f"{name}.json").exists() for name, _, _ in SAME_UPLOADS.values()):
        return None
    choices = [(label, method, fusion) for (label, method), fusions in CHOICES.items() for fusion in fusions]
    found = {
        place: [Spread(_accuracies(results, place, method, fusion)) for _, method, fusion in choices]
        for place in SAME_UPLOADS
    }
    found = {place: column for place, column in found.items() if any(spread.values for spread in column)}
    seeds = {len(spread.values) for column in found.values() for spread in column if spread.values}
    rows = [
        [label, fusion, *(_mean_and_deviation(column[number]) for column in found.values())]
        for number, (label, _, fusion) in enumerate(choices)
    ]
    lines = [
        "Test accuracy in per cent after one upload per client, 5 clients: 10,000 real images at 16 x 16, ResNet-8 of "
        f"width 16, 25 epochs; mean ± deviation over {min(seeds)} to {max(seeds)} seeds. All servers of a method read "
        "the same uploads ([all servers, and the commands](results/density)); `analytic` trains nothing.",
        "",
        *table(["method", "server", *found], rows, words=2),
        "",
        " ".join(filter(None, (_claims_so_far(results), MEASURED_AGAIN))),
    ]
    return "\n".join(lines)


def _claims_so_far(results: Path) -> str | None:
    claims = judged_claims(results)
    shown = "1 claim" if len(claims) == 1 else f"{len(claims)} claims"
    waiting = len(waiting_claims(claims))
    rest = f"; {waiting} more wait for their runs" if waiting else ""
    found = f"Of {shown} of the research log and of ours put to the test so far: {tally(claims)}{rest}"
    return f"{found} ([each with its figures](results/{CLAIMS}))." if claims else None


def _accuracies(results: Path, place: str, method: str, fusion: str) -> tuple[float, ...]:
    """By seed, of the table of servers; where it lacks the method, of the kept cells of studies."""
    name, data, alpha = SAME_UPLOADS[place]
    path = results / "density" / f"{name}.json"
    runs = read_json(path)["runs"] if path.exists() else []
    found = tuple(run["accuracy"][fusion] for run in runs if run["method"] == method and fusion in run["accuracy"])
    return found or _kept_accuracies(results, SAME_NETWORKS.get(method, method), (data, alpha), fusion)


def _kept_accuracies(results: Path, method: str, place: tuple[str, float], fusion: str) -> tuple[float, ...]:
    """By seed; those of the fusion as it is today come before those of an earlier revision."""
    data, alpha = place
    found: dict[int, float] = {}
    before: dict[int, float] = {}
    for path in sorted((results / CELLS).glob(f"{method}-{data}-a{alpha:g}-s*.json")):
        cell = read_json(path)
        settings, split, fusions = cell["experiment"], cell["experiment"]["partition"], cell["result"]["fusions"]
        plain = settings["backbone"] is None and split["label_noise"] is None and split["clients"] == 5
        plain = plain and settings.get("train", {}).get("batch_size", BATCH) == BATCH
        if plain and COMMON.items() <= settings["data"].items() and fusion in fusions:
            row = fusions[fusion]
            today = older_code(row, {"name": fusion, **(row.get("options") or {})}) is None
            (found if today else before)[settings["seed"]] = row["accuracy"]
    found = before | found
    return tuple(found[seed] for seed in sorted(found))


def _mean_and_deviation(spread: Spread) -> str:
    if not spread.values:
        return MISSING
    return f"{100 * spread.mean:.1f}" + ("" if spread.std is None else f" ± {100 * spread.std:.1f}")


def headline(results: Path) -> str:
    """The methods that a user would choose between, and one sentence on the claims."""
    content = best_results(results, MAIN)
    if content is None or not content.complete:
        return same_uploads(results) or MEASURED_AGAIN
    wanted = find_declaration(MAIN).headline
    rows = [row for row in content.rows if not wanted or row.id in wanted]
    lines = [
        f"Test accuracy in per cent after one upload per client, 5 clients: {content.scale_summary}; mean ± deviation "
        f"over {len(content.seeds)} seeds on shared partitions ([all figures](results/{MAIN}/{content.scale}.md)).",
        "",
        *table(
            ["method", "server", *(place_name(place) for place in content.places)],
            [
                [row.short_label, row.fusion, *(percent(content.cell(place.id, row.id)) for place in content.places)]
                for row in rows
            ],
            words=2,
        ),
    ]
    claims = _claims_so_far(results)
    return "\n".join(lines if claims is None else [*lines, "", claims])


def with_headline(text: str, results: Path) -> str:
    """The text with what is between the markers written anew."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ConfigError(f"the text has no place for figures; put these two lines where they belong: {START} {END}")
    return f"{before}{START}\n\n{headline(results)}\n\n{END}{after}"


def main(readme: str = "README.md", results: str = "results") -> None:
    folder = Path(results)
    for study in declared():
        for scale in SCALES:
            source = folder / study / f"{scale}.json"
            if source.exists():
                write_text(source.with_suffix(".md"), to_markdown(StudyResult.read(source)))
    claims = judged_claims(folder)
    if claims:
        write_text(folder / CLAIMS, summary_page(claims, exploratory_claims(folder)))
    path = Path(readme)
    write_text(path, with_headline(path.read_text(), folder))
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
