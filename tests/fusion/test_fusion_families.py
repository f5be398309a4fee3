"""Fusions of task vectors, matched neurons, experts and optimised prototypes, against what is worked out by hand."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from oneflare.core.config import DataConfig
from oneflare.data import load, prepare
from oneflare.errors import ConfigError
from oneflare.fusion import UploadSet, build_fusion
from oneflare.fusion.averaging.channels import FIXED, Axis, Channels
from oneflare.fusion.averaging.matching import best_order, match, reordered
from oneflare.fusion.averaging.task_vectors import SignMerge, dropped, trimmed
from oneflare.fusion.features.trainable import (
    TrainablePrototypes,
    adaptive_margin,
    margin_logits,
    plain_logits,
    server_loss,
)
from oneflare.fusion.trust.robust import expert_weights, robust_prototypes, trimmed_mean
from oneflare.nn import PrototypeNetwork, simplex_etf
from oneflare.nn.encoders import conv4, resnet8, resnet18
from oneflare.upload import Contents, read_upload, write_upload

IMAGES = load(DataConfig(test_size=40)).test.images


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rewritten(uploads: UploadSet, networks: list[PrototypeNetwork], folder, sizes: list[int]) -> UploadSet:
    """Uploads of the given networks for the same federation."""
    found = []
    for client, (network, size) in enumerate(zip(networks, sizes, strict=True)):
        path = folder / f"{client}.safetensors"
        write_upload(path, network, uploads.contract, Contents(client=client, counts=torch.full((10,), size), epoch=1))
        found.append(read_upload(path, uploads.contract))
    return UploadSet(tuple(found), uploads.contract, uploads.template)


def network_of(uploads: UploadSet, index: int) -> PrototypeNetwork:
    network = copy.deepcopy(uploads.template)
    network.encoder.load_state_dict(uploads.uploads[index].weights())
    network.prototypes.data.copy_(uploads.uploads[index].prototypes)
    return network


# --- task vectors


def test_trimming_by_hand():
    vector = torch.tensor([0.1, -3.0, 2.0, 0.0, -0.5])
    assert trimmed(vector, 0.4).tolist() == [0, -3, 2, 0, 0]
    assert trimmed(vector, 1.0).tolist() == vector.tolist()
    assert trimmed(vector, 0.01).tolist() == [0, 0, 0, 0, 0]


def test_ties_by_hand():
    """Three task vectors, 3 of 4 entries kept: trimmed entries count neither for the sign nor for the mean."""
    merge = SignMerge(4, density=0.75)
    for vector in ([4.0, -1.0, 2.0, 0.5], [2.0, -3.0, -0.1, 6.0], [-1.0, 5.0, -7.0, 0.2]):
        merge.add(torch.tensor(vector, dtype=torch.float64), 1 / 3)
    # trimmed: [4, -1, 2, 0], [2, -3, 0, 6], [-1, 5, -7, 0]; sums: 5, 1, -5, 6
    assert merge.result().tolist() == pytest.approx([3.0, 5.0, -7.0, 6.0])


def test_signs_that_cancel_leave_the_start():
    merge = SignMerge(1, density=1.0)
    merge.add(torch.tensor([2.0]).double(), 0.5)
    merge.add(torch.tensor([-2.0]).double(), 0.5)
    assert merge.result().item() == 0


def test_dare_by_hand():
    vector = torch.arange(1.0, 9.0)
    kept = torch.rand(8, generator=torch.Generator().manual_seed(3)) >= 0.75
    assert 0 < int(kept.sum()) < 8
    result = dropped(vector, 0.75, torch.Generator().manual_seed(3))
    assert result.tolist() == [4 * v if k else 0 for v, k in zip(vector.tolist(), kept.tolist(), strict=True)]


def test_dropping_keeps_the_expectation():
    total = sum(dropped(torch.ones(2000), 0.6, torch.Generator().manual_seed(seed)) for seed in range(20)) / 20
    assert float(total.mean()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    "spec",
    [{"name": "ties", "density": 0.3, "scale": 0.5}, {"name": "dare", "drop": 0.4, "then": "ties", "density": 0.3}],
)
def test_task_vectors_of_networks_equal_the_flat_computation(spec, tiny_uploads):
    fusion = build_fusion(spec)
    fused = fusion.fuse(tiny_uploads).model.network
    start = torch.cat([p.detach().double().flatten() for p in _ordered(tiny_uploads.template)])
    merge = SignMerge(len(start), 0.3)
    for index, upload in enumerate(tiny_uploads):
        own = torch.cat([p.detach().double().flatten() for p in _ordered(network_of(tiny_uploads, index))])
        merge.add(fusion.prepare(own - start, upload.client), 0.0)
    expected = start + spec.get("scale", 1.0) * merge.result()
    found = torch.cat([p.detach().double().flatten() for p in _ordered(fused)])
    assert torch.allclose(found, expected, atol=1e-6)
    name = "layers.1.running_mean"
    shares = tiny_uploads.size_weights
    mean = sum(w * u.weights()[name].double() for w, u in zip(shares, tiny_uploads, strict=True))
    assert torch.allclose(fused.encoder.state_dict()[name].double(), mean, atol=1e-6)


def _ordered(network: PrototypeNetwork) -> list[torch.Tensor]:
    return [*network.encoder.parameters(), network.prototypes]


def test_dare_without_dropping_is_the_average(tiny_uploads):
    plain = build_fusion({"name": "average"}).fuse(tiny_uploads).model.network.state_dict()
    for name, tensor in (
        build_fusion({"name": "dare", "drop": 0.0}).fuse(tiny_uploads).model.network.state_dict().items()
    ):
        assert torch.allclose(tensor.double(), plain[name].double(), atol=1e-6)


def test_dare_is_seeded_by_client(tiny_uploads):
    """Who else takes part does not change what is dropped of a client."""
    last = UploadSet(tiny_uploads.uploads[2:], tiny_uploads.contract, tiny_uploads.template)
    fusion = build_fusion({"name": "dare"})
    one, two = (fusion.prepare(torch.ones(50), uploads.uploads[-1].client) for uploads in (last, tiny_uploads))
    assert torch.equal(one, two)
    assert not torch.equal(one, fusion.prepare(torch.ones(50), 0))
    again, other = (build_fusion({"name": "dare", "seed": seed}).fuse(tiny_uploads).model.network for seed in (0, 1))
    assert torch.equal(again.prototypes, fusion.fuse(tiny_uploads).model.network.prototypes)
    assert not torch.equal(again.prototypes, other.prototypes)


def test_fusing_leaves_the_shared_start_alone(tiny_uploads):
    """Ties after iffi, which runs images through every client's encoder, is the same as ties alone."""
    before = copy.deepcopy(tiny_uploads.template.state_dict())
    build_fusion({"name": "iffi"}).fuse(tiny_uploads).model.predict(IMAGES)
    for name, tensor in tiny_uploads.template.state_dict().items():
        assert torch.equal(tensor, before[name])


