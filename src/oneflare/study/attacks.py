"""Attacks by members that send well-formed uploads, and what each fusion makes of them.

An attack is a function from an honest member's network and counts to what it sends instead; the poisoned upload is
written like any other, passes every check, and meets the honest uploads of the same run.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.core.seeds import derive, numpy_generator
from oneflare.data import Dataset
from oneflare.errors import UploadError
from oneflare.fusion import UploadSet
from oneflare.nn import PrototypeNetwork
from oneflare.nn.encoders import Block
from oneflare.nn.hardware import one_thread
from oneflare.nn.network import filled
from oneflare.simulation.features import load_data
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment
from oneflare.study.lies import LIES, claiming_more, rewritten
from oneflare.upload import (
    EVIDENCE,
    STATISTICS,
    Contents,
    Contract,
    Upload,
    read_tensors,
    read_upload,
    write_upload,
)

SCALE = 100.0
INFLATION = 1000
OVERFLOW = 3e4
NOBODY = "nobody"
LABEL_FLIP = "label_flip"
SWAPPED = "swapped_inflated"
"""two classes swapped while training, and every image claimed several times"""

Poison = Callable[[PrototypeNetwork, Tensor, int], tuple[PrototypeNetwork, Tensor]]
"""(network, counts, seed) -> what is sent instead"""


@torch.no_grad()
def sign_flip(network: PrototypeNetwork, counts: Tensor, seed: int) -> tuple[PrototypeNetwork, Tensor]:
    """every weight and every prototype with the opposite sign"""
    del seed
    for parameter in network.parameters():
        parameter.neg_()
    return network, counts


@torch.no_grad()
def scaled(network: PrototypeNetwork, counts: Tensor, seed: int) -> tuple[PrototypeNetwork, Tensor]:
    """prototypes a hundred times too long and in the wrong order, to win every average"""
    del seed
    network.prototypes.copy_(SCALE * network.prototypes.roll(1, 0))
    return network, counts


@torch.no_grad()
def random(network: PrototypeNetwork, counts: Tensor, seed: int) -> tuple[PrototypeNetwork, Tensor]:
    """Gaussian weights and prototypes of the size of the trained ones"""
    generator = torch.Generator().manual_seed(derive(seed, "random attack"))
    for parameter in network.parameters():
        size = parameter.square().mean().sqrt()
        parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return network, counts


@torch.no_grad()
def constant(network: PrototypeNetwork, counts: Tensor, seed: int) -> tuple[PrototypeNetwork, Tensor]:
    """every weight 0.01, every prototype the same"""
    del seed
    for parameter in network.parameters():
        parameter.fill_(0.01)
    network.prototypes.fill_(1.0)
    return network, counts


@torch.no_grad()
def inflated_counts(network: PrototypeNetwork, counts: Tensor, seed: int) -> tuple[PrototypeNetwork, Tensor]:
    """the honest network, but with a claim to a thousand times as many images, of every class"""
    del seed
    return network, torch.full_like(counts, INFLATION * int(counts.sum()))


@torch.no_grad()
def loud_10(network: PrototypeNetwork, counts: Tensor, seed: int) -> tuple[PrototypeNetwork, Tensor]:
    """prototypes in the wrong order, and an encoder whose output is ten times as long, to win every sum of features"""
    del seed
    return _loud(network, 10.0), counts


@torch.no_grad()
def loud_1000(network: PrototypeNetwork, counts: Tensor, seed: int) -> tuple[PrototypeNetwork, Tensor]:
    """the same with an encoder whose output is a thousand times as long"""
    del seed
    return _loud(network, 1000.0), counts


def _loud(network: PrototypeNetwork, factor: float) -> PrototypeNetwork:
    for layer in last_layers(network.encoder):
        for parameter in layer.parameters(recurse=False):
            parameter.mul_(factor)
    network.prototypes.copy_(network.prototypes.roll(1, 0))
    return network


def last_layers(encoder: nn.Module) -> list[nn.Module]:
    """The affine layers whose scale is the scale of the encoder's output.

    A last linear layer; else, as ReLU and pooling keep scales, the last normalisation and the one of the last shortcut.
    """
    affine = [module for module in encoder.modules() if isinstance(module, nn.Linear | nn.BatchNorm2d)]
    if isinstance(affine[-1], nn.Linear):
        return [affine[-1]]
    blocks = [module for module in encoder.modules() if isinstance(module, Block)]
    if not blocks:
        return [affine[-1]]
    shortcut = [module for module in blocks[-1].shortcut.modules() if isinstance(module, nn.BatchNorm2d)]
    return [blocks[-1].norm2, *shortcut]


@torch.no_grad()
def overflowing(network: PrototypeNetwork, counts: Tensor, seed: int) -> tuple[PrototypeNetwork, Tensor]:
    """finite weights so large, and variances so small, that the answers are not finite"""
    del seed
    for parameter in network.encoder.parameters():
        parameter.mul_(OVERFLOW)
    for name, buffer in network.encoder.named_buffers():
        if name.endswith("running_var"):
            buffer.zero_()
    return network, counts


ATTACKS: dict[str, Poison] = {
    attack.__name__: attack
    for attack in (sign_flip, scaled, random, constant, inflated_counts, loud_10, loud_1000, overflowing)
}
KINDS = (LABEL_FLIP, SWAPPED, *ATTACKS, *LIES)


@dataclass(frozen=True)
class Scene:
    """The honest uploads of one run, and those of its attackers."""

    honest: UploadSet
    dataset: Dataset
    contract: Contract
    attackers: tuple[int, ...]
    poisoned: Mapping[str, Mapping[int, Upload | None]]
    """attack -> attacker -> what it sends, or None where the server refuses to read it"""

    def uploads(self, attack: str) -> UploadSet:
        """What the server takes in under this attack."""
        sent = self.poisoned.get(attack, {})
        taken = (sent.get(upload.client, upload) for upload in self.honest.uploads)
        return dataclasses.replace(self.honest, uploads=tuple(upload for upload in taken if upload is not None))

    def refused(self, attack: str) -> list[int]:
        """Attackers whose uploads are turned away at the door."""
        return sorted(client for client, upload in self.poisoned.get(attack, {}).items() if upload is None)

    @property
    def attacks(self) -> tuple[str, ...]:
        """Those that these uploads can be the vehicle of, nobody's first."""
        return (NOBODY, *(attack for attack in KINDS if attack in self.poisoned))

    def without_attackers(self) -> UploadSet:
        """The best a server could do about attackers: know them and leave them out."""
        kept = tuple(upload for upload in self.honest.uploads if upload.client not in self.attackers)
        return dataclasses.replace(self.honest, uploads=kept)


