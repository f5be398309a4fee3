"""A member's side of a real federation: its own data and the charter in, one upload out.

Training is `client.train_client`, as in a simulation. Nothing but the upload is meant to leave; what resuming needs
lies in a folder beside it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from oneflare.charter import Charter
from oneflare.client import (
    ClientFiles,
    ClientSummary,
    Companions,
    EpochObserver,
    build_training,
    client_statistics,
    hold_out,
    send,
    train_client,
)
from oneflare.data import Augmentation, ClientData, Split
from oneflare.data.local import LocalData, read_local
from oneflare.errors import RunError, TrainingError, UploadError
from oneflare.files import digest_of, exclusive, read_json, remove_partial, tensor_digest, write_json
from oneflare.nn.hardware import one_thread
from oneflare.seeds import torch_generator
from oneflare.signing import SigningKey
from oneflare.upload import read_manifest, seal_upload

TIMED_STEPS = 6
TIMED_IMAGES = 128


def member_data(
    charter: Charter, path: Path, *, image_column: str | None = None, label_column: str | None = None
) -> tuple[ClientData, tuple[str, ...]]:
    """A member's images, checked against the charter, and what had to be done to make them fit."""
    local: LocalData = read_local(
        path, charter.classes, charter.image.spec(), image_column=image_column, label_column=label_column
    )
    return ClientData.of(local.split, len(charter.classes)), local.notes


def train_member(
    charter: Charter, data: ClientData, member: str, folder: Path, observe: EpochObserver | None = None
) -> ClientSummary:
    """Train one member in `folder`, from its last checkpoint if there is one; its upload is unsigned.

    The folder belongs to one member, one charter and one set of images.
    """
    with exclusive(folder):
        remove_partial(folder)
        claim = folder / "job.json"
        job = {"federation": charter.fingerprint, "member": member, "data": _digest(data)}
        if claim.exists():
            old = read_json(claim)
            changed = [key for key, value in job.items() if old.get(key) != value]
            if changed:
                raise RunError(
                    f"{folder} holds training with another {' and '.join(changed)}; "
                    "delete the folder or choose another --out"
                )
        write_json(claim, job)
        summary = train_client(charter.job(member, folder), data, observe)
        if summary.status != "trained":
            ClientFiles(folder).summary.unlink()  # so that another attempt is possible
            raise TrainingError(f"{member} could not be trained: {summary.reason}")
    return summary


def claimed_member(folder: Path) -> str | None:
    """Whose training a folder holds."""
    claim = folder / "job.json"
    return str(read_json(claim).get("member")) if claim.exists() else None


def _digest(data: ClientData) -> str:
    return digest_of([tensor_digest(data.images), tensor_digest(data.labels)])


def work_folder(out: Path) -> Path:
    """Where the training behind an upload lives."""
    return out.with_suffix(".work")


@dataclass(frozen=True)
class Made:
    """An upload that is ready to be sent."""

    path: Path
    manifest: dict[str, Any]
    summary: ClientSummary
    complete_before: bool


def make_upload(
    charter: Charter,
    data: ClientData,
    out: Path,
    *,
    member: str,
    key: SigningKey | None = None,
    observe: EpochObserver | None = None,
) -> Made:
    """Train if needed, then write the one file, under the member's name and signed if a key is given."""
    folder = work_folder(out)
    summary = train_member(charter, data, member, folder, observe)
    trained = ClientFiles(folder).upload
    if out.exists():
        manifest = _same_upload(trained, out, member, key)
        if manifest is not None:
            return Made(out, manifest, summary, complete_before=True)
    manifest = seal_upload(trained, out, member=member, created=now(), sign=None if key is None else signer(key))
    return Made(out, manifest, summary, complete_before=False)


def _same_upload(trained: Path, out: Path, member: str, key: SigningKey | None) -> dict[str, Any] | None:
    """The manifest of `out` if it is this training's upload, by this member, signed with this key."""
    try:
        manifest, source = read_manifest(out), read_manifest(trained)
    except UploadError:
        return None
    signed = manifest.get("signature") or {}
    same = manifest["tensors"] == source["tensors"] and manifest.get("member") == member
    return manifest if same and signed.get("key") == (None if key is None else key.public) else None


def signer(key: SigningKey) -> Any:
    """What `seal_upload` calls: digest -> the manifest's signature."""
    return lambda digest: {"key": key.public, "value": key.sign(digest)}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


@dataclass(frozen=True)
class Estimate:
    """What training here would take."""

    seconds: float
    upload_bytes: int


def estimate(charter: Charter, data: ClientData) -> Estimate:
    """Time a few steps and write an upload of the untrained network: nothing is kept."""
    terms = charter.terms
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        job = charter.job("estimate", Path(folder))
        seconds, network, packed = 0.0, None, None
        if charter.contract.statistics is not None:
            rows = slice(0, TIMED_IMAGES)
            some = ClientData.of(Split(data.images[rows], data.labels[rows]), len(charter.classes))
            started = time.perf_counter()
            packed = client_statistics(job, some)
            seconds += (time.perf_counter() - started) * len(data) / len(some)
        if terms.trains:
            kept, _ = hold_out(data, terms.train.holdout, (terms.seed, job.client))
            training = build_training(job, kept)
            size = min(len(kept), -(-len(kept) // training.batches))
            training.network.train()
            timed = []
            for step in range(TIMED_STEPS):
                started = time.perf_counter()
                draws = Augmentation.draw(size, torch_generator(0, "estimate", step))
                training.step(*training.views(torch.arange(size), draws), 0.0)
                timed.append(time.perf_counter() - started)
            seconds += statistics.median(timed[1:]) * training.total_steps
            network = training.network
        path = Path(folder) / "upload.safetensors"
        send(path, job, network, data, max(1, terms.epochs), Companions(packed))
        return Estimate(seconds, path.stat().st_size)