# --- matched neurons


@pytest.mark.parametrize("encoder", [conv4(1, width=4), resnet8(3, width=4, dim=20), resnet18(1, width=4)])
def test_permuted_copies_are_matched_exactly(encoder):
    torch.manual_seed(0)
    size = next(encoder.parameters()).shape[1]
    for name, tensor in encoder.state_dict().items():
        if name.endswith("running_var"):
            tensor.copy_(torch.rand(tensor.shape) + 0.5)
        elif tensor.is_floating_point():
            tensor.copy_(draw(*tensor.shape, seed=len(name) + tensor.numel()))
    with torch.no_grad():
        channels = Channels(encoder)
        state = {**encoder.state_dict(), "prototypes": draw(10, _dim(encoder, size))}
        shuffle = {g: torch.randperm(channels.size(g), generator=torch.Generator().manual_seed(g)) for g in channels}
        shuffled = reordered(state, channels, shuffle)
        images = torch.rand(5, size, 16, 16)
        expected = _logits(encoder, state, images)
        assert not torch.equal(shuffled["prototypes"], state["prototypes"])
        assert torch.allclose(_logits(encoder, shuffled, images), expected, atol=1e-4)  # a symmetry of the network
        parameters = {name for name, _ in encoder.named_parameters()}
        for sweeps in (0, 5):
            orders = match(state, shuffled, channels, parameters, sweeps)
            back = reordered(shuffled, channels, orders)
            assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def _dim(encoder: nn.Module, channels: int) -> int:
    with torch.no_grad():
        return encoder.eval()(torch.zeros(1, channels, 16, 16)).shape[1]


