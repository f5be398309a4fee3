"""The wheel: everything it needs is in it, and the demo runs from it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from shared import TINY_WORDS

ROOT = Path(__file__).resolve().parent.parent


def run(*words, **options):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel in an environment of its own; packages it depends on are those of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,) = folder.glob("oneflare-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    (Path(own) / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "env" / "bin"


def test_the_wheel_holds_what_is_not_python(installed):
    (wheel,) = installed.parent.parent.glob("oneflare-*.whl")
    listed = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    data = {
        str(path.relative_to(source))
        for path in (source / "oneflare").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".py")
    }
    assert "oneflare/py.typed" in data
    assert "oneflare/study/declared/table2.yaml" in data
    assert "oneflare/models/serving/page.html" in data
    assert data <= listed
    assert not [name for name in listed if name.startswith(("tests", "benchmarks"))]


def test_the_wheel_runs_the_demo_without_the_repository(installed, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    where = run(installed / "python", "-c", "import oneflare; print(oneflare.__file__)", cwd=tmp_path, env=environment)
    assert str(ROOT) not in where
    words = ("compare", "fedavg", "flare", *TINY_WORDS, "--seeds", "1", "--out", "demo")
    shown = run(installed / "oneflare", *words, cwd=tmp_path, env=environment)
    assert "flare" in shown
    assert (tmp_path / "demo" / "report.html").stat().st_size > 10_000
    words = ("study", "table2", "--scale", "smoke", "--dry-run")
    assert "cells, 0 done" in run(installed / "oneflare", *words, cwd=tmp_path, env=environment)


def test_the_version_has_one_place(installed):
    from oneflare import __version__

    assert list(installed.parent.parent.glob(f"oneflare-{__version__}-*.whl"))
    told = run(installed / "python", "-c", "from importlib.metadata import version; print(version('oneflare'))")
    assert told.strip() == __version__
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[tool")[0]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version = {{{__version__}}}" in (ROOT / "README.md").read_text()
