"""Run the code blocks of the documentation and compare what they print: `python docs/run_blocks.py [PAGE...]`

A page is run from top to bottom in an empty folder. Figures with a decimal point may differ between machines and
moments; everything else must be as written.

    ```console      lines after `$ ` are commands, the lines below them what they print (to stderr, if nothing goes to
                    stdout); `...` is anything within its line, alone on a line any lines
    ```bash title="north"           is run in the folder `north` of the page, which stands for a machine
    ```bash, then ```output         is run; the output block directly below it is what it prints, compared likewise. One
                    that ends in `&` goes on in the background until the page ends.
    ```python       runs in one session per page; `#>` or `# >` lines below a block's last statement are what it prints
    ```yaml title="experiment.yaml"  and  ```python title="rule.py"     are written to that file

Other blocks (`text`, `bash` without title or output) are not run. `--fill` writes what was printed into output blocks
that are empty; put `...` where it varies.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FENCE = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
TITLE = re.compile(r'title="([^"]+)"')
PRINTS = re.compile(r"^# ?> ")
LIMIT = 600
"""seconds that one command may take"""
START = 120
"""seconds until a command in the background must have printed what the page says"""


@dataclass(frozen=True)
class Block:
    kind: str
    options: str
    text: str
    line: int
    output: str | None = None
    """what it must print, where the page shows it in a block of its own"""

    @property
    def title(self) -> str | None:
        found = TITLE.search(self.options)
        return found[1] if found else None

    @property
    def runs(self) -> bool:
        return self.kind in ("console", "python") or (
            self.kind == "bash" and (self.title is not None or self.output is not None)
        )


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        indent = len(match[1])
        body = "\n".join(line[indent:] for line in match[4].splitlines())
        line = text[: match.start()].count("\n") + 1
        if match[2] == "output":
            if not found or found[-1].kind != "bash" or text[end : match.start()].strip():
                raise SystemExit(f"{page}:{line}: an output block without a bash block directly above it")
            found[-1] = replace(found[-1], output=body)
        else:
            found.append(Block(match[2], match[3], body, line))
        end = match.end()
    return found


def agrees(expected: str, actual: str) -> bool:
    """Line by line, spaces and decimal figures aside; `...` is anything within its line, alone on one any lines."""
    pattern = "".join(
        r"(?:[^\n]*\n)*?" if line == "..." else r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n"
        for line in _plain(expected).split("\n")
    )
    return re.fullmatch(pattern, _plain(actual) + "\n") is not None


def _plain(text: str) -> str:
    lines = (re.sub(r"[ ━─]+", " ", line).strip() for line in text.strip().splitlines())
    return re.sub(r"[-+]?\d+\.\d+", "#", "\n".join(lines))


def run_page(page: Path, printed: dict[int, str] | None = None) -> list[str]:
    """What differs; empty if the page is true. printed: what bash blocks printed, by their line."""
    printed = {} if printed is None else printed
    complaints: list[str] = []
    program: list[str] = []
    behind: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="oneflare-docs-") as folder:
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "110",
            "NO_COLOR": "1",
            "OMP_NUM_THREADS": "1",
            "ONEFLARE_CACHE": str(Path(folder) / ".cache"),  # a page starts from nothing, whatever ran before
            "PYTHONUNBUFFERED": "1",
        }
        try:
            for block in blocks(page):
                if block.kind == "bash" and block.runs:
                    complaints += _bash(page, block, folder, environment, behind, printed)
                elif block.title:
                    path = Path(folder) / block.title
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block.text + "\n")
                elif block.kind == "console":
                    complaints += _console(page, block, folder, environment)
                elif block.kind == "python":
                    program.append(block.text)
                    complaints += _python(page, block, program, folder, environment)
        finally:
            for process in behind:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    process.wait()
    return complaints


def _bash(
    page: Path,
    block: Block,
    folder: str,
    environment: dict[str, str],
    behind: list[subprocess.Popen[str]],
    outputs: dict[int, str],
) -> list[str]:
    """One script; what it prints, to stdout and stderr as on a terminal, is what the page shows."""
    place = Path(folder) / (block.title or "")
    place.mkdir(parents=True, exist_ok=True)
    where = f"{page.name}:{block.line}: `{block.text.splitlines()[0]}`"
    if block.text.rstrip().endswith("&"):
        outputs[block.line] = printed = _start(block, place, environment, behind)
        expected = block.output or "..."
        return [] if agrees(expected, printed) else [f"{where} printed\n{printed}\n--- not\n{expected}"]
    done = _run(f"exec 2>&1\nset -e\n{block.text}", str(place), environment)
    printed = done.stdout.rstrip()
    refused = done.returncode == 2 and "error:" in (block.output or "")
    if done.returncode != 0 and not refused:
        return [f"{where} ended with {done.returncode}\n{printed}"]
    outputs[block.line] = printed
    if block.output is not None and not agrees(block.output, printed):
        return [f"{where} printed\n{printed}\n--- not\n{block.output}"]
    return []


def _start(block: Block, place: Path, environment: dict[str, str], behind: list[subprocess.Popen[str]]) -> str:
    """Leave a command running; wait until it has printed what the page shows, or has ended, or START is over."""
    log = place / ".behind.txt"
    with log.open("w") as file:
        command = "exec " + block.text.strip().removesuffix("&")
        behind.append(
            subprocess.Popen(
                command,
                shell=True,
                cwd=place,
                env=environment,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        )
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and behind[-1].poll() is None:
        printed = log.read_text()
        if printed.endswith("\n") and agrees(block.output or "...", printed):
            break
        time.sleep(0.2)
    return log.read_text().rstrip()


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
    expected = "\n".join(PRINTS.sub("", line) for line in block.text.splitlines() if PRINTS.match(line))
    printed = done.stdout.partition(mark)[2]
    if done.returncode != 0:
        return [f"{page.name}:{block.line}: the block failed\n{done.stderr.rstrip()}"]
    if expected and not agrees(expected, printed):
        return [f"{page.name}:{block.line}: printed\n{printed.strip()}\n--- not\n{expected}"]
    return []


def fill(page: Path, printed: dict[int, str]) -> None:
    """Write what was printed into the page's empty output blocks."""
    text = page.read_text()
    above = 0
    pieces, end = [], 0
    for match in FENCE.finditer(text):
        if match[2] == "output" and not match[4].strip() and above in printed:
            pieces += [text[end : match.start(4)], printed[above] + "\n"]
            end = match.end(4)
        above = text[: match.start()].count("\n") + 1
    page.write_text("".join(pieces) + text[end:])


def _run(command: str, folder: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--fill", action="store_true", help="write output into empty output blocks")
    given = parser.parse_args()
    pages = given.pages or sorted(DOCS.rglob("*.md"))
    failed = False
    for page in pages:
        if not any(block.runs for block in blocks(page)):
            continue
        started = time.monotonic()
        printed: dict[int, str] = {}
        complaints = run_page(page, printed)
        if given.fill:
            fill(page, printed)
        failed = failed or bool(complaints)
        print(f"{'FAILED' if complaints else 'ok'}  {page.name}  {time.monotonic() - started:.0f} s", flush=True)
        for complaint in complaints:
            print(complaint, file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