def _logits(encoder: nn.Module, state: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    network = copy.deepcopy(encoder)
    network.load_state_dict({name: tensor for name, tensor in state.items() if name != "prototypes"})
    return F.normalize(network.eval()(images), dim=1) @ state["prototypes"].T


def test_permuted_uploads_fuse_to_the_network(tiny_uploads, tmp_path):
    network = network_of(tiny_uploads, 0)
    channels = Channels(network.encoder)
    state = {**network.encoder.state_dict(), "prototypes": network.prototypes.detach()}
    networks = [network]
    for seed in (1, 2):
        orders = {g: torch.randperm(channels.size(g), generator=torch.Generator().manual_seed(seed)) for g in channels}
        copied = copy.deepcopy(network)
        shuffled = reordered(state, channels, orders)
        copied.prototypes.data.copy_(shuffled.pop("prototypes"))
        copied.encoder.load_state_dict(shuffled)
        networks.append(copied)
    uploads = rewritten(tiny_uploads, networks, tmp_path, [5, 50, 20])
    with torch.no_grad():
        expected = network.eval()(prepare(IMAGES, uploads.contract.image)) @ network.prototypes.T
    fused = build_fusion({"name": "otfusion"}).fuse(uploads).model.logits(IMAGES)
    averaged = build_fusion({"name": "average"}).fuse(uploads).model.logits(IMAGES)
    assert torch.allclose(fused, expected, atol=1e-4)
    assert not torch.allclose(averaged, expected, atol=1e-2)


def test_added_channels_share_one_order():
    channels = Channels(resnet8(3, width=4))
    stream = channels.group_of[Axis("stem.weight", 0)]
    assert channels.group_of[Axis("stem.weight", 1)] == FIXED
    assert channels.group_of[Axis("blocks.0.conv2.weight", 0)] == stream
    assert channels.group_of[Axis("blocks.1.shortcut.0.weight", 1)] == stream
    last = channels.group_of[Axis("blocks.2.conv2.weight", 0)]
    assert channels.group_of[Axis("blocks.2.shortcut.0.weight", 0)] == last
    assert channels.group_of[Axis("prototypes", 1)] == last
    assert channels.group_of[Axis("blocks.2.conv1.weight", 0)] not in (stream, last)


def test_the_order_is_the_optimal_transport_plan():
    ot = pytest.importorskip("ot")
    one, two = draw(12, 7).double(), draw(12, 7, seed=1).double()
    plan = ot.emd(np.full(12, 1 / 12), np.full(12, 1 / 12), (torch.cdist(one, two) ** 2).numpy())
    assert best_order(one @ two.T).tolist() == plan.argmax(1).tolist()


def test_an_encoder_that_cannot_be_followed_is_named():
    with pytest.raises(ConfigError, match=r"cannot follow channels through 1 \(GroupNorm\)"):
        Channels(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)))
    with pytest.raises(ConfigError, match="reads 64 inputs from 4 channels"):
        Channels(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 3)))


# --- who has a say on a class


def test_expert_votes_by_hand(tiny_uploads):
    counts = torch.tensor([[3.0, 0.0, 0.0], [1.0, 7.0, 0.0]])
    assert expert_weights(counts).tolist() == [[0.75, 0, 0], [0.25, 1, 0]]
    assert torch.allclose(expert_weights(counts, "client"), torch.tensor([[3.0, 0, 0], [8, 8, 0]]) / 11)
    model = build_fusion({"name": "class_experts"}).fuse(tiny_uploads).model
    inputs = prepare(IMAGES, tiny_uploads.contract.image)
    total = torch.zeros(len(IMAGES), 10)
    for index in range(3):
        network = network_of(tiny_uploads, index).eval()
        with torch.no_grad():
            probabilities = (network(inputs) @ network.prototypes.T).softmax(1)
        for label in range(10):
            seen = tiny_uploads.counts[:, label].sum()
            total[:, label] += probabilities[:, label] * float(tiny_uploads.counts[index, label] / seen)
    assert torch.allclose(model.logits(IMAGES).exp(), total, atol=1e-5)


def test_trimmed_mean_and_median_by_hand():
    values = torch.tensor([1.0, 100.0, 3.0, 2.0]).double()
    even = torch.ones(4).double()
    assert trimmed_mean(values, even, 0.0).item() == pytest.approx(26.5)
    assert trimmed_mean(values, even, 0.25).item() == pytest.approx(2.5)
    assert trimmed_mean(values, even, 0.5).item() == pytest.approx(np.median(values))
    assert trimmed_mean(values[:3], even[:3], 0.5).item() == 3
    assert trimmed_mean(values, torch.tensor([1.0, 7.0, 1.0, 1.0]).double(), 0.5).item() == 100
    # weights 1, 2, 1 of the values 0, 4, 8: what lies between 1/8 and 7/8 is 1/8, 1/2, 1/8
    thirds = torch.tensor([0.0, 4.0, 8.0]).double()
    assert trimmed_mean(thirds, torch.tensor([1.0, 2.0, 1.0]).double(), 0.125).item() == pytest.approx(4)
    columns = draw(5, 3).double()
    assert trimmed_mean(columns, torch.ones(5).double(), 0.5).tolist() == pytest.approx(
        columns.median(0).values.tolist()
    )


def test_robust_prototypes_ignore_a_liar_and_the_absent():
    honest = F.normalize(draw(1, 4, 6), dim=2).repeat(5, 1, 1)
    prototypes = honest.clone()
    prototypes[0] = -1000 * honest[0]
    counts = torch.ones(5, 4)
    counts[0] = 1e6
    for trim in (0.5, 0.2):
        assert torch.allclose(robust_prototypes(prototypes, counts, trim, weighted=False), honest[0], atol=1e-6)
    assert not torch.allclose(robust_prototypes(prototypes, counts, 0.5, weighted=True), honest[0], atol=1e-2)
    counts = torch.zeros(5, 4)
    counts[2, :3] = 1
    prototypes[2, :3] = draw(3, 6, seed=2)
    found = robust_prototypes(prototypes, counts, 0.5, weighted=False)
    assert torch.allclose(found[:3], F.normalize(prototypes[2, :3], dim=1), atol=1e-6)
    assert torch.allclose(found[3], honest[0, 3], atol=1e-6)  # nobody saw it: the median of all


