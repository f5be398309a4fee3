"""Pieces that tests of several rooms share: the command line as a process, small settings, forged uploads, an
observer that listens."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import runpy
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save

from oneflare.client.observer import Observer, Relay
from oneflare.core.files import digest_of, tensor_digest
from oneflare.methods import METHODS
from oneflare.upload import MANIFEST

COMMAND = [str(Path(sys.executable).parent / "oneflare")]


TINY_WORDS = [
    "data.train_size=200", "data.test_size=60", "clients=3", "alpha=0.3", "encoder=conv4", "encoder.width=4",
    "epochs=2", "train.batch_size=32", "train.snapshots=1",
]  # fmt: skip


def oneflare(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """The installed command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *words], cwd=cwd, capture_output=True, text=True, timeout=300, env=os.environ | environment
    )


class Forked:
    """The command in a process of its own that begins as a copy of this one.

    It is spared the seconds in which a new process imports torch; what it registers, sets and prints stays its own.
    """

    def __init__(self, *words: str, cwd: Path, **environment: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.streams = [Path(self.folder.name, name) for name in ("out", "err")]
        self.process = mp.get_context("fork").Process(target=self._enter, args=[words, cwd, environment])
        self.process.start()

    def _enter(self, words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        os.setsid()
        os.chdir(cwd)
        os.environ.update(environment)
        sys.stdout, sys.stderr = (path.open("w") for path in self.streams)
        self.work(words)

    def work(self, words: Sequence[str]) -> None:
        from oneflare.cli import main, manners

        sys.argv = ["oneflare", *words]
        manners._quiet = False
        main.main()

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill_with_children(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)

    def wait(self) -> subprocess.CompletedProcess:
        """What it has printed, once it has ended; one that takes minutes is killed."""
        self.process.join(300)
        self.process.kill()
        self.process.join()
        with self.folder:
            return subprocess.CompletedProcess([], self.process.exitcode, *(path.read_text() for path in self.streams))


class ForkedScript(Forked):
    """A Python script, the first of the words, in such a process; its temporary files are made in `cwd`."""

    def work(self, words: Sequence[str]) -> None:
        tempfile.tempdir = str(Path.cwd())
        warnings.resetwarnings()
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def forked(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """What the command answers in a process that begins as a copy of this one."""
    return Forked(*words, cwd=cwd, **environment).wait()


def hearing(lines: list[str]) -> Observer:
    """An observer that adds every remark and warning to some lines."""
    return Relay(lambda event, words: lines.append(words[0]) if event in ("note", "warn") else None)


def wait_for(condition, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def figures(result) -> dict:
    """Everything but the time and memory it took."""
    content = json.loads(json.dumps(result.to_dict()))
    content.pop("cost")
    for row in content["fusions"].values():
        row.pop("fuse_seconds")
    for row in content["clients"]:
        row.pop("train_seconds")
    return content


def parts(path):
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def forge(path, tensors=None, resign=True, **changes):
    """A well-formed file with other content, its digests made right again."""
    header, _ = parts(path)
    manifest = json.loads(header["__metadata__"][MANIFEST]) | changes
    content = {name: t.clone() for name, t in load_all(path).items()}
    content.update(tensors or {})
    content = {name: t for name, t in content.items() if t is not None}
    if resign:
        manifest["tensors"] = {name: tensor_digest(t) for name, t in sorted(content.items())}
        manifest.pop("digest")
        manifest["digest"] = digest_of(manifest)
    path.write_bytes(save(content, metadata={MANIFEST: json.dumps(manifest)}))


def load_all(path):
    from safetensors.torch import load_file

    return load_file(path)


SHORT = {
    name: {"name": name, "teacher": "count_prototypes", **budget}
    for name, budget in {
        "distill_public": {"steps": 6},
        "distill_datafree": {"rounds": 3, "generator_steps": 2, "student_steps": 2},
        "coboosting": {"rounds": 3, "generator_steps": 2, "student_steps": 2},
    }.items()
}


def small_map(method: str, filters: int) -> dict[str, Any]:
    """A layer by which a method that measures statistics does so on few features; nothing for others."""
    features = METHODS[method].recipe.get("analytic")
    if not features:
        return {}
    small = {"name": "random_conv", "filters": filters}
    if features["name"] == "random_features":
        small = {"name": "random_features", "of": small, "dim": 40}
    elif features["name"] != "random_conv":
        small = {**features, "of": small}
    return {"analytic": small}
