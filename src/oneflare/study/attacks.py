"""Members that mean harm and send well-formed uploads: what each fusion makes of them.

An attack is a function from an honest member's network and counts to what it sends instead; the poisoned upload is
written like any other, passes every check, and meets the honest uploads of the same run.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oneflare.config import Experiment
from oneflare.data import Dataset, load
from oneflare.federation import Federation, Observer, RunFiles
from oneflare.files import write_json
from oneflare.fusion import UploadSet, build_fusion, logits_of_all
from oneflare.nn import PrototypeNetwork, initial_network
from oneflare.nn.hardware import one_thread
from oneflare.seeds import derive, numpy_generator
from oneflare.stages import run_experiment
from oneflare.upload import Contract, Upload, read_upload, write_upload

SCALE = 100.0
INFLATION = 1000
NOBODY = "nobody"
LABEL_FLIP = "label_flip"

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


ATTACKS: dict[str, Poison] = {
    attack.__name__: attack for attack in (sign_flip, scaled, random, constant, inflated_counts)
}
KINDS = (LABEL_FLIP, *ATTACKS)


@dataclass(frozen=True)
class Scene:
    """The honest uploads of one run, and those of its attackers."""

    honest: UploadSet
    dataset: Dataset
    contract: Contract
    attackers: tuple[int, ...]
    poisoned: Mapping[str, Mapping[int, Upload]]
    """attack -> attacker -> what it sends"""

    def uploads(self, attack: str) -> UploadSet:
        """What the server receives under this attack."""
        sent = self.poisoned.get(attack, {})
        return dataclasses.replace(
            self.honest, uploads=tuple(sent.get(upload.client, upload) for upload in self.honest.uploads)
        )

    def without_attackers(self) -> UploadSet:
        """The best a server could do about attackers: know them and leave them out."""
        kept = tuple(upload for upload in self.honest.uploads if upload.client not in self.attackers)
        return dataclasses.replace(self.honest, uploads=kept)


def choose_attackers(sizes: Sequence[int], number: int, seed: int) -> tuple[int, ...]:
    """Any members that own something."""
    owners = [client for client, size in enumerate(sizes) if size > 0]
    return tuple(sorted(numpy_generator(seed, "attackers").choice(owners, number, replace=False).tolist()))


def build_scene(experiment: Experiment, folder: Path, attackers: int, observer: Observer | None = None) -> Scene:
    """Train everybody, and the attackers once more on flipped labels; write what attackers send."""
    observer = observer or Observer()
    dataset = load(experiment.data)
    run_experiment(experiment, folder / "honest", dataset=dataset, observer=observer)
    federation = Federation.build(experiment, RunFiles(folder / "honest"), dataset, None, None)
    contract, clients = federation.contract, experiment.partition.clients
    who = choose_attackers(federation.partition.sizes, attackers, experiment.seed)
    with one_thread():
        summaries = [federation.files.client(client).read_summary() for client in range(clients)]
        honest = federation.collect([summary for summary in summaries if summary is not None], observer)
        classes = len(dataset.classes)
        flipped = dataset.train._replace(labels=classes - 1 - dataset.train.labels)
        nothing = np.empty(0, dtype=np.int64)
        parts = [indices if client in who else nothing for client, indices in enumerate(federation.partition.indices)]
    flipped_folder = folder / LABEL_FLIP
    run_experiment(
        experiment, flipped_folder, dataset=dataclasses.replace(dataset, train=flipped), parts=parts, observer=observer
    )
    poisoned: dict[str, dict[int, Upload]] = {
        LABEL_FLIP: {
            client: read_upload(RunFiles(flipped_folder).client(client).upload, contract) for client in who
        }
    }
    for name, attack in ATTACKS.items():
        poisoned[name] = {}
        for client in who:
            upload = next(upload for upload in honest if upload.client == client)
            network, counts = attack(_network(federation, upload), _counts(upload), experiment.seed + client)
            path = folder / name / f"{client:03d}.safetensors"
            write_upload(path, network, contract, client=client, counts=counts, epoch=int(upload.manifest["epoch"]))
            poisoned[name][client] = read_upload(path, contract)
    return Scene(honest, dataset, contract, who, poisoned)


def _network(federation: Federation, upload: Upload) -> PrototypeNetwork:
    image = federation.contract.image
    network = initial_network(
        federation.contract.encoder, image.channels, image.size, len(federation.contract.classes), 0
    )
    network.encoder.load_state_dict(upload.weights())
    assert upload.prototypes is not None
    with torch.no_grad():
        network.prototypes.copy_(upload.prototypes)
    return network


def _counts(upload: Upload) -> Tensor:
    assert upload.counts is not None
    return upload.counts.long()


def accuracies(uploads: UploadSet, dataset: Dataset, fusions: Sequence[str]) -> dict[str, float]:
    with one_thread():
        models = {name: build_fusion({"name": name}).fuse(uploads) for name in fusions}
        logits = logits_of_all(models, dataset.test.images)
    labels = dataset.test.labels
    return {name: float((value.argmax(1) == labels).double().mean()) for name, value in logits.items()}