# --- optimised prototypes


def test_server_loss_and_its_gradient_by_hand():
    clients, prototypes = draw(6, 4).double(), draw(3, 4, seed=1).double().requires_grad_()
    labels, target = torch.tensor([0, 1, 2, 0, 1, 2]), draw(3, 4, seed=2).double()
    weights = torch.tensor([1.0, 1, 0, 1, 1, 1]).double()
    loss = server_loss(plain_logits(clients, prototypes), labels, weights, prototypes, target, 0.7)
    loss.backward()
    unit = F.normalize(clients, dim=1)
    error = (unit @ prototypes.detach().T).softmax(1) - F.one_hot(labels, 3)
    expected = (weights[:, None] * error).T @ unit / 5 + 0.7 * 2 * (prototypes.detach() - target) / 12
    assert torch.allclose(prototypes.grad, expected)


def test_optimised_prototypes_in_the_limits(tiny_uploads):
    clients, say = draw(4, 5, 8), torch.ones(4, 5)
    etf = simplex_etf(5, 8, seed=0).float()
    assert torch.equal(TrainablePrototypes(steps=0).optimise(clients, say, etf), clients.mean(0))
    one = TrainablePrototypes(steps=1, gamma=0.0, lr=0.5).optimise(clients, say, etf)
    mean, unit = clients.mean(0), F.normalize(clients, dim=2)
    error = torch.einsum("ncd,kd->nck", unit, mean).softmax(2) - torch.eye(5)
    assert torch.allclose(one, mean - 0.5 * torch.einsum("nck,ncd->kd", error, unit) / 20, atol=1e-6)
    pulled = TrainablePrototypes(steps=300, gamma=1e4, lr=1e-4).optimise(clients, say, etf)
    assert float((pulled - etf).abs().max()) < 1e-2
    model = build_fusion({"name": "trainable_prototypes", "steps": 0}).fuse(tiny_uploads).model
    plain = build_fusion({"name": "feature_mean"}).fuse(tiny_uploads).model
    assert torch.equal(model.logits(IMAGES), plain.logits(IMAGES))


def test_steps_go_down():
    clients, etf = draw(4, 5, 8), simplex_etf(5, 8, seed=0).float()
    say = torch.ones(4, 5)
    say[0] = 0
    rows, labels = clients.reshape(-1, 8), torch.arange(5).repeat(4)

    def loss(prototypes):
        return float(server_loss(plain_logits(rows, prototypes), labels, say.flatten(), prototypes, etf, 1.0))

    losses = [loss(TrainablePrototypes(steps=steps, lr=0.3).optimise(clients, say, etf)) for steps in (0, 10, 50)]
    assert losses[0] > losses[1] > losses[2]
    assert "counts" in build_fusion({"name": "trainable_prototypes", "seen_only": True}).needs
    assert "counts" not in build_fusion({"name": "trainable_prototypes"}).needs


def test_the_adaptive_margin_by_hand():
    clients = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0], [1.0, 5.0]])
    labels = torch.tensor([0, 0, 1, 1])
    assert adaptive_margin(clients, labels, torch.ones(4)) == pytest.approx(4)  # centres (1, 0) and (1, 4)
    assert adaptive_margin(1000 * clients, labels, torch.ones(4)) == 100
    logits = margin_logits(clients[:1], labels[:1], torch.tensor([[3.0, 4.0], [0.0, 1.0]]), 4.0)
    assert logits.tolist() == [[-9.0, -1.0]]


def test_the_adaptive_margin_moves_prototypes_apart(tiny_uploads):
    fusion = build_fusion({"name": "trainable_prototypes", "margin": "adaptive", "gamma": 0.0, "lr": 0.1})
    moved = fusion.fuse(tiny_uploads).model.rule.prototypes
    start = tiny_uploads.prototypes.mean(0)
    assert torch.pdist(moved).min() > torch.pdist(start).min()


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "ties", "density": 0},
        {"name": "dare", "drop": 1.0},
        {"name": "dare", "density": 2},
        {"name": "otfusion", "sweeps": -1},
        {"name": "median_prototypes", "trim": 0.5},
        {"name": "trainable_prototypes", "steps": -1},
    ],
)
def test_impossible_options_are_refused(spec):
    with pytest.raises(ConfigError, match=spec["name"]):
        build_fusion(spec)
