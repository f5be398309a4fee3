"""Killed at any moment, out of disk space, without permission: nothing lost, nothing left half-written."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
from crash import (
    Moment,
    command,
    count_operations,
    incomplete_files,
    listing,
    outcome,
    preload,
    run_and_die,
    stage,
    work,
)
from record import record

from conftest import TINY
from oneflare.core.config import Experiment
from oneflare.core.files import exclusive
from oneflare.core.seeds import numpy_generator
from oneflare.methods.resolve import resolve
from oneflare.simulation.stages import read_experiment, run_experiment
from shared import COMMAND, TINY_WORDS, wait_for

CLIENTS = 3
LONGER = {"train.epochs": 4, "train.checkpoint_seconds": 0, "train.snapshots": 1, "method": "flare"}


def experiment(workers: int = 1) -> Experiment:
    return resolve(TINY, LONGER, {"workers": workers})


def kill_and_restart(folder: Path, wanted: dict, moment: Moment, workers: int) -> str | None:
    """One crash; returns the stage in which it happened, None if the run was faster than its killer."""
    ended = run_and_die(experiment(workers), folder, moment)
    if ended == 0:
        shutil.rmtree(folder)
        return None
    assert ended == -signal.SIGKILL
    with exclusive(folder) if folder.exists() else nullcontext():  # workers that outlive their run still change files
        where = stage(folder, CLIENTS)
        assert not incomplete_files(folder), where
    assert run_and_die(experiment(workers), folder) == 0, where
    assert outcome(folder) == wanted, where
    shutil.rmtree(folder)
    return where


def crash(folder: Path, number: int, seed: int) -> dict:
    """`number` crashes at random moments, half by the clock, half at a file operation, with one and two workers."""
    preload()
    started = time.monotonic()
    assert run_and_die(experiment(), folder / "whole") == 0
    seconds = time.monotonic() - started
    wanted = outcome(folder / "whole")
    operations = count_operations(experiment(), folder / "counted")
    generator = numpy_generator(seed, "crashes")
    stages: Counter[str] = Counter()
    tried = 0
    while stages.total() < number:
        tried += 1
        delay = float(generator.choice([0.0, 0.0, 0.0005, 0.002]))
        if tried % 2:
            moment, workers = Moment(operation=int(generator.integers(1, operations + 1)), delay=delay), 1
        else:
            moment, workers = Moment(seconds=float(generator.uniform(0, seconds))), 1 + tried // 2 % 2
        where = kill_and_restart(folder / "run", wanted, moment, workers)
        if where is not None:
            stages[where] += 1
    return {"crashes": stages.total(), "survived": stages.total(), "stages": dict(sorted(stages.items()))}


def test_killed_at_random_moments(tmp_path):
    crash(tmp_path, 4, seed=0)


@pytest.mark.soak
def test_killed_at_fifty_random_moments(tmp_path):
    figures = crash(tmp_path, 50, seed=1)
    assert {"training", "fusing", "report"} <= set(figures["stages"])
    record("crashes", figures)


KINDS = ("state", "upload", "summary", "model", "metrics", "result", "report")


def die_while_writing(target: str, folder: Path) -> None:
    """Exactly between the temporary file and its new name."""
    process = os.fork()
    if process == 0:

        def hook(event, arguments):
            if event == "os.rename" and Path(str(arguments[1])).name.startswith(target):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work(experiment(), folder)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert list(folder.rglob(f".{target}*.partial"))


@pytest.mark.soak
def test_killed_while_writing_each_kind_of_file(tmp_path):
    assert run_and_die(experiment(), tmp_path / "whole") == 0
    wanted = outcome(tmp_path / "whole")
    for target in KINDS:
        folder = tmp_path / target
        die_while_writing(target, folder)
        assert not incomplete_files(folder), target
        assert run_and_die(experiment(), folder) == 0, target
        assert outcome(folder) == wanted, target
    record("writing", {"kinds": list(KINDS), "survived": len(KINDS)})


def test_a_finished_client_whose_checkpoint_was_not_yet_removed(tmp_path, tiny_run):
    """Killed between the summary and the removal of the checkpoint: the restart tidies up."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    wanted = listing(folder)
    (folder / "result.json").unlink()
    (folder / "clients" / "001" / "checkpoint").mkdir()
    (folder / "clients" / "001" / "checkpoint" / "state.safetensors").write_bytes(b"old")
    run_experiment(read_experiment(folder), folder)
    assert listing(folder) == wanted


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs that can be given more room; where mounting is not allowed, a limit on the size of a file."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "none", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root; see the test with a file size limit")
    yield place
    subprocess.run(["umount", place], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


def one_error_line(ended: tuple[int, str]) -> str:
    code, said = ended
    assert code == 2, said
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    return line


WORDS = ["run", *TINY_WORDS, "workers=1", "--quiet", "--out"]


def test_full_disk_and_read_only_disk(small_disk, tmp_path):
    run = str(small_disk / "run")
    assert "cannot be written (No space left on device); make room" in one_error_line(command(*WORDS, run))
    assert not list(small_disk.rglob("*.partial"))
    assert not incomplete_files(small_disk)
    remount(small_disk, "size=20m")
    remount(small_disk, "ro")
    assert "cannot be written (Read-only file system)" in one_error_line(command(*WORDS, run))
    remount(small_disk, "rw")
    assert command(*WORDS, run) == (0, "")
    assert command(*WORDS, str(tmp_path / "whole")) == (0, "")
    assert outcome(small_disk / "run") == outcome(tmp_path / "whole")


def test_a_file_that_may_not_grow(tmp_path):
    """The same without root: no file larger than 4 kB."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    try:
        ended = command(*WORDS, str(tmp_path / "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "cannot be written (File too large)" in one_error_line(ended)
    assert not list(tmp_path.rglob("*.partial"))
    assert not incomplete_files(tmp_path)


@pytest.mark.soak
def test_stopped_by_sigterm_and_started_again(tmp_path):
    words = [*COMMAND, "run", *TINY_WORDS, "epochs=60", "train.checkpoint_seconds=0", "workers=2", "--out"]
    survived = 0
    assert subprocess.run([*words, "whole"], cwd=tmp_path, capture_output=True).returncode == 0
    for wait in (0.0, 0.4, 0.9):
        process = subprocess.Popen([*words, "run"], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        wait_for(lambda: list(tmp_path.glob("run/clients/*/checkpoint/state.safetensors")))
        time.sleep(wait)
        process.terminate()
        complaint = process.communicate(timeout=60)[1].decode()
        if process.returncode == 143:
            assert "run the same command again to go on" in complaint
            assert "Traceback" not in complaint
            survived += 1
        assert not list(tmp_path.rglob("*.partial"))
        assert subprocess.run([*words, "run"], cwd=tmp_path, capture_output=True).returncode == 0
        assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
        shutil.rmtree(tmp_path / "run")
    assert survived
    record("sigterm", {"stopped": survived, "resumed": survived})


def test_a_stale_lock_is_recognised(tmp_path):
    """The number of a process that is gone, or nonsense, does not keep anybody out."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    for content in (str(gone.pid), "nonsense", ""):
        (tmp_path / ".lock").write_text(content)
        with exclusive(tmp_path):
            assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_workers_of_a_killed_run_are_waited_for(tmp_path):
    """The lock of a killed process lives on in its workers for a moment; its number is known to be dead."""
    holder = (
        "import os, time, subprocess, sys; from pathlib import Path; from oneflare.core.files import exclusive\n"
        "with exclusive(Path('run')):\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(1); os._exit(0)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", holder], cwd=tmp_path).returncode == -9
    started = time.monotonic()
    with exclusive(tmp_path / "run"):
        assert time.monotonic() - started < 9
