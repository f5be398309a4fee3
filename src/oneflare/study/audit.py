"""Measures what uploads reveal: two attacks by their reader, with and without the privacy switches.

Membership inference: was this image used to train that client? The attacker knows the upload, an image and its label.
Label distribution: how many images of each class has that client? The attacker knows the upload alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.client.observer import Observer
from oneflare.client.statistics import measure, measure_on_lattice, privatise
from oneflare.core.files import write_json
from oneflare.core.noise import SeededWords
from oneflare.core.privacy import Privacy
from oneflare.core.seeds import torch_generator
from oneflare.data import ClientData, Dataset, prepare
from oneflare.errors import RunError
from oneflare.fusion import UploadSet
from oneflare.fusion.trust.probes import probe_images
from oneflare.methods.resolve import given_in_python
from oneflare.models.base import BATCH
from oneflare.nn import PrototypeNetwork, build_feature_map
from oneflare.nn.encoders import both_features
from oneflare.nn.hardware import one_thread
from oneflare.nn.network import filled, signed_root
from oneflare.simulation.features import load_data
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import read_experiment
from oneflare.upload import Contract, Upload, disclose, shrink
from oneflare.upload.evidence import DENSITY, DENSITY_MEANS, WITHIN
from oneflare.upload.statistics import Statistics, pack, unpack
from oneflare.upload.symmetric import unpack_symmetric

FALSE_POSITIVES = 0.01
"""the rate at which true positives are reported"""
EPSILONS = (8.0, 1.0)
"""privacy budgets of noised counts and statistics that the table shows"""
LEAST_MEMBERS = 10
"""clients with fewer images than this say nothing about membership"""


@dataclass(frozen=True)
class MembershipAttack:
    """How well members are told from others. 0.5 and `FALSE_POSITIVES` are no better than guessing."""

    auc: float
    true_positives: float
    """share of members found where one in a hundred others is taken for one"""
    images: int
    """members in the test, as many as others"""


@dataclass(frozen=True)
class Labels:
    """How well class shares are guessed, mean over clients."""

    total_variation: float
    """half the sum over classes of |guessed share - true share|: 0 is exact"""
    guessing: float
    """the same for somebody who guesses that all classes are alike"""
    correlation: float | None
    """between guessed and true shares over all clients and classes; None where it is not defined"""


@dataclass(frozen=True)
class AuditRow:
    """One way to send the same message."""

    switches: str
    used: bool
    """whether the run was made so"""
    membership: MembershipAttack | None = None
    labels: Labels | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Audit:
    folder: Path
    rows: tuple[AuditRow, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"run": str(self.folder), "rows": [row.to_dict() for row in self.rows]}


# ---- the two measures


def membership(members: Tensor, others: Tensor) -> MembershipAttack:
    """From scores that are larger for members. AUC = P(member > other) + P(equal)/2."""
    both = torch.cat([members, others]).double()
    order = both.argsort()
    ranks = torch.empty_like(both)
    ranks[order] = torch.arange(1, len(both) + 1, dtype=torch.float64)
    for value in both.unique():  # ties share their mean rank
        same = both == value
        if int(same.sum()) > 1:
            ranks[same] = ranks[same].mean()
    n, m = len(members), len(others)
    auc = float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))
    allowed = math.floor(FALSE_POSITIVES * m)
    threshold = others.double().sort(descending=True).values[allowed]
    return MembershipAttack(auc, float((members.double() > threshold).double().mean()), n)


def label_error(guessed: Tensor, true: Tensor) -> Labels:
    """guessed, true: `(N, C)`, rows that sum to 1"""
    guessed, true = guessed.double(), true.double()
    uniform = torch.full_like(true, 1 / true.shape[1])
    spread = guessed.std() * true.std()
    correlation = None
    if float(spread) > 0:
        pairs = torch.stack([guessed.flatten(), true.flatten()])
        correlation = float(torch.corrcoef(pairs)[0, 1])
    return Labels(_variation(guessed, true), _variation(uniform, true), correlation)


def _variation(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs().sum(1) / 2).mean())


def shares(counts: Tensor) -> Tensor:
    """`(C,)` counts as shares; nothing at all is taken for uniform."""
    total = counts.double().sum()
    return counts.double() / total if float(total) > 0 else torch.full_like(counts.double(), 1 / len(counts))


# ---- what the attacker looks at


@torch.no_grad()
def network_scores(network: PrototypeNetwork, images: Tensor, labels: Tensor, contract: Contract) -> Tensor:
    """log p(label | image) by the client's own network: high for what it was trained on."""
    network.eval()
    logits = torch.cat([network(prepare(part, contract.image)) for part in images.split(BATCH)]) @ network.prototypes.T
    return -F.cross_entropy(logits, labels, reduction="none")


