"""`engine=flower` as a user types it: Flower's simulation on Ray, in processes of its own."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from shared import COMMAND, TINY_WORDS, oneflare

pytestmark = pytest.mark.soak


def files_of(folder: Path) -> dict[str, bytes]:
    """What must not depend on the engine: uploads, snapshots, traces, models."""
    paths = [
        *folder.glob("clients/**/*.safetensors"),
        *folder.glob("clients/*/trace.jsonl"),
        *folder.glob("fusions/*/model*"),
    ]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_the_simulation_writes_the_files_of_the_local_engine(tmp_path):
    for engine in ("local", "flower"):
        outcome = oneflare("run", *TINY_WORDS, f"engine={engine}", "--out", engine, "--quiet", cwd=tmp_path)
        assert outcome.returncode == 0, outcome.stderr
    ours, theirs = (files_of(tmp_path / engine) for engine in ("flower", "local"))
    fusions = len(list((tmp_path / "local/fusions").iterdir()))
    assert len(ours) == 3 * 3 + fusions, "upload, snapshot and trace of three clients, a model of each fusion"
    assert ours == theirs
    again = oneflare("run", *TINY_WORDS, "engine=flower", "--out", "flower", cwd=tmp_path)
    assert "complete, nothing to do" in again.stdout


def test_a_simulation_that_is_stopped_leaves_no_process_and_goes_on_from_its_checkpoints(tmp_path):
    words = [*TINY_WORDS, "epochs=150", "train.checkpoint_seconds=0", "workers=1"]
    assert oneflare("run", *words, "--out", "local", "--quiet", cwd=tmp_path).returncode == 0
    process = subprocess.Popen(
        [*COMMAND, "run", *words, "engine=flower", "--out", "flower"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 240
    while not list(tmp_path.glob("flower/.flower/*/checkpoint/state.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "run the same command again to go on" in complaint
    assert "Traceback" not in complaint
    time.sleep(3)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("flower/.flower/*/checkpoint/*")}
    time.sleep(2)
    assert before == {path: path.stat().st_mtime_ns for path in before}, "a node outlived the stopped run"
    resumed = oneflare("run", *words, "engine=flower", "--out", "flower", "--quiet", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert files_of(tmp_path / "flower") == files_of(tmp_path / "local")
    assert not (tmp_path / "flower" / ".flower").exists()
