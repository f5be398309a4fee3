"""Writes the README's figures, the list of claims and the Markdown of every study from the JSON in `results/`.

`python -m oneflare.study.headline` writes them anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oneflare.core.files import write_text
from oneflare.errors import ConfigError
from oneflare.study.declare import declared, find_declaration
from oneflare.study.markdown import percent, place_name, table, to_markdown
from oneflare.study.records import StudyResult
from oneflare.study.summary import SCALES, best_results, judged_claims, summary_page, tally

START = "<!-- figures: written by `make headline` from results/, not by hand -->"
END = "<!-- end of figures -->"
CLAIMS = "claims.md"
MAIN = "table1"

MEASURED_AGAIN = (
    "The figures of the first release have been withdrawn and are being measured again: "
    "[why, and with which commands](results/README.md)."
)


def headline(results: Path) -> str:
    """The methods that a user would choose between, and one sentence on the claims."""
    content = best_results(results, MAIN)
    if content is None:
        return MEASURED_AGAIN
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
