"""A member's side of a federation: makes one upload from the charter and the member's own data.

Training is `client.train_client`, as in a simulation. Nothing but the upload is meant to leave; what resuming needs
lies in a folder beside it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oneflare.client.calibration import hold_out
from oneflare.client.files import ClientFiles, ClientSummary
from oneflare.client.loop import build_training
from oneflare.client.observer import Observer
from oneflare.client.sending import Attachments, send
from oneflare.client.statistics import client_statistics
from oneflare.client.training import train_client
from oneflare.core.config import CodeConfig
from oneflare.core.files import digest_of, exclusive, read_json, remove_partial, tensor_digest, write_bytes, write_json
from oneflare.core.seeds import torch_generator
from oneflare.core.stopping import AGAIN, NOTHING, on_stop
from oneflare.data import Augmentation, ClientData, Split
from oneflare.data.images import Damaged
from oneflare.data.labelled import Inventory, left_out_note
from oneflare.data.local import LocalData, read_local
from oneflare.data.reading import Reader
from oneflare.data.tables import Columns
from oneflare.errors import RunError, TrainingError, UploadError
from oneflare.federation.charter import Charter
from oneflare.federation.identity import in_future, moment_of, now
from oneflare.federation.ledger import Balance, Ledger, Question, ledger_folder
from oneflare.federation.masked.uploading import Masking, masked_copy
from oneflare.nn.hardware import choose_device, one_thread
from oneflare.simulation.features import FeatureReader, Rehearsal, reader_of
from oneflare.upload import read_manifest, seal_upload
from oneflare.upload.blocks import joined
from oneflare.upload.contract import statistics_bytes
from oneflare.upload.encryption import SUFFIX, encrypt
from oneflare.upload.masking.fixed_point import FIXED, vector_size
from oneflare.upload.signing import SigningKey
from oneflare.upload.statistics import SCATTER, SUMS, Plan, Statistics, pack

TIMED_STEPS = 6
TIMED_IMAGES = 128


class MemberData(NamedTuple):
    """A member's images, and what their reader did to them."""

    data: ClientData
    notes: tuple[str, ...]
    """what had to be done to make them fit, for the member alone"""
    damaged: tuple[Damaged, ...]
    """images that were left out"""
    found: Inventory
    """files by kind, sizes and patients, for the member alone"""
    feature_seconds: float = 0.0
    """what computing a backbone's features would take; they were not computed then, and the images are only checked"""


def member_data(
    charter: Charter,
    path: Path,
    *,
    columns: Columns | None = None,
    skip_damaged: bool = False,
    reader: Reader | None = None,
) -> MemberData:
    """A member's images, or the features of the federation's backbone, checked against the charter."""
    reader = reader or charter_reader(charter)
    local: LocalData = read_local(
        path, charter.classes, charter.inputs, columns=columns, skip_damaged=skip_damaged, reader=reader
    )
    patients, notes = local.found.patients, local.notes
    if patients is not None:
        notes = (f"the images belong to {patients} patients; a patient's images are held out together", *notes)
    seconds = reader.seconds if isinstance(reader, Rehearsal) else 0.0
    data = ClientData.of(local.split, len(charter.classes))
    return MemberData(data, notes, local.damaged, local.found, seconds)


def charter_reader(charter: Charter, observer: Observer | None = None, *, rehearse: bool = False) -> Reader:
    """How images are read under the charter; to rehearse: images are checked, and features only timed."""
    kind = Rehearsal if rehearse else FeatureReader
    return reader_of(charter.inputs, choose_device(charter.terms.train.device).type, observer, kind)


def upload_notes(charter: Charter, found: MemberData) -> tuple[str, ...]:
    """What the coordinator is told of images that were left out: no names, and no number where counts are withheld."""
    if not found.damaged:
        return ()
    exact = charter.terms.upload.counts == "exact"
    return (left_out_note(len(found.damaged), len(found.damaged) + len(found.data) if exact else None),)


