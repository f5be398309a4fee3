"""Attacks by members that send well-formed uploads, and what each fusion makes of them.

An attack is a function from an honest member's network and counts to what it sends instead; the poisoned upload is
written like any other, passes every check, and meets the honest uploads of the same run.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.core.files import write_json, write_text
from oneflare.core.seeds import derive, numpy_generator
from oneflare.data import Dataset
from oneflare.errors import UploadError
from oneflare.fusion import UploadSet, without_faulty
from oneflare.fusion.trust.suspects import find_suspects
from oneflare.methods.resolve import resolve
from oneflare.metrics import evaluate
from oneflare.nn import PrototypeNetwork
from oneflare.nn.encoders import Block
from oneflare.nn.hardware import one_thread
from oneflare.simulation.features import load_data
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment
from oneflare.study.lies import LIES, claiming_more, rewritten
from oneflare.upload import (
    EVIDENCE,
    STATISTICS,
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
            for client, path in paths.items():
                target = folder / "claims" / f"{client:03d}.safetensors"
                paths[client] = rewritten(read_upload(path, contract), target, claiming_more)
        poisoned[name] = {client: _received(path, contract) for client, path in paths.items()}
    for name, attack in ATTACKS.items():
        poisoned[name] = {}
        for client, upload in theirs.items():
            network, counts = attack(network_of(honest, upload), counts_of(upload), experiment.seed + client)
            path = folder / name / f"{client:03d}.safetensors"
            rest = read_tensors(upload.path, upload.manifest)
            write_upload(
                path,
                network,
                contract,
                client=client,
                counts=counts,
                epoch=int(upload.manifest["epoch"]),
                statistics={n.removeprefix(STATISTICS): t for n, t in rest.items() if n.startswith(STATISTICS)},
                evidence={n.removeprefix(EVIDENCE): t for n, t in rest.items() if n.startswith(EVIDENCE)},
            )
            poisoned[name][client] = _received(path, contract)
    for name, (needed, lie) in LIES.items():
        able = [upload for upload in theirs.values() if any(n.startswith(needed) for n in upload.entries)]
        if able:
            targets = {upload.client: folder / name / f"{upload.client:03d}.safetensors" for upload in able}
            poisoned[name] = {
                upload.client: _received(rewritten(upload, targets[upload.client], lie), contract) for upload in able
            }
    return Scene(honest, dataset, contract, who, poisoned)


def _received(path: Path, contract: Contract) -> Upload | None:
    """What the server makes of a file; None if it refuses it."""
    try:
        return read_upload(path, contract)
    except UploadError:
        return None


def network_of(uploads: UploadSet, upload: Upload) -> PrototypeNetwork:
    """What this member trained, to be changed freely."""
    network = copy.deepcopy(uploads.template)
    network.encoder.load_state_dict(upload.weights())
    assert upload.prototypes is not None
    with torch.no_grad():
        network.prototypes.copy_(upload.prototypes)
    return network


def counts_of(upload: Upload) -> Tensor:
    assert upload.counts is not None
    return upload.counts.long()


def accuracies(uploads: UploadSet, dataset: Dataset, fusions: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Test accuracy of each of these fusions, by its label; members that are at fault are left out."""
    with one_thread():
        found, _ = without_faulty(uploads, lambda kept: evaluate(list(fusions.values()), kept, dataset.test))
    return {label: one.scores.accuracy for label, one in zip(fusions, found, strict=True)}


# ---- the study

CROWDS = ((5, 1), (10, 3))
"""members, attackers among them"""
ALPHAS = (0.5, 0.05)
PLAIN, ROBUST = "count_prototypes", "robust_prototypes"
FUSED: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("average", "ensemble", "feature_mean", "iffi", PLAIN, "median_prototypes")},
    "trimmed_prototypes": {"name": "median_prototypes", "kind": "trimmed"},
    ROBUST: {"name": ROBUST},
    "analytic": {"name": "analytic"},
    "analytic_leave_out": {"name": "analytic", "leave_out": True},
    "regmean": {"name": "regmean"},
}
COLLAPSE = 0.1
"""loss of accuracy from which on a fusion has collapsed"""
REMOVED = "attackers known and left out"
BUDGET: dict[str, Any] = {
    "data": "digits",
    "method": "flare",
    "encoder": {"name": "conv4", "width": 16},
    "epochs": 20,
    "train.snapshots": 0,
    "fusions": PLAIN,
}
VEHICLES: dict[str, Any] = {"analytic": {"name": "random_conv", "filters": 8}, "upload.evidence": "gram"}
"""what uploads hold beside a network, for lies about it"""