def statistics_scores(statistics: Statistics, phi: Tensor, labels: Tensor) -> Tensor:
    """Minus the leverage phi^T (G + r I)^-1 phi: an image that is part of G cannot stick out of it. phi: `(n, D)`"""
    del labels
    gram = statistics.gram
    ridge = 1e-3 * float(gram.diagonal().clamp(min=0).mean()) + 1e-12
    values, vectors = torch.linalg.eigh(gram)
    turned = phi.double() @ vectors
    leverage: Tensor = (turned.square() / values.clamp(min=ridge)).sum(1)
    return -leverage


@torch.no_grad()
def density_scores(
    network: PrototypeNetwork, upload: Upload, images: Tensor, labels: Tensor, contract: Contract
) -> Tensor:
    """Minus the squared distance from the class mean, in the covariance that the client measured on its own images.

    An image that was measured cannot lie far out in a direction in which the measured ones hardly vary.
    """
    network.eval()
    part = upload.evidence(DENSITY)
    blocks = [prepare(some, contract.image) for some in images.split(BATCH)]
    features = torch.cat([both_features(network.encoder, block).own for block in blocks])
    apart = signed_root(features).double() - part[DENSITY_MEANS].double()[labels]
    values, vectors = torch.linalg.eigh(unpack_symmetric(part[WITHIN]))
    ridge = 1e-3 * float(values.mean()) + 1e-12
    distance: Tensor = ((apart @ vectors).square() / values.clamp(min=ridge)).sum(1)
    return -distance


@torch.no_grad()
def guess_from_network(network: PrototypeNetwork, contract: Contract) -> Tensor:
    """`(C,)` shares from how a network answers images that show nothing: it leans to what it saw most."""
    network.eval()
    features = network(prepare(probe_images(contract.image), contract.image))
    unit = F.normalize(network.prototypes, dim=1)
    answers: Tensor = (features @ unit.T / SHARPNESS).softmax(1).double().mean(0)
    return answers


SHARPNESS = 0.1
"""temperature of the answers to images that show nothing"""


# ---- the audit


def audit_run(folder: Path, observer: Observer | None = None) -> Audit:
    """Attack the uploads of a finished run as they are, and as they would be under every switch.

    The run's own client images are the members, as many test images of the same classes the others.
    """
    observer = observer or Observer()
    experiment = read_experiment(folder)
    if given_in_python(experiment):
        raise RunError(f"{folder} used arrays or an encoder given in Python; an audit needs data it can read itself")
    files = RunFiles(folder)
    if not files.result.exists():
        raise RunError(f"{folder} is not finished; run the same command again to go on")
    dataset = load_data(experiment)
    federation = Simulation.build(experiment, files, dataset)
    summaries = [files.client(client).read_summary() for client in range(experiment.partition.clients)]
    with one_thread():
        uploads = federation.collect([summary for summary in summaries if summary is not None], observer)
        rows: list[AuditRow] = []
        if federation.contract.deep:
            observer.stage("attacking networks")
            rows += network_rows(federation, uploads, dataset)
        if "density" in uploads.offered:
            observer.stage("attacking densities")
            rows.append(density_row(federation, uploads, dataset))
        if federation.contract.statistics is not None:
            observer.stage("attacking statistics")
            rows += statistics_rows(federation, uploads, dataset)
        else:  # statistics contain the counts
            rows += counts_rows(federation, uploads)
    audit = Audit(folder, tuple(rows))
    write_json(folder / "audit.json", audit.to_dict())
    return audit


def network_rows(federation: Simulation, uploads: UploadSet, dataset: Dataset) -> list[AuditRow]:
    """Networks in every number format that can be made of what was sent."""
    sent = federation.experiment.upload.dtype
    formats = ("float32", "bfloat16", "int8") if sent == "float32" else (sent,)
    rows = []
    for dtype in formats:
        scores: list[tuple[Tensor, Tensor]] = []
        guesses = []
        for upload in uploads:
            network = _network(federation, upload, dtype)
            guesses.append(guess_from_network(network, federation.contract))
            pair = matched(federation.clients.data(upload.client), dataset, federation.experiment.seed, upload.client)
            if pair is not None:
                scores.append(tuple(network_scores(network, *part, federation.contract) for part in pair))  # type: ignore[arg-type]
        true = torch.stack([shares(federation.clients.data(upload.client).counts) for upload in uploads])
        rows.append(
            AuditRow(
                f"weights {dtype}, counts withheld",
                dtype == sent and federation.experiment.upload.counts == "withheld",
                _pooled(scores),
                label_error(torch.stack(guesses), true),
            )
        )
    return rows


def density_row(federation: Simulation, uploads: UploadSet, dataset: Dataset) -> AuditRow:
    """The exact moments by class that the fusion `density_ratio` needs; their counts are sent beside them."""
    scores: list[tuple[Tensor, Tensor]] = []
    for upload in uploads:
        network = _network(federation, upload, federation.experiment.upload.dtype)
        pair = matched(federation.clients.data(upload.client), dataset, federation.experiment.seed, upload.client)
        if pair is not None:
            inside, outside = (density_scores(network, upload, *part, federation.contract) for part in pair)
            scores.append((inside, outside))
    return AuditRow("densities exact", True, _pooled(scores))


