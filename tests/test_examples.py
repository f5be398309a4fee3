"""The examples run as they are, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shared import ForkedScript

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LONG = {"hospitals.py", "hospitals_flower.py"}
"""a minute each: run by `make examples`, not by `make test`"""


def run(path: Path, folder: Path) -> str:
    done = ForkedScript(str(path), cwd=folder).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout


PRINTED = {
    "fuse_folder.py": r"count_prototypes +(?P<accuracy>[\d.]+) %, 4 passes per image",
    "own_arrays.py": r"count_prototypes +(?P<accuracy>[\d.]+) %",
    "own_controller.py": r"count_prototypes +(?P<points>[+-][\d.]+) points against FLARE",
    "own_encoder.py": r"density_ratio: (?P<accuracy>[\d.]+) %, [\d,]+ parameters in all members",
    "own_fusion.py": r"loudest +(?P<accuracy>[\d.]+) %",
}
"""what each example shows of the part that it adds"""


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in LONG))
def test_example(name, tmp_path):
    printed = run(EXAMPLES / name, tmp_path)
    found = re.search(PRINTED[name], printed)
    assert found, printed
    figures = found.groupdict()
    assert 60 < float(figures.get("accuracy", 90)) <= 100  # of ten classes
    assert abs(float(figures.get("points", 0))) < 30


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(LONG))
def test_federation(name, tmp_path):
    words, environment = [sys.executable, EXAMPLES / name, "made"], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Next: cd " in done.stdout
    assert (tmp_path / "made" / "coordinator" / "digits" / "model.safetensors").exists()
    assert "test images" in (tmp_path / "made" / "coordinator" / "digits" / "card.md").read_text()


def test_notebook(tmp_path):
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "clear the outputs before committing"
    (tmp_path / "cells.py").write_text("\n".join(cells))
    printed = run(tmp_path / "cells.py", tmp_path)
    assert printed.rstrip().endswith("True")
