"""Nothing is fetched at run time, and what is installed is pinned."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shared import TINY_WORDS

ROOT = Path(__file__).parents[2]
PINS = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
CODE = """
import sys

def forbid(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto", "socket.gethostbyname"):
        address = arguments[1] if len(arguments) > 1 else arguments[0]
        if not isinstance(address, (str, bytes)) or event != "socket.connect":  # a path is no network
            print("NETWORK", event, address, file=sys.stderr)
            raise SystemExit(9)

sys.addaudithook(forbid)
import oneflare.cli.main as main
for words in {words!r}:
    sys.argv = ["oneflare", *words]
    try:
        main.main()
    except SystemExit as end:
        if end.code:
            raise
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_a_run_its_report_and_its_audit_open_no_socket(tmp_path):
    words = [["run", *TINY_WORDS, "--out", "run", "--quiet"], ["report", "run"], ["audit", "run", "--quiet"]]
    outcome = subprocess.run(
        [sys.executable, "-c", CODE.format(words=words)], cwd=tmp_path, capture_output=True, text=True
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "NETWORK" not in outcome.stderr
    assert (tmp_path / "run" / "audit.json").exists()


def test_the_guard_notices_a_socket(tmp_path):
    code = CODE.format(words=[]) + "\nimport socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)\n"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.returncode == 9
    assert "NETWORK" in outcome.stderr


def test_every_direct_dependency_is_pinned():
    """The tools of `make docs` aside: they never run beside anybody's data."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra, names in project["optional-dependencies"].items() if extra != "docs" for name in names),
    ]
    names = {normal(re.match(r"[A-Za-z0-9_.-]+", line)[0]) for line in wanted}
    pinned = {normal(name) for name in PINS}
    assert names - pinned - {"oneflare"} == set()


@pytest.mark.parametrize("name", ["torch", "numpy", "packaging", "protobuf"])
def test_what_is_installed_is_what_is_pinned(name):
    """The environment of `make` is made from constraints.txt; these hold even where another pin is not to be had."""
    pinned = {normal(key): value for key, value in PINS.items()}
    assert importlib.metadata.version(name).split("+")[0] == pinned[name].split("+")[0]