def train_member(
    charter: Charter, data: ClientData, member: str, folder: Path, observer: Observer | None = None
) -> ClientSummary:
    """Train one member in `folder`, from its last checkpoint if there is one; its upload is unsigned.

    The folder belongs to one member, one charter and one set of images.
    """
    with exclusive(folder):
        remove_partial(folder)
        claim = folder / "job.json"
        code = charter.terms.code
        job = {"federation": charter.fingerprint, "member": member, "data": _digest(data), "code": code.model_dump()}
        if claim.exists():
            old = read_json(claim)
            changed = [key for key in ("federation", "member", "data") if old.get(key) != job[key]]
            changed += code.differences(CodeConfig.recorded(old.get("code")))
            if changed:
                raise RunError(
                    f"{folder} holds training with another {' and '.join(changed)}; "
                    "delete the folder or choose another --out"
                )
        write_json(claim, job)
        with on_stop(lambda: f"a checkpoint is there; {AGAIN}" if ClientFiles(folder).checkpoint.exists() else NOTHING):
            summary = train_client(charter.job(member, folder), data, observer)
        if summary.status != "trained":
            ClientFiles(folder).summary.unlink()  # so that another attempt is possible
            raise TrainingError(f"{member} could not be trained: {summary.reason}")
    return summary


def claimed_member(folder: Path) -> str | None:
    """Whose training a folder holds."""
    claim = folder / "job.json"
    return str(read_json(claim).get("member")) if claim.exists() else None


def _digest(data: ClientData) -> str:
    whose = [] if data.patients is None else [tensor_digest(data.patients)]
    return digest_of([tensor_digest(data.images), tensor_digest(data.labels), *whose])


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
    balance: Balance | None = None
    """what is spent of the member's privacy budget, where the terms promise privacy"""


@dataclass(frozen=True)
class Envelope:
    """What an upload says beside its content: who sends it, signed with which key, and what they remark."""

    member: str
    key: SigningKey | None
    notes: tuple[str, ...] = ()
    """what the coordinator should know of the data"""
    masking: Masking | None = None
    """with which key sums are masked, where the terms say that they are"""

    def seal(self, source: Path, path: Path) -> dict[str, Any]:
        """Write the upload of `source` to `path` under this envelope; returns its manifest."""
        sign = None if self.key is None else signer(self.key)
        return seal_upload(source, path, member=self.member, created=now(), sign=sign, notes=self.notes)


def make_upload(
    charter: Charter,
    data: ClientData,
    out: Path,
    *,
    member: str,
    key: SigningKey | None = None,
    observer: Observer | None = None,
    ledger: Ledger | None = None,
) -> Made:
    """Train if needed, then write the one file, under the member's name and signed if a key is given."""
    return make_upload_in(Envelope(member, key), charter, data, out, observer=observer, ledger=ledger)


def make_upload_in(
    envelope: Envelope,
    charter: Charter,
    data: ClientData,
    out: Path,
    *,
    observer: Observer | None = None,
    ledger: Ledger | None = None,
) -> Made:
    """Train if needed, then write the one file to `out`, with what the envelope says.

    Under private terms the ledger (by default, that of the member's home) decides: an earlier answer to the same
    question is given again, and a new answer is refused where the budget is spent.
    """
    member, key, notes = envelope.member, envelope.key, envelope.notes
    question = Question.of(charter, member, data)
    if question is not None:
        return _answer(charter, data, out, question, ledger or Ledger(ledger_folder(None)), envelope, observer)
    folder = work_folder(out)
    summary = train_member(charter, data, member, folder, observer)
    trained = ClientFiles(folder).upload
    if charter.terms.upload.masked is not None:
        trained = masked_copy(charter, trained, member, envelope.masking)
    if out.exists():
        manifest = _same_upload(trained, out, member, key)
        if manifest is not None and tuple(manifest.get("notes", ())) == notes:
            return Made(out, manifest, summary, complete_before=True)
    return Made(out, envelope.seal(trained, out), summary, complete_before=False)