def statistics_rows(federation: Simulation, uploads: UploadSet, dataset: Dataset) -> list[AuditRow]:
    """The statistics as they were sent, and with noise of several budgets."""
    plan, contract = federation.contract.statistics, federation.contract
    assert plan is not None
    upload_config = federation.experiment.upload
    used = upload_config.statistics_epsilon
    budgets: list[float | None] = sorted({used, None, *EPSILONS}, key=lambda e: math.inf if e is None else e)
    rows = []
    for epsilon in reversed(budgets):
        privacy = None
        if epsilon is not None:
            privacy = Privacy(epsilon, upload_config.statistics_delta, upload_config.statistics_clip)
        features = build_feature_map(
            plan.feature_map, contract.image.channels, contract.image.size, None if privacy is None else privacy.clip
        )
        scores, guesses, truths = [], [], []
        for upload in uploads:
            data = federation.clients.data(upload.client)
            if epsilon == used:
                statistics = upload.statistics()
            else:
                own = data.images, data.labels, len(contract.classes)
                if privacy is None:
                    statistics = unpack(pack(measure(features, *own), plan.dtype))
                else:
                    words = SeededWords(federation.experiment.seed, upload.client, "audit")
                    statistics = unpack(pack(privatise(measure_on_lattice(features, *own, privacy), privacy, words)))
            guesses.append(shares(statistics.counts))
            truths.append(shares(data.counts))
            pair = matched(data, dataset, federation.experiment.seed, upload.client)
            if pair is not None:
                scores.append(tuple(statistics_scores(statistics, features(images), y) for images, y in pair))
        name = "statistics exact" if epsilon is None else f"statistics epsilon {epsilon:g}"
        rows.append(
            AuditRow(name, epsilon == used, _pooled(scores), label_error(torch.stack(guesses), torch.stack(truths)))  # type: ignore[arg-type]
        )
    return rows


def counts_rows(federation: Simulation, uploads: UploadSet) -> list[AuditRow]:
    """What disclosed counts say."""
    config = federation.experiment.upload
    counts = [federation.clients.data(upload.client).counts for upload in uploads]
    true = torch.stack([shares(count) for count in counts])
    rows = [AuditRow("counts exact", config.counts == "exact", labels=label_error(true, true))]
    budgets = sorted({*EPSILONS, *([config.counts_epsilon] if config.counts == "noised" else [])}, reverse=True)
    for epsilon in budgets:
        told = [
            disclose(count, "noised", epsilon, SeededWords(federation.experiment.seed, upload.client, "audit"))
            for count, upload in zip(counts, uploads, strict=True)
        ]
        guessed = torch.stack([shares(count) for count in told if count is not None])
        used = config.counts == "noised" and epsilon == config.counts_epsilon
        rows.append(AuditRow(f"counts noised, epsilon {epsilon:g}", used, labels=label_error(guessed, true)))
    return rows


def _pooled(scores: Sequence[tuple[Tensor, Tensor]]) -> MembershipAttack | None:
    """One threshold for all clients."""
    if not scores:
        return None
    return membership(torch.cat([member for member, _ in scores]), torch.cat([other for _, other in scores]))


Part = tuple[Tensor, Tensor]


def matched(data: ClientData, dataset: Dataset, seed: int, client: int) -> tuple[Part, Part] | None:
    """As many members as others of every class, so that the class itself gives nothing away; None if too few."""
    generator = torch_generator(seed, client, "audit")
    inside, outside = [], []
    for label in data.labels.unique():
        mine = (data.labels == label).nonzero().flatten()
        theirs = (dataset.test.labels == label).nonzero().flatten()
        number = min(len(mine), len(theirs))
        inside.append(mine[torch.randperm(len(mine), generator=generator)[:number]])
        outside.append(theirs[torch.randperm(len(theirs), generator=generator)[:number]])
    a, b = torch.cat(inside), torch.cat(outside)
    if len(a) < LEAST_MEMBERS:
        return None
    return (data.images[a], data.labels[a]), (dataset.test.images[b], dataset.test.labels[b])


def _network(federation: Simulation, upload: Upload, dtype: str) -> PrototypeNetwork:
    """A client's network as the reader of its upload has it, sent in another format."""
    assert upload.prototypes is not None
    weights = {name: _seen(name, tensor, dtype) for name, tensor in upload.weights().items()}
    return filled(federation.template(), weights, upload.prototypes)


def _seen(name: str, tensor: Tensor, dtype: str) -> Tensor:
    parts: Mapping[str, Tensor] = shrink(name, tensor, dtype)
    first, *scales = parts.values()
    if not tensor.is_floating_point():
        return first
    return first.float() * scales[0].view(-1, *[1] * (tensor.ndim - 1)) if scales else first.float()
