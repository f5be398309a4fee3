"""Writes the README's figures, the list of claims and the Markdown of every study from the JSON in `results/`.

`python -m oneflare.study.headline` writes them anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oneflare.core.files import read_json, write_text
from oneflare.errors import ConfigError
from oneflare.study.declare import declared, find_declaration
from oneflare.study.markdown import MISSING, percent, place_name, table, to_markdown
from oneflare.study.records import StudyResult
from oneflare.study.summary import SCALES, best_results, judged_claims, summary_page, tally
from oneflare.study.verdicts import Spread

START = "<!-- figures: written by `make headline` from results/, not by hand -->"
END = "<!-- end of figures -->"
CLAIMS = "claims.md"
MAIN = "table1"

MEASURED_AGAIN = (
    "The claims of the research log, and the other figures of the first release, are being measured again: "
    "[why, and with which commands](results/README.md)."
)


SAME_UPLOADS = {
    "CIFAR-10, alpha 0.05": "cifar10_16",
    "CIFAR-10, alpha 0.5": "cifar10_16_a5",
    "SVHN, alpha 0.05": "svhn_16",
    "SVHN, alpha 0.5": "svhn_16_a5",
}
"""files of `python -m benchmarks.density` by what was run; shown until the study of table 1 has results"""
CHOICES = {
    ("FedAvg", "fedavg"): ("average", "ensemble"),
    ("FAFI", "fafi"): ("feature_mean", "density_ratio"),
    ("FLARE", "flare"): ("density_ratio",),
}
"""methods and the servers under which a user would choose between them"""


def same_uploads(results: Path) -> str | None:
    """The table of servers over the same uploads; None where it was not measured."""
    paths = {place: results / "density" / f"{name}.json" for place, name in SAME_UPLOADS.items()}
    found = {place: read_json(path)["runs"] for place, path in paths.items() if path.exists()}
    if not found:
        return None
    rows = []
    for (label, method), fusions in CHOICES.items():
        for fusion in fusions:
            by_place = [
                Spread(
                    tuple(
                        run["accuracy"][fusion] for run in runs if run["method"] == method and fusion in run["accuracy"]
                    )
                )
                for runs in found.values()
            ]
            rows.append([label, fusion, *(_mean_and_deviation(spread) for spread in by_place)])
    lines = [
        "Test accuracy in per cent after one upload per client, 5 clients: 10,000 real images at 16 x 16, ResNet-8 of "
        "width 16, 25 epochs; mean ± deviation over five seeds, three for FedAvg. Every server reads the same uploads "
        "([all servers, and the commands](results/density)).",
        "",
        *table(["method", "server", *found], rows, words=2),
        "",
        MEASURED_AGAIN,
    ]
    return "\n".join(lines)


def _mean_and_deviation(spread: Spread) -> str:
    if not spread.values:
        return MISSING
    return f"{100 * spread.mean:.1f}" + ("" if spread.std is None else f" ± {100 * spread.std:.1f}")


def headline(results: Path) -> str:
    """The methods that a user would choose between, and one sentence on the claims."""
    content = best_results(results, MAIN)
    if content is None:
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
    claims = judged_claims(results)
    if claims:
        lines += [
            "",
            f"Of {len(claims)} claims of the research log and of ours, put to the test: {tally(claims)} "
            f"([each with its figures](results/{CLAIMS})).",
        ]
    return "\n".join(lines)


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
        write_text(folder / CLAIMS, summary_page(claims))
    path = Path(readme)
    write_text(path, with_headline(path.read_text(), folder))
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
