"""Makes `paper.pdf` where LaTeX is installed, and says what is missing where it is not."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from oneflare.core.files import write_bytes, write_text
from oneflare.errors import WorkError

MOST_SECONDS = 300
PACKAGES = "Debian and Ubuntu: apt-get install latexmk texlive-latex-recommended texlive-latex-extra"
OPTIONS = ("-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape")


@dataclass(frozen=True)
class Built:
    """What became of the PDF."""

    pdf: Path | None
    missing: str = ""
    """one line that says why there is none"""
    overfull: tuple[str, ...] = ()
    """LaTeX's lines about text that is wider than its column"""
    undefined: tuple[str, ...] = ()
    """labels and citations that LaTeX did not find"""


def build_pdf(folder: Path) -> Built:
    """`paper.pdf` in the folder that `write_paper` wrote; LaTeX works on a copy, so no other file is left there."""
    commands = _commands()
    if not commands:
        return Built(None, f"paper.pdf was not made: LaTeX (latexmk, or pdflatex and bibtex) is missing; {PACKAGES}")
    with tempfile.TemporaryDirectory(prefix="oneflare-paper-") as scratch:
        work = Path(scratch) / "paper"
        shutil.copytree(folder, work)
        failed = any(_fails(command, work) for command in commands)
        log = _read(work / "paper.log")
        pdf = work / "paper.pdf"
        if not failed and pdf.exists():
            write_bytes(folder / "paper.pdf", pdf.read_bytes())
            return Built(
                folder / "paper.pdf",
                overfull=tuple(re.findall(r"^Overfull .*$", log, re.MULTILINE)),
                undefined=tuple(re.findall(r"(?:Reference|Citation) [`']([^']+)'", log)),
            )
    absent = re.search(r"File [`']([^']+)\.(?:sty|cls|bst)' not found", log)
    if absent:
        return Built(None, f"paper.pdf was not made: LaTeX's package {absent.group(1)} is missing; {PACKAGES}")
    write_text(folder / "paper.log", log)
    reason = next((line[2:] for line in log.splitlines() if line.startswith("! ")), "no reason given")
    raise WorkError(f"LaTeX could not make paper.pdf ({reason}); {folder / 'paper.log'} says where")


def _commands() -> list[list[str]]:
    """What makes the PDF here, in order; nothing where it cannot be made."""
    there = {name for name in ("latexmk", "pdflatex", "bibtex") if shutil.which(name)}
    if not {"pdflatex", "bibtex"} <= there:
        return []
    if "latexmk" in there:
        return [["latexmk", "-pdf", *OPTIONS, "paper.tex"]]
    latex = ["pdflatex", *OPTIONS, "paper.tex"]
    return [latex, ["bibtex", "paper"], latex, latex]


def _fails(command: list[str], folder: Path) -> bool:
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise WorkError(f"{command[0]} did not finish within {MOST_SECONDS} seconds") from None
    return done.returncode != 0


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
