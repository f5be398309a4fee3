"""Write the list of rooms and modules into the map of the code, from their docstrings: `python docs/rooms.py`"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "oneflare"
PAGE = ROOT / "docs" / "map.md"
START, END = "<!-- rooms: written by docs/rooms.py -->", "<!-- end of rooms -->"


def first_line(path: Path) -> str:
    """What the docstring of a module says in its first line."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def rooms() -> list[str]:
    """The packages directly below `oneflare`: lower import layers first, and last those that no layer names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    names = [name.strip().removeprefix("oneflare.") for layer in reversed(layers) for name in layer.split("|")]
    packages = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    return [name for name in names if name in packages] + [name for name in packages if name not in names]


def table() -> str:
    lines = ["| room | what is in it |", "|---|---|"]
    lines += [f"| [`{room}/`](#{room}) | {first_line(PACKAGE / room / '__init__.py')} |" for room in rooms()]
    lines += [f"| `{path.name}` | {first_line(path)} |" for path in sorted(PACKAGE.glob("*.py"))]
    for room in rooms():
        lines += ["", f"## {room}", "", *_folder(PACKAGE / room)]
    return "\n".join(lines)


def _folder(folder: Path) -> list[str]:
    """The table of one room, with the modules of its sub-rooms below their own heading row."""
    lines = [first_line(folder / "__init__.py"), "", "| module | what is in it |", "|---|---|"]
    for path in sorted(folder.rglob("*.py"), key=lambda path: (path.parent != folder, str(path))):
        inner = path.relative_to(folder)
        if path.name != "__init__.py":
            lines.append(f"| `{inner}` | {first_line(path)} |")
        elif path.parent != folder:
            lines.append(f"| **`{inner.parent}/`** | {first_line(path)} |")
    return lines if len(lines) > 4 else lines[:1]


def page(text: str) -> str:
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