def with_flipped_labels(dataset: Dataset) -> Dataset:
    """y -> C - 1 - y on the images members train on."""
    last = len(dataset.classes) - 1
    return dataclasses.replace(dataset, train=dataset.train._replace(labels=last - dataset.train.labels))


def with_swapped_labels(dataset: Dataset, first: int, second: int) -> Dataset:
    """Two classes exchanged on the images members train on."""
    labels = dataset.train.labels.clone()
    labels[dataset.train.labels == first] = second
    labels[dataset.train.labels == second] = first
    return dataclasses.replace(dataset, train=dataset.train._replace(labels=labels))


def choose_attackers(sizes: Sequence[int], number: int, seed: int) -> tuple[int, ...]:
    """Any members that own something."""
    owners = [client for client, size in enumerate(sizes) if size > 0]
    return tuple(sorted(numpy_generator(seed, "attackers").choice(owners, number, replace=False).tolist()))


def build_scene(experiment: Experiment, folder: Path, attackers: int, observer: Observer | None = None) -> Scene:
    """Train everybody, and the attackers once more on wrong labels; write what attackers send."""
    observer = observer or Observer()
    dataset = load_data(experiment)
    run_experiment(experiment, folder / "honest", dataset=dataset, observer=observer)
    federation = Simulation.build(experiment, RunFiles(folder / "honest"), dataset)
    contract, clients = federation.contract, experiment.partition.clients
    who = choose_attackers(federation.partition.sizes, attackers, experiment.seed)
    with one_thread():
        summaries = [federation.files.client(client).read_summary() for client in range(clients)]
        honest = federation.collect([summary for summary in summaries if summary is not None], observer)
        nothing = np.empty(0, dtype=np.int64)
        honest_rows = enumerate(federation.partition.indices)
        owners = tuple(rows if client in who else nothing for client, rows in honest_rows)
    theirs = {upload.client: upload for upload in honest if upload.client in who}
    largest = sum(counts_of(upload) for upload in theirs.values()).argsort(descending=True)[:2].tolist()  # type: ignore[union-attr]
    wrong = {LABEL_FLIP: with_flipped_labels(dataset), SWAPPED: with_swapped_labels(dataset, *largest)}
    poisoned: dict[str, dict[int, Upload | None]] = {}
    for name, labelled in wrong.items():
        theirs_alone = dataclasses.replace(labelled, owners=owners)
        run_experiment(experiment, folder / name, dataset=theirs_alone, observer=observer)
        paths = {client: RunFiles(folder / name).client(client).upload for client in who}
        if name == SWAPPED:
            paths = {
                client: rewritten(read_upload(path, contract), _place(folder, "claims", client), claiming_more)
                for client, path in paths.items()
            }
        poisoned[name] = {client: _received(path, contract) for client, path in paths.items()}
    for name, attack in ATTACKS.items():
        poisoned[name] = {}
        for client, upload in theirs.items():
            network, counts = attack(network_of(honest, upload), counts_of(upload), experiment.seed + client)
            path = _write_poison(_place(folder, name, client), upload, network, contract, counts)
            poisoned[name][client] = _received(path, contract)
    for name, (needed, lie) in LIES.items():
        able = [upload for upload in theirs.values() if any(n.startswith(needed) for n in upload.entries)]
        if able:
            lies = {upload.client: rewritten(upload, _place(folder, name, upload.client), lie) for upload in able}
            poisoned[name] = {client: _received(path, contract) for client, path in lies.items()}
    return Scene(honest, dataset, contract, who, poisoned)


