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
from oneflare.errors import TrainingError
from oneflare.nn import PrototypeNetwork
from oneflare.upload import Contents, SentForm, write_upload


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
    """Write the client's message, with what its switches let out; the network may be trained on afterwards."""
    attachments = attachments or Attachments()
    upload = job.experiment.upload
    trust, evidence = None, None
    if network is not None:
        mode = network.training
        if job.experiment.train.holdout > 0:
            held_out = attachments.held_out
            trust = 0.0 if held_out is None else calibrate(network, data.counts, held_out, job.contract)
        if upload.evidence:
            evidence = measure_evidence(network, data, job.contract.image, upload.evidence)
        network.train(mode)
    contents = Contents(
        client=job.client,
        counts=data.counts,
        epoch=epoch,
        statistics=attachments.statistics,
        trust=trust,
        evidence=evidence,
    )
    form = SentForm(dtype=upload.dtype, counts=upload.counts, epsilon=upload.counts_epsilon, words=job.noise("counts"))
    write_upload(path, network, job.contract, contents, form)
    check_limit(path, upload.limit)


def check_limit(path: Path, limit: int | None) -> None:
    """Nothing leaves that is larger than agreed: a file beyond the limit is removed."""
    size = path.stat().st_size
    if limit is not None and size > limit:
        path.unlink()
        raise TrainingError(
            f"{path}: the finished upload has {size:,} bytes, more than upload.limit={limit}; ask for terms with a "
            "larger limit or fewer analytic.filters"
        )
