"""What a client may hold beside its loss terms: banks, two stages, the proximal term, a frozen classifier."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F

from conftest import TINY
from oneflare.client.files import ClientFiles
from oneflare.client.loop import build_training
from oneflare.client.observer import Observer
from oneflare.client.training import train_client
from oneflare.core.files import load_state
from oneflare.data import Augmentation, load
from oneflare.errors import ConfigError
from oneflare.fusion import build_fusion
from oneflare.methods.explain import explain
from oneflare.methods.recipes import find_method
from oneflare.methods.resolve import resolve
from oneflare.nn import simplex_etf
from oneflare.objective import Proximal, build_bank
from oneflare.objective.banks import push_away
from oneflare.objective.terms import supervised_contrastive
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation


def federation(folder, *layers):
    experiment = resolve(TINY, *layers)
    return Simulation.build(experiment, RunFiles(folder), load(experiment.data))


def unit(n: int, d: int = 4, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=1)


def test_the_queue_is_first_in_first_out():
    bank = build_bank({"name": "memory", "size": 3}, 1, None)
    for first in (0, 2):
        values = torch.tensor([[first], [first + 1]]).float().requires_grad_()
        bank.push(values, torch.tensor([first, first + 1]))
    features, labels = bank.pairs()
    assert features.tolist() == [[1], [2], [3]]
    assert labels.tolist() == [1, 2, 3]
    assert not features.requires_grad
    again = build_bank({"name": "memory", "size": 3}, 1, None)
    again.load_state_dict(bank.state_dict())
    assert torch.equal(again.pairs()[0], features)


def test_an_empty_queue_changes_nothing():
    z, y = unit(6), torch.tensor([0, 1, 2, 0, 1, 2])
    empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    assert torch.equal(supervised_contrastive(z, y, 0.1, empty), supervised_contrastive(z, y, 0.1))


def test_the_queue_adds_pairs_by_hand():
    z, y, t = unit(4), torch.tensor([0, 1, 0, 1]), 0.5
    bank, bank_y = unit(3, seed=1), torch.tensor([0, 1, 2])
    losses = []
    for i in range(4):
        others = [(z[j], y[j]) for j in range(4) if j != i] + list(zip(bank, bank_y, strict=True))
        total = torch.logsumexp(torch.stack([z[i] @ other / t for other, _ in others]), 0)
        same = [z[i] @ other / t - total for other, label in others if label == y[i]]
        losses.append(-torch.stack(same).mean())
    assert torch.allclose(supervised_contrastive(z, y, t, (bank, bank_y)), torch.stack(losses).mean(), atol=1e-6)


def test_pushing_away_by_hand():
    z, bank, t = unit(4), unit(3, seed=1), 0.5  # rows 0, 1: first views; rows 2, 3: the other views
    losses = []
    for i, other in enumerate((2, 3, 0, 1)):
        positive = (z[i] @ z[other] / t).exp()
        losses.append(-torch.log(positive / (positive + (bank @ z[i] / t).exp().sum())))
    assert torch.allclose(push_away(z, bank, t), torch.stack(losses).mean(), atol=1e-6)
    weighted = build_bank({"name": "public", "weight": 2.0}, 4, bank)
    assert torch.allclose(weighted.contrast(z, t), 2 * push_away(z, bank, t))


def test_the_proximal_gradient_is_that_of_its_loss():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in ((3, 2), (4,))]
    weights = [tensor.clone().requires_grad_() for tensor in start]
    proximal = Proximal(weights, 0.3)
    with torch.no_grad():
        for weight in weights:
            weight += torch.randn(weight.shape, generator=generator)
    loss = 0.3 / 2 * sum((w - s).square().sum() for w, s in zip(weights, start, strict=True))
    expected = torch.autograd.grad(loss, weights)
    weights[0].grad = torch.ones(3, 2)  # what the backward pass left
    assert torch.allclose(proximal.apply(), loss)
    assert torch.allclose(weights[0].grad, 1 + expected[0])
    assert torch.allclose(weights[1].grad, expected[1])


def distance_from_start(made: Simulation, folder) -> float:
    training = build_training(dataclasses.replace(made.clients.job(0), folder=folder), made.clients.data(0))
    for _ in range(12):
        training.run_epoch()
    start = made.template().state_dict()
    moved = [(p.detach() - start[name].detach()).square().sum() for name, p in training.network.named_parameters()]
    return float(torch.stack(moved).sum())


def test_a_strong_proximal_term_holds_clients_near_the_start(tmp_path):
    free = federation(tmp_path, {"method": "fedavg"})
    held = federation(tmp_path, {"method": "fedavg", "objective.proximal": 5.0})
    assert distance_from_start(held, tmp_path) < 0.5 * distance_from_start(free, tmp_path)


def test_a_batch_enters_the_queue_after_its_step(tmp_path):
    made = federation(tmp_path, {"method": "memory_bank", "objective.bank.size": 50})
    training = build_training(made.clients.job(0), made.clients.data(0))
    rows = torch.arange(8)
    views, labels = training.views(rows, Augmentation.draw(8, torch.Generator().manual_seed(0)))
    training.network.train()
    with torch.no_grad():
        expected = training.network(views)
    training.load_state_dict(build_training(made.clients.job(0), made.clients.data(0)).state_dict())  # batch norm moved
    losses, _ = training.step(views, labels, 0.0)
    features, seen = training.bank.pairs()
    assert torch.allclose(features, expected, atol=1e-5)
    assert torch.equal(seen, labels)
    assert torch.allclose(losses["supcon"], supervised_contrastive(expected, labels, 0.07), atol=1e-4)


@pytest.mark.parametrize("method", ["memory_bank", "two_stage"])
def test_interrupted_training_resumes_bit_for_bit(method, tmp_path):
    layer = {"epochs": 3, "train": {"checkpoint_seconds": 0, "snapshots": 0}}
    made = federation(tmp_path, {"method": method, "data.public": 30}, layer)
    made.clients.teach(Observer())
    data = made.clients.data(1)
    train_client(dataclasses.replace(made.clients.job(1), folder=tmp_path / "whole"), data)

    class Cut(Exception):
        pass

    class CutAfterTwo(Observer):
        def epoch(self, client, epoch, row, samples):
            if epoch == 2:
                raise Cut

    job = dataclasses.replace(made.clients.job(1), folder=tmp_path / "cut")
    with pytest.raises(Cut):
        train_client(job, data, CutAfterTwo())
    train_client(job, data)
    for name in ("upload.safetensors", "trace.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_the_public_split_is_nobodys_and_feeds_the_bank(tmp_path):
    layer = {"method": "public_bank", "data.public": 50, "objective.bank.epochs": 2, "epochs": 1}
    made = federation(tmp_path, layer)
    public = {tuple(image.flatten().tolist()) for image in made.dataset.public.images}
    for client in range(3):
        assert not public & {tuple(image.flatten().tolist()) for image in made.clients.data(client).images}
    assert sum(made.partition.sizes) == 150
    made.train(Observer())
    features = load_state(made.files.bank)["features"]
    assert features.shape == (50, made.contract.dim)
    assert torch.allclose(features.norm(dim=1), torch.ones(50), atol=1e-5)
    with torch.no_grad():
        untrained = made.template().eval()(torch.zeros(1, 1, 8, 8))
    assert not torch.allclose(features[:1], untrained, atol=1e-3)
    rows = ClientFiles(made.files.client(0).folder).read_trace()
    assert rows[0]["local"] == pytest.approx(
        sum(rows[0][name] for name in ("cls", "supcon", "proto_feature", "proto_separation", "bank")), rel=1e-4
    )
    other = federation(tmp_path / "again", layer)
    other.clients.teach(Observer())
    assert torch.equal(load_state(other.files.bank)["features"], features)


def test_two_stages_contrast_first_and_forget_the_bank_then(tmp_path):
    layer = {"method": "flare", "data.public": 50, "objective": {"bank": "public", "alignment_epochs": 1}}
    made = federation(tmp_path, layer)
    made.clients.teach(Observer())
    training = build_training(made.clients.job(0), made.clients.data(0))
    start = training.network.prototypes.detach().clone()
    first = training.run_epoch()
    assert torch.equal(training.network.prototypes.detach(), start)  # the bank knows no prototypes
    assert first["bank"] == pytest.approx(first["local"])
    assert "cls" not in first
    assert first["lambda_effective"] == 0
    second = training.run_epoch()
    assert "bank" not in second
    assert second["cls"] > 0
    assert second["lambda_effective"] > 0
    assert not torch.equal(training.network.prototypes.detach(), start)


def test_a_frozen_classifier_stays_the_frame(tmp_path):
    made = federation(tmp_path, {"method": "fedetf", "train.weight_decay": 0.1})
    expected = (10 * simplex_etf(10, made.contract.dim, 0)).float()
    uploads = made.collect(made.train(Observer()), Observer())
    for upload in uploads:
        assert torch.equal(upload.prototypes, expected)
        moved = upload.weights()["layers.0.weight"] - made.template().encoder.state_dict()["layers.0.weight"]
        assert float(moved.abs().max()) > 0
    fused = build_fusion({"name": "average"}).fuse(uploads).model
    assert torch.allclose(fused.network.prototypes, expected)


def test_the_largest_stable_rate_is_that_of_what_is_trained(tmp_path):
    made = federation(tmp_path, {"method": "fedetf", "train.batch_size": 2})
    training = build_training(made.clients.job(0), made.clients.data(0))
    whole = training.stable_lr()  # all but the prototypes, which are fixed
    for parameter in list(training.network.encoder.parameters())[1:]:
        parameter.requires_grad_(False)
    assert training.stable_lr() > 2 * whole  # a part of the weights is never curved more than all of them


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "fedavg", "objective.bank": "memory"}, "gives supcon more pairs"),
        ({"method": "fafi", "objective.bank": "public"}, "set data.public=NUMBER"),
        ({"method": "fafi", "objective.bank": "memry"}, "did you mean 'memory'"),
        ({"method": "fafi", "objective.bank": {"name": "memory", "size": 0}}, r"objective\.bank\.size"),
        ({"method": "fafi", "objective.alignment_epochs": 1}, "set objective.bank=public"),
        ({"method": "two_stage", "objective.alignment_epochs": 9}, "more than the 2 epochs"),
        ({"method": "fafi", "objective.freeze_prototypes": True}, "set anchors=etf"),
        ({"method": "flare", "objective.freeze_prototypes": True}, "set controller=none"),
        ({"method": "analytic", "objective.proximal": 1.0}, "belong to a network"),
        ({"method": "fafi", "objective.proximal": 0}, r"objective\.proximal"),
    ],
)
def test_what_does_not_fit_is_named_before_any_work(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        resolve(TINY, settings)


def test_a_client_without_the_teachers_features_says_so(tmp_path):
    made = federation(tmp_path, {"method": "public_bank", "data.public": 20})
    with pytest.raises(ConfigError, match="the teacher's features are missing"):
        build_training(dataclasses.replace(made.clients.job(0), bank=None), made.clients.data(0))


def test_the_logs_numbers_find_them_and_say_who_else_has_them():
    assert find_method("V5-memory").name == "memory_bank"
    assert find_method("v5-public").name == "public_bank"
    assert find_method("V6-two-stage").name == "two_stage"
    assert find_method("V5").name == "drcl"
    assert "V5" in explain("V5-memory").notes[0]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("memory_bank", "First in, first out"),
        ("public_bank", "L_bank"),
        ("two_stage", "first 1 epoch"),
        ("fedprox", "mu/2 |w - w_0|^2"),
        ("fedetf", "nobody trains the classifier"),
    ],
)
def test_explain_shows_the_equation(method, words):
    assert words in json.dumps(explain(method).to_dict()["additions"])


def test_absent_options_leave_runs_their_name():
    off = {"objective": {"bank": None, "alignment_epochs": None, "proximal": None, "freeze_prototypes": None}}
    assert resolve(TINY, off).training_digest() == resolve(TINY).training_digest()