def attack_study(
    folder: Path,
    *,
    seeds: int = 3,
    alphas: Sequence[float] = ALPHAS,
    crowds: Sequence[tuple[int, int]] = CROWDS,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Accuracy of every fusion under every attack, over seeds; runs that are there are not repeated."""
    scenes = []
    for alpha in alphas:
        for clients, attackers in crowds:
            rows = []
            for seed in range(seeds):
                layer = {"alpha": alpha, "clients": clients, "seed": seed}
                experiment = resolve(BUDGET, VEHICLES, settings or {}, layer)
                place = folder / f"a{alpha:g}-c{clients}-s{seed}"
                scene = build_scene(experiment, place, attackers, observer)
                rows.append(_measure(scene))
            scenes.append({"alpha": alpha, "clients": clients, "attackers": attackers, **_summary(rows)})
    experiment = resolve(BUDGET, VEHICLES, settings or {})
    return {
        "data": experiment.data.name,
        "method": experiment.method,
        "encoder": experiment.encoder,
        "epochs": experiment.epochs,
        "seeds": seeds,
        "fusions": list(FUSED),
        "scenes": scenes,
    }


def _measure(scene: Scene) -> dict[str, Any]:
    """One seed: accuracies by attack and fusion, and who was suspected."""
    table = {REMOVED: accuracies(scene.without_attackers(), scene.dataset, FUSED)}
    named: dict[str, list[int]] = {}
    for attack in scene.attacks:
        uploads = scene.uploads(attack)
        table[attack] = accuracies(uploads, scene.dataset, FUSED)
        with one_thread():
            named[attack] = sorted(suspect.client for suspect in find_suspects(uploads))
    turned_away = {attack: scene.refused(attack) for attack in scene.attacks}
    return {"accuracy": table, "suspects": named, "refused": turned_away, "attackers": list(scene.attackers)}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds; how many attackers were named, and how many honest members wrongly."""
    tried = tuple(rows[0]["suspects"])
    attacks = (REMOVED, *tried)
    mean = {
        attack: {name: statistics.fmean(row["accuracy"][attack][name] for row in rows) for name in FUSED}
        for attack in attacks
    }
    found = {
        attack: {
            "attackers": sum(len(row["attackers"]) for row in rows) if attack != NOBODY else 0,
            "named": sum(len(set(row["suspects"][attack]) & set(row["attackers"])) for row in rows if attack != NOBODY),
            "refused": sum(len(row["refused"][attack]) for row in rows),
            "wrongly": sum(
                len(set(row["suspects"][attack]) - (set(row["attackers"]) if attack != NOBODY else set()))
                for row in rows
            ),
        }
        for attack in tried
    }
    verdicts = {
        attack: {
            "plain_loss": mean[NOBODY][PLAIN] - mean[attack][PLAIN],
            "robust_loss": mean[NOBODY][PLAIN] - mean[attack][ROBUST],
            "robust_loss_to_removal": mean[REMOVED][PLAIN] - mean[attack][ROBUST],
            "collapsed": mean[NOBODY][PLAIN] - mean[attack][PLAIN] > COLLAPSE,
        }
        for attack in tried
    }
    return {"accuracy": mean, "found": found, "verdicts": verdicts, "runs": list(rows)}


def attack_tables(content: Mapping[str, Any]) -> str:
    """The study as Markdown; accuracies in percent."""
    lines = [
        "# Poisoned uploads: what each fusion makes of them",
        "",
        f"{content['data']}, {content['method']}, {content['encoder']['name']} width {content['encoder']['width']}, "
        f"{content['epochs']} epochs; test accuracy in percent, mean over {content['seeds']} seeds. "
        "`refused`: attackers whose uploads are turned away as they are read; `named`: those that are suspected, "
        "of all; `wrongly`: honest members that are suspected.",
    ]
    for scene in content["scenes"]:
        lines += [
            "",
            f"## alpha {scene['alpha']:g}, {scene['attackers']} of {scene['clients']} members attack",
            "",
            "| attack | " + " | ".join(content["fusions"]) + " | refused | named | wrongly |",
            "|---|" + "---|" * (len(content["fusions"]) + 3),
        ]
        for attack, row in scene["accuracy"].items():
            found = scene["found"].get(attack)
            cells = [f"{100 * row[name]:.1f}" for name in content["fusions"]]
            counted = ("refused", "named", "wrongly")
            cells += [_of(found, key) for key in counted] if found else [""] * len(counted)
            lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _of(found: Mapping[str, int], key: str) -> str:
    return str(found[key]) if key == "wrongly" else f"{found[key]}/{found['attackers']}"


def write_study(content: Mapping[str, Any], out: Path) -> None:
    write_json(out / "attacks.json", content)
    write_text(out / "attacks.md", attack_tables(content))
