"""Write the log's version numbers into the glossary, from the method registry: `python docs/versions.py`"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "glossary.md"
START, END = "<!-- versions: written by docs/versions.py -->", "<!-- end of versions -->"


def table() -> str:
    from oneflare.methods.recipes import METHODS, REUSED

    rows = ["| number | method | what it does | beware |", "|---|---|---|---|"]
    numbered = [(number, method) for method in METHODS.values() for number in method.numbers]
    for number, method in sorted(numbered, key=lambda pair: _order(pair[0])):
        rows.append(f"| {number} | `{method.name}` | {method.summary} | {REUSED.get(number, '')} |")
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
