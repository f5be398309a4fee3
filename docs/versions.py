"""Write the log's version numbers into the glossary, from the method registry: `python docs/versions.py`"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "glossary.md"
START, END = "<!-- versions: written by docs/versions.py -->", "<!-- end of versions -->"
ENTRIES = {
    "fafi": "the baseline of every entry",
    "drcl": "4-DRCL",
    "random_annealed": "5-DRCL-with-lambda-annealing",
    "etf_annealed": "6-DRCL-ETF",
    "progressive": "7-progressive-alignment",
    "entropy": "2-A&B (plan A)",
    "pcgrad": "1-part2_roadmap (plan C)",
    "uncertainty": "4-Why-v10-fails and 5-Why-v10-fails-again",
    "uncertainty_rescaled": "6-Why-v10-doesn't-fail-this-time",
    "uncertainty_coupled": "7-why-v11-fails",
    "uncertainty_coupled_cosine": "7-why-v11-fails",
    "decoupled": "file 000",
    "meta_annealed": "8-how-to-use-excel and 9-like-a-rolling-stone",
    "floor": "1-explosions-in-SVHN",
    "ceiling": "2-how-to-win-at-SVHN",
    "flare": "2-how-to-win-at-SVHN and 3-waaaaagh",
    "memory_bank": "1-memory-bank",
    "public_bank": "2-public-feature-bank",
    "two_stage": "3-public-feature-bank2",
}
"""the entries of the research log that describe a method, by their titles there"""


def table() -> str:
    from oneflare.methods.recipes import METHODS, REUSED

    rows = ["| number | method | what it does | entry of the log | beware |", "|---|---|---|---|---|"]
    numbered = [(number, method) for method in METHODS.values() for number in method.numbers]
    for number, method in sorted(numbered, key=lambda pair: _order(pair[0])):
        entry, beware = ENTRIES.get(method.name, ""), REUSED.get(number, "")
        rows.append(f"| {number} | `{method.name}` | {method.summary} | {entry} | {beware} |")
    rows += ["", "Methods without a number:", "", "| method | from | what it does |", "|---|---|---|"]
    rows += [f"| `{m.name}` | {m.version} | {m.summary} |" for m in METHODS.values() if not m.numbers]
    return "\n".join(rows)


def page(text: str) -> str:
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


def _order(number: str) -> tuple[float, str]:
    found = re.match(r"V(\d+(?:\.\d+)?)", number)
    return (float(found[1]) if found else 0.0, number)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
