"""Writing the one message of a client: its network, and what else its federation agreed to send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from oneflare.client.calibration import calibrate
from oneflare.client.evidence import measure_evidence
from oneflare.client.job import ClientJob
from oneflare.data import ClientData
from oneflare.nn import PrototypeNetwork
from oneflare.upload import write_upload


@dataclass(frozen=True)
class Attachments:
    """What an upload may hold beside the network."""

    statistics: Mapping[str, Tensor] | None = None
    """packed"""
    held_out: ClientData | None = None
    """kept back from training, to calibrate the network"""


def send(
    path: Path,
    job: ClientJob,
    network: PrototypeNetwork | None,
    data: ClientData,
    epoch: int,
    attachments: Attachments | None = None,
) -> None:
    """Write the client's message, with what its switches let out."""
    attachments = attachments or Attachments()
    upload = job.experiment.upload
    trust = None
    if network is not None and job.experiment.train.holdout > 0:
        trust = 0.0
        if attachments.held_out is not None:
            trust = calibrate(network, data.counts, attachments.held_out, job.contract)
    evidence = None
    if network is not None and upload.evidence:
        evidence = measure_evidence(network, data, job.contract.image, upload.evidence)
    write_upload(
        path,
        network,
        job.contract,
        client=job.client,
        counts=data.counts,
        epoch=epoch,
        words=job.noise("counts"),
        counts_mode=upload.counts,
        counts_epsilon=upload.counts_epsilon,
        dtype=upload.dtype,
        statistics=attachments.statistics,
        trust=trust,
        evidence=evidence,
    )
