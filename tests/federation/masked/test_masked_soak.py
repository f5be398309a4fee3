"""Members and coordinator are killed at random moments of every step; nothing is lost, nothing secret is left."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from hospitals import digits, rows_of, write_pngs
from oneflare.core.seeds import numpy_generator
from oneflare.upload import read_tensors
from oneflare.upload.checking import read_manifest
from oneflare.upload.signing import generate

NAMES = ("east", "north", "south", "west")
CRASHES = 12
"""of each step"""


def start(*words: str | Path) -> int:
    """A command in a process of its own, which has everything imported already."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        from oneflare.cli.main import main

        sys.argv = ["oneflare", *map(str, words)]
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os._exit(code)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


class Killer:
    """Kills a command several times at random moments, then lets it finish."""

    def __init__(self, seed: int) -> None:
        self.generator = numpy_generator(seed, "masked")
        self.killed = 0

    def __call__(self, undo: list[Path], *words: str | Path) -> None:
        """undo: files whose absence makes the command do its work again where it was faster than its killer."""
        started = time.monotonic()
        assert ended(start(*words)) == 0, words
        seconds = time.monotonic() - started
        for _ in range(CRASHES):
            for path in undo:
                path.unlink(missing_ok=True)
            process = start(*words)
            time.sleep(float(self.generator.uniform(0, seconds)))
            os.kill(process, signal.SIGKILL)
            self.killed += ended(process) == -signal.SIGKILL
        assert ended(start(*words)) == 0, words


@pytest.mark.soak
def test_killed_at_random_moments_of_every_step(tmp_path):
    for module in ("cli.main", "federation.coordinator", "federation.page", "federation.masked.release"):
        importlib.import_module(f"oneflare.{module}")  # before the processes are forked
    root, kill, split = tmp_path, Killer(0), digits()[0]
    inbox, charter = root / "inbox", root / "fed" / "federation.yaml"
    members = []
    for index, name in enumerate(NAMES):
        write_pngs(root / name / "images", split, rows_of(index, 30))
        generate(root / name / f"{name}.key", root / name / f"{name}.pub")
        members += ["--member", f"{name}={root / name / name}.pub"]
    shape = ["--classes", "0,1,2,3,4,5,6,7,8,9", "--image-size", "8", "--channels", "1"]
    terms = ["method=analytic", "encoder=conv4", "encoder.width=4", "analytic.filters=2", "upload.masked=true"]
    assert ended(start("server", "init", root / "fed", *shape, *members, *terms)) == 0
    for name in NAMES:
        words = ["client", "join", charter, "--key", root / name / f"{name}.key", "--images", "40"]
        kill([], *words, "--out", inbox / f"{name}.join.json")
    kill([], "server", "roster", root / "fed", "--enrolments", inbox)
    for name in NAMES[:3]:
        out = root / name / f"{name}.safetensors"
        words = ["client", "train", charter, "--data", root / name / "images", "--key", root / name / f"{name}.key"]
        kill([out, out.with_suffix(".work") / "masked.safetensors"], *words, "--out", out)
        shutil.copy(out, inbox)
    kill([root / "fed" / "masked" / "request.json"], "server", "missing", root / "fed", "--uploads", inbox)
    request = root / "request.json"
    shutil.copy(root / "fed" / "masked" / "request.json", request)
    for name in NAMES[:3]:
        out = inbox / f"{name}.release.json"
        words = ["client", "release", charter, request, "--key", root / name / f"{name}.key", "--out", out]
        assert ended(start(*words)) == 0
        first = out.read_bytes()
        kill([out], *words)
        assert out.read_bytes() == first
    result = root / "fed" / "result.json"
    kill([], "server", "fuse", root / "fed", "--releases", inbox)
    assert kill.killed > CRASHES
    sums = {}
    for name in NAMES[:3]:
        path = root / name / f"{name}.work" / "upload.safetensors"
        sums[name] = read_tensors(path, read_manifest(path), "statistics.")["statistics.fixed"]
    expected = torch.stack(list(sums.values())).sum(0)
    assert json.loads(result.read_text())["masked"]["counts"] == expected[:10].tolist()
    _nothing_secret(root, sums)
    print(f"killed {kill.killed} times")


def _nothing_secret(root: Path, sums: dict[str, torch.Tensor]) -> None:
    """No half-written file anywhere, and no key and no plain sums outside a member's own folder."""
    assert not list(root.rglob(".*.partial"))
    keys = [(root / name / f"{name}.mask" / "mask.key").read_bytes().split(b"\n")[1] for name in NAMES]
    for folder in (root / "fed", root / "inbox"):
        for path in folder.rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            assert not any(key in content for key in keys), path
            assert not any(vector.numpy()[10:14].tobytes() in content for vector in sums.values()), path
