"""`engine=flower`: runs every client of an experiment as a virtual node of Flower's simulation.

The files of the run folder are those of the local engine. A client trains in a folder of its own node and sends its
files in one message; the server writes them into the run folder. A run that is interrupted goes on where its nodes
were, because their folders stay until all clients are done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from oneflare.client.files import ClientFiles, ClientSummary
from oneflare.client.job import ClientJob
from oneflare.client.observer import Observer, announce_client
from oneflare.client.training import train_client
from oneflare.core.files import write_bytes, write_json
from oneflare.data import ClientData, Split
from oneflare.errors import RunError, UploadError
from oneflare.nn.given import GIVEN, take_over
from oneflare.simulation.engines.flower.gather import Terms, gather
from oneflare.simulation.engines.flower.records import answer, question, read_answer, read_question
from oneflare.simulation.engines.local import run_apart
from oneflare.simulation.files import SCRATCH

DATA = "data.safetensors"
NO_LIMIT = 14 * 86_400.0
"""seconds: clients of a simulation wait for each other, so only the user knows what is too long"""

Launch = Callable[[ServerApp, ClientApp, int], None]
"""runs both apps with so many nodes until the server app ends"""


def train_on_flower(
    jobs: Sequence[ClientJob],
    train: Split,
    parts: Sequence[np.ndarray[Any, Any]],
    folder: Path,
    *,
    observer: Observer,
    workers: int,
    gpu: bool,
) -> list[ClientSummary]:
    """The whole simulation in one child process: Ray's threads and signal handlers end with it, however it ends."""
    launch = partial(launch_on_ray, workers, gpu)
    return run_apart(partial(train_simulated, jobs, train, parts, folder, launch), observer)


def train_simulated(
    jobs: Sequence[ClientJob],
    train: Split,
    parts: Sequence[np.ndarray[Any, Any]],
    folder: Path,
    launch: Launch,
    observer: Observer,
) -> list[ClientSummary]:
    """Train every client on a node of its own; those that are complete are not asked again.

    parts: rows of `train` by client. A client whose node fails is reported as failed, and tried again by a rerun.
    """
    summaries: dict[int, ClientSummary] = {}
    for job in jobs:
        done = ClientFiles(job.folder).read_summary()
        if done is not None:
            summaries[job.client] = done
            announce_client(done, job.experiment.epochs, observer)
    pending = [job for job in jobs if job.client not in summaries]
    if pending:
        scratch = folder / SCRATCH
        _write_data(scratch / DATA, train, parts)
        server = _Server(pending, observer)
        nodes = node_app([replace(job, folder=scratch / f"{job.client:03d}") for job in pending])
        try:
            launch(server.app(), nodes, len(pending))
        finally:
            server.stop.set()
        for job in pending:
            summary = server.summaries.get(job.client)
            if summary is None:
                rows = parts[job.client]
                reason = server.reasons.get(job.client, "its node never answered")
                summary = ClientSummary(job.client, "failed", len(rows), len(train.labels[rows].unique()), reason)
                announce_client(summary, job.experiment.epochs, observer)
            summaries[job.client] = summary
        if not server.reasons:
            shutil.rmtree(scratch, ignore_errors=True)
    return [summaries[job.client] for job in jobs]


class _Server:
    """Gives every node one client, and writes what comes back into the run folder."""

    def __init__(self, jobs: Sequence[ClientJob], observer: Observer) -> None:
        self.jobs = {job.client: job for job in jobs}
        self.free = [job.client for job in jobs]
        self.given: dict[int, int] = {}
        self.observer = observer
        self.summaries: dict[int, ClientSummary] = {}
        self.reasons: dict[int, str] = {}
        self.stop = threading.Event()

    def app(self) -> ServerApp:
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            del context
            outcome = gather(grid, self.ask, self.accept, Terms(len(self.jobs), 60, NO_LIMIT), stopped=self.stop.is_set)
            self.reasons = {self.given[node]: reason for node, reason in outcome.left_out.items()}

        return app

    def ask(self, node: int) -> RecordDict | None:
        if not self.free:
            return None
        self.given[node] = self.free.pop(0)
        return question({"client": self.given[node]})

    def accept(self, node: int, content: RecordDict) -> None:
        facts, files = read_answer(content)
        try:
            summary = ClientSummary(**facts)
        except TypeError:
            raise UploadError("the reply's facts are not those of a client") from None
        if summary.client != self.given[node]:
            raise UploadError(f"the reply is of client {summary.client}, asked was {self.given[node]}")
        target = ClientFiles(self.jobs[summary.client].folder)
        for name, content_bytes in files.items():
            write_bytes(target.folder / name, content_bytes)
        write_json(target.summary, summary.to_dict())
        self.summaries[summary.client] = summary
        announce_client(summary, self.jobs[summary.client].experiment.epochs, self.observer)


def node_app(jobs: Sequence[ClientJob]) -> ClientApp:
    """The client side; a job's folder is the node's own."""
    by_client, modules = {job.client: job for job in jobs}, dict(GIVEN)
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        del context
        take_over(modules)  # a worker of Ray starts without the user's own networks
        job = by_client[int(read_question(message.content)["client"])]
        data = _read_data(job.folder.parent / DATA, job.client, len(job.contract.classes))
        summary = train_client(job, data)
        return Message(answer(summary.to_dict(), _files_of(job.folder)), reply_to=message)

    return app


def _files_of(folder: Path) -> dict[str, bytes]:
    files = ClientFiles(folder)
    paths = [files.upload, files.trace, *sorted(folder.glob("snapshots/*.safetensors"))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.exists()}


def _write_data(path: Path, train: Split, parts: Sequence[np.ndarray[Any, Any]]) -> None:
    """All images once, in a file that nodes map into memory, so that no message carries them."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {f"rows.{client}": torch.as_tensor(part, dtype=torch.int64) for client, part in enumerate(parts)}
    whose = {} if train.patients is None else {"patients": train.patients.contiguous()}
    save_file({"images": train.images.contiguous(), "labels": train.labels.contiguous(), **whose, **rows}, path)


def _read_data(path: Path, client: int, classes: int) -> ClientData:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        rows = file.get_tensor(f"rows.{client}")
        whose = file.get_tensor("patients")[rows] if "patients" in file.keys() else None  # noqa: SIM118
        split = Split(file.get_tensor("images")[rows], file.get_tensor("labels")[rows], whose)
    return ClientData.of(split, classes)


def launch_on_ray(workers: int, gpu: bool, server: ServerApp, client: ClientApp, nodes: int) -> None:
    """Flower's simulation with one processor core per client."""
    from flwr.simulation import run_simulation

    with _quiet_logs():
        _start_ray(workers)
        try:
            resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 1.0 if gpu else 0.0}}
            run_simulation(server, client, nodes, backend_config=resources)
        except RuntimeError as error:
            reason = error.__cause__ or error
            raise RunError(f"Flower's simulation ended early ({reason}); run again to go on") from None


def _start_ray(workers: int) -> None:
    """A cluster of this machine alone, whatever RAY_ADDRESS says, whose workers find the modules this process finds."""
    import ray

    before = signal.getsignal(signal.SIGTERM)
    ray.init(
        address="local",
        num_cpus=workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}},
    )
    signal.signal(signal.SIGTERM, before)  # Ray's own handler prints a page and aborts


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