def _place(folder: Path, attack: str, client: int) -> Path:
    return folder / attack / f"{client:03d}.safetensors"


def _write_poison(path: Path, honest: Upload, network: PrototypeNetwork, contract: Contract, counts: Tensor) -> Path:
    """Another network and other counts in the place of a member's own; what else it sends stays."""
    rest = read_tensors(honest.path, honest.manifest)
    contents = Contents(
        client=honest.client,
        counts=counts,
        epoch=int(honest.manifest["epoch"]),
        statistics={n.removeprefix(STATISTICS): t for n, t in rest.items() if n.startswith(STATISTICS)},
        evidence={n.removeprefix(EVIDENCE): t for n, t in rest.items() if n.startswith(EVIDENCE)},
    )
    write_upload(path, network, contract, contents)
    return path


def _received(path: Path, contract: Contract) -> Upload | None:
    """What the server makes of a file; None if it refuses it."""
    try:
        return read_upload(path, contract)
    except UploadError:
        return None


def network_of(uploads: UploadSet, upload: Upload) -> PrototypeNetwork:
    """What this member trained, to be changed freely."""
    assert upload.prototypes is not None
    return filled(copy.deepcopy(uploads.template), upload.weights(), upload.prototypes)


def counts_of(upload: Upload) -> Tensor:
    assert upload.counts is not None
    return upload.counts.long()