def _answer(
    charter: Charter,
    data: ClientData,
    out: Path,
    question: Question,
    ledger: Ledger,
    envelope: Envelope,
    observer: Observer | None,
) -> Made:
    """An upload under private terms: entered into the ledger before it is written to `out`."""
    member, key = envelope.member, envelope.key
    with ledger.locked():
        kept = ledger.find(question, out)
    summary = ClientSummary(charter.client(member), "trained", len(data), data.classes)
    complete = kept is not None
    if kept is None:
        folder = work_folder(out)
        summary = train_member(charter, data, member, folder, observer)

        def write(path: Path) -> dict[str, Any]:
            return envelope.seal(ClientFiles(folder).upload, path)

        kept = ledger.record(question, write, out)
    manifest = read_manifest(kept)
    signed = (manifest.get("signature") or {}).get("key")
    if kept != out and (manifest.get("member"), signed) == (member, None if key is None else key.public):
        write_bytes(out, kept.read_bytes())
    elif kept != out:
        manifest = envelope.seal(kept, out)
    return Made(out, manifest, summary, complete, ledger.balance(question))


def encrypted_for(charter: Charter, upload: Path) -> Path:
    """The file to send: the upload, or a file beside it that only the coordinator can read, if the charter asks so."""
    if charter.encryption is None:
        return upload
    target = upload.with_name(upload.name + SUFFIX)
    encrypt(upload, target, charter.encryption)
    return target


def _same_upload(trained: Path, out: Path, member: str, key: SigningKey | None) -> dict[str, Any] | None:
    """The manifest of `out` if it is this training's upload, by this member, signed with this key, not dated ahead."""
    try:
        manifest, source = read_manifest(out), read_manifest(trained)
    except UploadError:
        return None
    signed = manifest.get("signature") or {}
    same = manifest["tensors"] == source["tensors"] and manifest.get("member") == member
    made = moment_of(manifest.get("created"))
    same = same and made is not None and not in_future(made)
    return manifest if same and signed.get("key") == (None if key is None else key.public) else None


def signer(key: SigningKey) -> Any:
    """What `seal_upload` calls: digest -> the manifest's signature."""
    return lambda digest: {"key": key.public, "value": key.sign(digest)}


@dataclass(frozen=True)
class Estimate:
    """What training here would take."""

    seconds: float
    upload_bytes: int


def estimate(charter: Charter, data: ClientData) -> Estimate:
    """Time a few steps on the member's own images; nothing is kept."""
    terms, seconds = charter.terms, 0.0
    job = charter.job("estimate", Path())
    with one_thread():
        if charter.contract.statistics is not None:
            some = ClientData.of(Split(data.images[:TIMED_IMAGES], data.labels[:TIMED_IMAGES]), len(charter.classes))
            seconds += _seconds(lambda: client_statistics(job, some)) * len(data) / len(some)
        if terms.trains:
            kept, _ = hold_out(data, terms.train.holdout, (terms.seed, job.client))
            training = build_training(job, kept)
            training.network.train()
            size = -(-len(kept) // training.batches)

            def step() -> None:
                draws = Augmentation.draw(size, torch_generator(0, "estimate"))
                training.step(*training.views(torch.arange(size), draws), 0.0)

            step()
            seconds += statistics.median(_seconds(step) for _ in range(TIMED_STEPS)) * training.total_steps
    return Estimate(seconds, upload_size(charter))


def _empty(dim: int, classes: int, plan: Plan) -> dict[str, Tensor]:
    """Packed statistics of no images, of a block of so many features; in code they are as long as planned."""
    packed = pack(Statistics.zeros(dim, classes), plan.dtype)
    if plan.coded:
        room = statistics_bytes(dim, classes, plan.dtype)
        packed[SCATTER] = torch.zeros((room - 4 * packed[SUMS].numel()) // 8, dtype=torch.int64)
    return packed


def upload_size(charter: Charter) -> int:
    """Bytes of any member's upload, by writing an untrained one; names and signature add a few hundred."""
    contract, classes = charter.contract, len(charter.classes)
    packed = None
    if contract.fixed is not None:
        dim = 0 if contract.statistics is None else contract.statistics.dim
        packed = {FIXED: torch.zeros(vector_size(classes, dim), dtype=torch.int64)}
    elif contract.statistics is not None:
        packed = joined([_empty(size, classes, contract.statistics) for size in contract.statistics.blocks])
    nothing = Split(torch.empty(0, 1, 1, 1), torch.empty(0, dtype=torch.long))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "upload.safetensors"
        network = charter.template() if charter.terms.trains else None
        send(path, charter.job("size", Path(folder)), network, ClientData.of(nothing, classes), 1, Attachments(packed))
        return path.stat().st_size


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
