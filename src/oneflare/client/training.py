"""One client's isolated training, from its own data to one upload.

Nothing is shared while training. Every random draw is named by (seed, client, purpose, epoch), so a client's upload
does not depend on where, when or beside whom it is trained, and training resumes from any epoch bit for bit.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

from oneflare.client.calibration import hold_out
from oneflare.client.files import ClientFiles, ClientSummary, snapshot_epochs
from oneflare.client.job import ClientJob
from oneflare.client.loop import LocalTraining, build_training
from oneflare.client.observer import Observer
from oneflare.client.sending import Attachments, send
from oneflare.client.statistics import client_statistics
from oneflare.core.files import load_state, save_state, write_json, write_text
from oneflare.data import ClientData
from oneflare.errors import TrainingError
from oneflare.nn.hardware import one_thread, precision_name


def train_client(job: ClientJob, data: ClientData, observer: Observer | None = None) -> ClientSummary:
    """Train one client to the end, from its last checkpoint if there is one, and write its files.

    The summary is written last: a client with a summary is complete.
    """
    files, observer = ClientFiles(job.folder), observer or Observer()
    done = files.read_summary()
    if done is not None:
        files.remove_checkpoint()
        return done
    if len(data) == 0:
        summary = ClientSummary(job.client, "empty", 0, 0, "owns no samples")
    else:
        try:
            with one_thread():
                summary = (_train if job.experiment.trains else _measure)(job, data, files, observer)
        except TrainingError as error:
            summary = ClientSummary(job.client, "failed", len(data), data.classes, str(error))
    write_json(files.summary, summary.to_dict())
    files.remove_checkpoint()
    return summary


def _train(job: ClientJob, data: ClientData, files: ClientFiles, observer: Observer) -> ClientSummary:
    kept, held_out = hold_out(data, job.experiment.train.holdout, (job.experiment.seed, job.client))
    training = build_training(job, kept)
    attachments = Attachments(client_statistics(job, data), held_out)
    trace: list[dict[str, float]] = []
    seconds_before = 0.0
    stable = training.stable_lr() if job.experiment.train.check_lr else None
    if files.checkpoint.exists():
        state = load_state(files.checkpoint)
        training.load_state_dict(state["training"])
        trace, seconds_before = state["trace"], state["seconds"]
    config = job.experiment.train
    snapshots = set(snapshot_epochs(config.epochs, config.snapshots, config.tail))
    started = saved = time.monotonic()
    while training.epoch < config.epochs:
        row = training.run_epoch()
        trace.append(row)
        observer.epoch(job.client, training.epoch, row, len(data))
        if training.epoch in snapshots:
            send(files.snapshot(training.epoch), job, training.network, data, training.epoch, attachments)
        now = time.monotonic()
        if training.epoch < config.epochs and now - saved >= config.checkpoint_seconds:
            state = {
                "training": training.state_dict(),
                "trace": trace,
                "seconds": seconds_before + now - started,
            }
            save_state(files.checkpoint, state)
            saved = time.monotonic()
    seconds = seconds_before + time.monotonic() - started
    return replace(finish_client(job, files, training, data, trace, seconds, attachments), stable_lr=stable)


def finish_client(
    job: ClientJob,
    files: ClientFiles,
    training: LocalTraining,
    data: ClientData,
    trace: list[dict[str, float]],
    seconds: float,
    attachments: Attachments | None = None,
) -> ClientSummary:
    """Write trace and upload of a trained client; the summary is left to the caller, because it marks completion."""
    write_text(files.trace, "".join(json.dumps(row) + "\n" for row in trace))
    send(files.upload, job, training.network, data, int(trace[-1]["epoch"]), attachments)
    return ClientSummary(
        client=job.client,
        status="trained",
        samples=len(data),
        classes=data.classes,
        train_seconds=seconds,
        upload_bytes=files.upload.stat().st_size,
        lambda_raw_max=max(row["lambda_raw_max"] for row in trace),
        lambda_effective_final=trace[-1]["lambda_effective"],
        accuracy_own=trace[-1]["accuracy"],
        conflicts=sum(row.get("conflicts", 0.0) for row in trace) / len(trace),
        peak_lr=training.peak_lr,
        precision=precision_name(training.precision),
    )


def _measure(job: ClientJob, data: ClientData, files: ClientFiles, observer: Observer) -> ClientSummary:
    """The upload of a client that trains nothing."""
    started = time.monotonic()
    statistics = client_statistics(job, data, lambda images: observer.measured(job.client, images))
    send(files.upload, job, None, data, 0, Attachments(statistics))
    return ClientSummary(
        client=job.client,
        status="trained",
        samples=len(data),
        classes=data.classes,
        train_seconds=time.monotonic() - started,
        upload_bytes=files.upload.stat().st_size,
    )
