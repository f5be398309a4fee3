"""Writes the README's figures and the Markdown of every study from the JSON in `results/`.

`python -m oneflare.study.headline` writes them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from oneflare.core.files import write_text
from oneflare.errors import ConfigError
from oneflare.study.declare import declared
from oneflare.study.markdown import MISSING, percent, place_name, table, to_markdown
from oneflare.study.records import StudyResult

START = "<!-- figures: written by `make headline` from results/, not by hand -->"
END = "<!-- end of figures -->"
SCALES = ("paper", "decisive", "small", "smoke")
"""the first that is there is shown"""
JUDGING = ("paper", "decisive", "small")
"""six epochs on digits decide no claim"""

MEASURED_AGAIN = (
    "The figures of the first release have been withdrawn and are being measured again: "
    "[why, and with which commands](results/README.md)."
)


def best_results(results: Path, study: str, scales: Sequence[str] = SCALES) -> StudyResult | None:
    """At the largest scale that was run."""
    for scale in scales:
        path = results / study / f"{scale}.json"
        if path.exists():
            return StudyResult.read(path)
    return None


def headline(results: Path) -> str:
    """Table 1 by method and place, then the verdict on every claim."""
    content = best_results(results, "table1")
    if content is None:
        return MEASURED_AGAIN
    seeds = len(content.seeds)
    lines = [
        f"Test accuracy in per cent after one upload per client, mean ± deviation over {seeds} seeds on shared "
        f"partitions, 5 clients. Scale `{content.scale}`: {content.scale_summary}. "
        f"[All figures](results/table1/{content.scale}.md)",
        "",
    ]
    columns = ["method", "server", *(place_name(place) for place in content.places)]
    rows = [
        [
            row.short_label,
            row.fusion,
            *(percent(content.cell(place.id, row.id)) for place in content.places),
        ]
        for row in content.rows
    ]
    lines += table(columns, rows, words=2)
    return "\n".join([*lines, "", *_claims(results)])


def _claims(results: Path) -> list[str]:
    rows = []
    for study in declared():
        content = best_results(results, study, JUDGING)
        if content is None:
            continue
        link = f"results/{study}/{content.scale}.md"
        for claim in content.claims:
            name = claim.id if claim.id.startswith(("C", "ours")) else f"{study}: {claim.id}"
            rows.append([f"[{name}]({link})", claim.text, claim.verdict, claim.log or MISSING, content.scale])
    if not rows:
        return []
    return [
        "What the research log claims, and what we claim, put to the test (undecided: these seeds cannot tell):",
        "",
        *table(["claim", "what it says", "verdict", "the log's figures (one seed)", "our scale"], rows, words=5),
    ]


def with_headline(text: str, results: Path) -> str:
    """The text with what is between the markers written anew."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ConfigError(f"the text has no place for figures; put these two lines where they belong: {START} {END}")
    return f"{before}{START}\n\n{headline(results)}\n\n{END}{after}"


def main(readme: str = "README.md", results: str = "results") -> None:
    for study in declared():
        for scale in SCALES:
            source = Path(results) / study / f"{scale}.json"
            if source.exists():
                write_text(source.with_suffix(".md"), to_markdown(StudyResult.read(source)))
    path = Path(readme)
    write_text(path, with_headline(path.read_text(), Path(results)))
    print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
