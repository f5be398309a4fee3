"""Sends a network that another run has trained already, instead of training it once more.

Experiments that differ only in what is sent or shown beside the networks (evidence, statistics, snapshots) train the
same networks, because every random draw is named by seed, client, purpose and epoch. The files that this module writes
are those that training would have given.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from oneflare.client.files import ClientFiles, ClientSummary, snapshot_epochs
from oneflare.client.job import ClientJob
from oneflare.client.sending import Attachments, send
from oneflare.client.start import shared_start
from oneflare.client.statistics import client_statistics
from oneflare.core.config import Experiment, UploadConfig
from oneflare.core.files import write_json, write_text
from oneflare.data import ClientData
from oneflare.nn import PrototypeNetwork
from oneflare.nn.hardware import choose_device, one_thread
from oneflare.nn.network import filled
from oneflare.upload import Contract, read_upload


def networks_digest(experiment: Experiment) -> str:
    """Identifies what the trained networks depend on: not what is sent or shown beside them."""
    train = experiment.train.model_copy(update={"snapshots": 0, "tail": None})
    beside = {"method": "", "analytic": {"name": "none"}, "upload": UploadConfig(), "train": train}
    return experiment.model_copy(update=beside).training_digest()


def can_lend(lender: Experiment, borrower: Experiment) -> bool:
    """Whether the uploads and snapshots of one experiment hold every network, bit for bit, that the other trains."""
    if lender.upload.dtype != "float32" or lender.objective.open_set or lender.train.holdout:
        return False
    theirs, ours = set(snapshots_of(lender)), set(snapshots_of(borrower))
    return borrower.trains and networks_digest(lender) == networks_digest(borrower) and ours <= theirs


def snapshots_of(experiment: Experiment) -> list[int]:
    """Epochs after which fusion is simulated."""
    return snapshot_epochs(experiment.epochs, experiment.train.snapshots, experiment.train.tail)


def borrow(job: ClientJob, data: ClientData, lender: ClientFiles, contract: Contract) -> ClientSummary | None:
    """Write the client's files with the networks of the lender's; None where there is nothing to borrow.

    contract: that of the lender's run, by which its uploads are verified
    """
    files, trained = ClientFiles(job.folder), lender.read_summary()
    if files.summary.exists() or trained is None or trained.status != "trained":
        return None
    epochs, snapshots = job.experiment.epochs, snapshots_of(job.experiment)
    if not all(path.exists() for path in (lender.upload, *map(lender.snapshot, snapshots))):
        return None
    with one_thread():
        attachments = Attachments(client_statistics(job, data))
        for epoch in snapshots:
            send(files.snapshot(epoch), job, _network(job, lender.snapshot(epoch), contract), data, epoch, attachments)
        send(files.upload, job, _network(job, lender.upload, contract), data, epochs, attachments)
    write_text(files.trace, lender.trace.read_text())
    summary = replace(trained, upload_bytes=files.upload.stat().st_size)
    write_json(files.summary, summary.to_dict())
    return summary


def _network(job: ClientJob, path: Path, contract: Contract) -> PrototypeNetwork:
    """The trained network of an upload, laid out in memory as training lays it out."""
    upload = read_upload(path, contract)
    assert upload.prototypes is not None  # a summary says `trained`, and the experiment trains networks
    network = filled(shared_start(job.experiment, job.contract), upload.weights(), upload.prototypes)
    device = choose_device(job.experiment.train.device)
    return network.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload, no-any-return]
