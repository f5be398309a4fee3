"""The examples run as they are, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ELSEWHERE = {"hospitals.py", "hospitals_flower.py"}
"""run by the tests of what they show"""


def run(path: Path, folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, path], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in ELSEWHERE))
def test_example(name, tmp_path):
    printed = run(EXAMPLES / name, tmp_path)
    assert "%" in printed or "points" in printed


def test_notebook(tmp_path):
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "clear the outputs before committing"
    (tmp_path / "cells.py").write_text("\n".join(cells))
    printed = run(tmp_path / "cells.py", tmp_path)
    assert printed.rstrip().endswith("True")
