"""Runs in a process of their own that die at a chosen moment: at a time, or at a file operation."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from oneflare.core.config import Experiment
from oneflare.core.files import TEMPORARY_SUFFIX
from oneflare.report import write_report
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import read_result, run_experiment

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod"}


@dataclass(frozen=True)
class Moment:
    """When to die: after some seconds, or `delay` seconds after the n-th file operation in the run's folder."""

    seconds: float | None = None
    operation: int | None = None
    delay: float = 0.0


def preload() -> None:
    """What every run imports, once, before the forks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages, as they are imported
        for name in ("matplotlib.pyplot", "sklearn.datasets", "main", "progress", "show"):
            importlib.import_module(name if "." in name else f"oneflare.cli.{name}")


def command(*words: str) -> tuple[int, str]:
    """`oneflare WORDS` in a forked process: its exit code and what it said on stderr."""
    preload()
    from oneflare.cli.main import main

    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            sys.argv = ["oneflare", *words]
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), said


def work(experiment: Experiment, folder: Path) -> None:
    run_experiment(experiment, folder)
    write_report(folder)


def die_at(folder: Path, operation: int, delay: float) -> None:
    """SIGKILL to this process at the n-th file operation below `folder`."""
    place, seen = str(folder), 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in OPERATIONS and arguments and str(arguments[0]).startswith(place):
            seen += 1
            if seen == operation:
                if delay:
                    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run_and_die(experiment: Experiment, folder: Path, moment: Moment | None = None) -> int:
    """Start the work in a forked process; returns how it ended (0, or minus the signal)."""
    preload()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            if moment is not None and moment.operation is not None:
                die_at(folder, moment.operation, moment.delay)
            work(experiment, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if moment is not None and moment.seconds is not None:
        time.sleep(moment.seconds)
        os.kill(process, signal.SIGKILL)  # not yet waited for, so the number is still its own
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def count_operations(experiment: Experiment, folder: Path) -> int:
    """How many file operations an uninterrupted run makes."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        seen = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            seen += event in OPERATIONS and bool(arguments) and str(arguments[0]).startswith(str(folder))

        sys.addaudithook(hook)
        work(experiment, folder)
        os.write(writer, str(seen).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(process, 0)
    return int(answer)


def stage(folder: Path, clients: int) -> str:
    """How far a run had come when it died."""
    files = RunFiles(folder)
    if files.report.exists():
        return "after the report"
    if files.result.exists():
        return "report"
    if not files.partition.exists():
        return "start"
    if all(files.client(client).summary.exists() for client in range(clients)):
        return "fusing"
    partial = [path.name.split(".")[1] for path in folder.rglob(f".*{TEMPORARY_SUFFIX}")]
    return {"state": "writing a checkpoint", "upload": "writing an upload"}.get(
        partial[0] if partial else "", "training"
    )


def incomplete_files(folder: Path) -> list[Path]:
    """Files under their real name that are not whole; there must never be one."""
    broken = []
    for path in folder.rglob("*"):
        if path.name.startswith(".") or not path.is_file():
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
            elif path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
            elif path.suffix == ".html":
                assert path.read_text().rstrip().endswith("</html>")
        except Exception:
            broken.append(path)
    return broken


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def outcome(folder: Path) -> dict[str, Any]:
    """All that an uninterrupted run would give, bit for bit: figures, uploads, traces, models."""
    from shared import figures

    exact = {
        str(path.relative_to(folder)): path.read_bytes()
        for pattern in ("upload.safetensors", "trace.jsonl", "model.safetensors", "epoch-*.safetensors")
        for path in sorted(folder.rglob(pattern))
    }
    return {"figures": figures(read_result(folder)), "files": exact, "listing": listing(folder)}
