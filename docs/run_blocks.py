"""Run the code blocks of the documentation and compare what they print: `python docs/run_blocks.py [PAGE...]`

A page is run from top to bottom in an empty folder. Figures with a decimal point may differ between machines and
moments; everything else must be as written.

    ```console      lines after `$ ` are commands, the lines below them what they print (to stderr, if nothing goes to
                    stdout); `...` stands for anything
    ```python       runs in one session per page; `#>` lines below a block's last statement are what it prints
    ```yaml title="experiment.yaml"  and  ```python title="rule.py"     are written to that file

Blocks with other names (`bash`, `text`) are not run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'title="([^"]+)"')
PRINTS = "#> "
LIMIT = 600
"""seconds that one command may take"""


@dataclass(frozen=True)
class Block:
    kind: str
    options: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent = len(match[1])
        body = "\n".join(line[indent:] for line in match[4].splitlines())
        found.append(Block(match[2], match[3], body, text[: match.start()].count("\n") + 1))
    return found


def agrees(expected: str, actual: str) -> bool:
    """Line by line, spaces and decimal figures aside; `...` matches anything, also many lines."""
    wanted, printed = _plain(expected), _plain(actual)
    pattern = ".*?".join(re.escape(part) for part in wanted.split("..."))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def _plain(text: str) -> str:
    lines = (re.sub(r"[ ━─]+", " ", line).strip() for line in text.strip().splitlines())
    return re.sub(r"[-+]?\d+\.\d+", "#", "\n".join(lines))


def run_page(page: Path) -> list[str]:
    """What differs; empty if the page is true."""
    complaints: list[str] = []
    program: list[str] = []
    with tempfile.TemporaryDirectory(prefix="oneflare-docs-") as folder:
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "110",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
        }
        for block in blocks(page):
            title = TITLE.search(block.options)
            if title:
                path = Path(folder) / title[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text + "\n")
            elif block.kind == "console":
                complaints += _console(page, block, folder, environment)
            elif block.kind == "python":
                program.append(block.text)
                complaints += _python(page, block, program, folder, environment)
    return complaints


def _console(page: Path, block: Block, folder: str, environment: dict[str, str]) -> list[str]:
    complaints = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        while command.endswith("\\"):
            more, _, expected = expected.partition("\n")
            command = command[:-1] + more.strip()
        done = _run(command, folder, environment)
        printed = done.stdout if done.stdout.strip() else done.stderr
        if expected.strip() and not agrees(expected, printed):
            complaints.append(f"{page.name}:{block.line}: `{command}` printed\n{printed.rstrip()}\n--- not\n{expected}")
        if done.returncode not in (0, 2) or (done.returncode == 2 and "error:" not in expected):
            complaints.append(f"{page.name}:{block.line}: `{command}` ended with {done.returncode}\n{printed.rstrip()}")
    return complaints


def _python(page: Path, block: Block, program: list[str], folder: str, environment: dict[str, str]) -> list[str]:
    """The whole program so far, its last block's output marked off."""
    mark = "-- the block --"
    script = Path(folder) / ".page.py"
    lines = "\n".join([*program[:-1], f"print({mark!r}, flush=True)", program[-1]])
    script.write_text(lines)
    done = _run(f"{sys.executable} {script.name}", folder, environment)
    expected = "\n".join(line[len(PRINTS) :] for line in block.text.splitlines() if line.startswith(PRINTS))
    printed = done.stdout.partition(mark)[2]
    if done.returncode != 0:
        return [f"{page.name}:{block.line}: the block failed\n{done.stderr.rstrip()}"]
    if expected and not agrees(expected, printed):
        return [f"{page.name}:{block.line}: printed\n{printed.strip()}\n--- not\n{expected}"]
    return []


def _run(command: str, folder: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    pages = parser.parse_args().pages or sorted(DOCS.rglob("*.md"))
    failed = False
    for page in pages:
        if not any(block.kind in ("console", "python") for block in blocks(page)):
            continue
        started = time.monotonic()
        complaints = run_page(page)
        failed = failed or bool(complaints)
        print(f"{'FAILED' if complaints else 'ok'}  {page.name}  {time.monotonic() - started:.0f} s", flush=True)
        for complaint in complaints:
            print(complaint, file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
