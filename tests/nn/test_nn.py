from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from oneflare.data import ImageSpec
from oneflare.errors import ConfigError
from oneflare.nn import (
    ENCODERS,
    build_anchors,
    build_encoder,
    build_target,
    encoder_spec,
    initial_network,
    simplex_etf,
)
from oneflare.nn.anchors import worst_cosine
from oneflare.nn.encoders import both_features, feature_dim, native_dim, own_dim


@pytest.mark.parametrize("classes", [*range(2, 41), 64, 100, 150, 199, 200])
def test_etf_gram_matrix_is_exact(classes):
    for dim in (classes - 1, classes, classes + 13):
        anchors = simplex_etf(classes, dim, seed=3)
        expected = torch.full((classes, classes), -1 / (classes - 1), dtype=torch.float64).fill_diagonal_(1.0)
        assert torch.allclose(anchors @ anchors.T, expected, atol=1e-12)
        assert torch.allclose(anchors.sum(0), torch.zeros(dim, dtype=torch.float64), atol=1e-12)


def test_anchors_are_a_function_of_kind_sizes_and_seed():
    for kind in ("etf", "random"):
        one, two = (build_anchors({"name": kind, "seed": 1}, 10, 16) for _ in range(2))
        assert torch.equal(one, two)
        assert not torch.equal(one, build_anchors({"name": kind, "seed": 2}, 10, 16))
        assert torch.allclose(one.norm(dim=1), torch.ones(10), atol=1e-6)
        scaled = build_anchors({"name": kind, "seed": 1, "scale": 4.0}, 10, 16)
        assert torch.allclose(scaled, 4 * one)
    assert build_anchors({"name": "none"}, 10, 16) is None


@pytest.mark.parametrize("kind", ["random", "etf", "packing", "progressive"])
def test_anchors_as_long_as_prototypes_at_the_start(kind):
    long, unit = (build_anchors({"name": kind, "scale": scale}, 10, 64) for scale in ("sqrt_d", 1))
    assert torch.allclose(long.norm(dim=1), torch.full((10,), 8.0))
    assert torch.allclose(long, 8 * unit)
    for wrong in (0, -1.0, "sqrt"):
        with pytest.raises(ConfigError, match="scale"):
            build_anchors({"name": kind, "scale": wrong}, 10, 64)


def test_etf_that_does_not_fit_is_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"encoder\.dim=99 or more, or anchors=packing"):
        build_anchors({"name": "etf"}, 100, 64)


@pytest.mark.parametrize(
    ("classes", "dim", "best"),
    [
        (10, 16, -1 / 9),  # room for the simplex
        (10, 9, -1 / 9),
        (10, 8, 0.0),  # C <= 2d: nothing beats a right angle (Rankin)
        (16, 8, 0.0),
        (7, 2, math.cos(2 * math.pi / 7)),  # regular polygon
        (12, 3, 1 / math.sqrt(5)),  # icosahedron
        (10, 4, 1 / 6),
        (16, 5, 1 / 5),
    ],
)
def test_packing_reaches_the_known_optima(classes, dim, best):
    rows = build_anchors({"name": "packing", "seed": 3}, classes, dim)
    assert torch.allclose(rows.norm(dim=1), torch.ones(classes), atol=1e-6)
    assert worst_cosine(rows) == pytest.approx(best, abs=2e-3)
    assert torch.equal(rows, build_anchors({"name": "packing", "seed": 3}, classes, dim))


def test_many_directions_in_few_dimensions_are_far_apart():
    """Beyond 256 points: near the bound of Welch (1974), which no arrangement can undercut, and far below random."""
    rows = build_anchors({"name": "packing"}, 300, 16)
    random = build_anchors({"name": "random"}, 300, 16)
    bound = ((300 - 16) / (16 * 299)) ** 0.5
    assert bound <= worst_cosine(rows) < 1.8 * bound
    assert worst_cosine(rows) < 0.6 * worst_cosine(random)
    assert torch.allclose(rows.norm(dim=1), torch.ones(300))


@pytest.mark.soak
def test_a_thousand_classes_have_anchors_in_64_dimensions():
    assert worst_cosine(build_anchors({"name": "packing"}, 1000, 64)) < 0.17


def test_packing_beats_chance_and_depends_on_the_seed():
    found = build_anchors({"name": "packing", "scale": 3.0}, 14, 4)
    assert torch.allclose(found.norm(dim=1), torch.full((14,), 3.0), atol=1e-5)
    assert worst_cosine(found) < worst_cosine(build_anchors({"name": "random"}, 14, 4)) - 0.2
    assert not torch.equal(found, build_anchors({"name": "packing", "scale": 3.0, "seed": 1}, 14, 4))


def test_a_progressive_target_moves_from_the_start_to_the_anchors():
    start = torch.randn(10, 16)
    anchors = build_anchors({"name": "etf", "scale": 4.0}, 10, 16)
    target = build_target({"name": "progressive", "scale": 4.0}, start)
    assert torch.equal(target.at(0.0), start)
    assert torch.allclose(target.at(0.25), 0.75 * start + 0.25 * anchors)
    assert torch.allclose(target.at(1.0), anchors)
    fixed = build_target({"name": "random"}, start)
    assert fixed.at(0.0) is fixed.at(1.0)
    assert build_target({"name": "none"}, start) is None


def test_shrink_pulls_to_the_origin():
    target = build_target({"name": "shrink"}, torch.randn(5, 8))
    assert torch.equal(target.at(0.5), torch.zeros(5, 8))
    assert worst_cosine(target.at(0.5)) is None


@pytest.mark.parametrize("name", ["conv4", "resnet8", "resnet18"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32), (3, 64)])
def test_encoders_take_all_images_and_have_the_promised_size(name, channels, size):
    spec = {"name": name, "width": 4}
    encoder = build_encoder(spec, channels)
    assert feature_dim(encoder, channels, size) == native_dim(spec)
    projected = build_encoder({**spec, "dim": 23}, channels)
    assert feature_dim(projected, channels, size) == 23


def test_resnet18_is_the_logs_encoder():
    encoder = build_encoder({"name": "resnet18"}, 3)
    assert native_dim({"name": "resnet18", "width": 64}) == 512
    assert sum(p.numel() for p in encoder.parameters()) == 11_168_832


@pytest.mark.parametrize(("dim", "own"), [(None, 16), (16, 16), (40, 16), (8, 8)])
def test_an_encoders_own_features_are_those_before_a_widening_projection(dim, own):
    for name in ("conv4", "resnet8"):
        encoder = build_encoder({"name": name, "width": 4, "dim": dim}, 1).eval()
        images = torch.rand(3, 1, 8, 8)
        with torch.no_grad():
            found, plain = both_features(encoder, images), encoder(images)
        assert torch.equal(found.projected, plain)
        assert found.own.shape[1] == own == own_dim(encoder, plain.shape[1])
        if own < plain.shape[1]:
            assert torch.equal(encoder.project(found.own), plain)
        else:
            assert torch.equal(found.own, plain)


def test_a_foreign_encoders_own_features_are_its_features():
    assert torch.equal(both_features(torch.nn.Flatten(), torch.ones(2, 3, 1, 1)).own, torch.ones(2, 3))


def test_auto_dim_leaves_room_for_all_classes():
    assert encoder_spec({"name": "resnet8"}, 10)["dim"] == 64
    assert encoder_spec({"name": "resnet8"}, 100)["dim"] == 128
    assert encoder_spec({"name": "resnet8", "dim": 40}, 100)["dim"] == 40


def test_all_clients_start_alike_and_global_randomness_is_untouched():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = initial_network({"name": "conv4"}, ImageSpec.default(1, 8), 10, seed=1)
    assert torch.equal(torch.rand(3), expected)
    two = initial_network({"name": "conv4"}, ImageSpec.default(1, 8), 10, seed=1)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    other = initial_network({"name": "conv4"}, ImageSpec.default(1, 8), 10, seed=2)
    assert not torch.equal(one.prototypes, other.prototypes)
    assert (
        abs(
            float(initial_network({"name": "resnet8"}, ImageSpec.default(1, 8), 200, seed=1).prototypes.detach().std())
            - 1
        )
        < 0.02
    )


def test_threads_do_not_disturb_each_others_start():
    """torch's global generator is one for all threads."""

    def start(seed: int) -> dict[str, torch.Tensor]:
        return initial_network({"name": "resnet8", "width": 16}, ImageSpec.default(3, 16), 10, seed).state_dict()

    alone = [start(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(start, list(range(4)) * 8))
    for number, state in enumerate(together):
        for name, tensor in alone[number % 4].items():
            assert torch.equal(tensor, state[name]), name


def test_features_have_unit_norm():
    network = initial_network({"name": "resnet8", "width": 4}, ImageSpec.default(3, 16), 5, seed=0).eval()
    features = network(torch.randn(7, 3, 16, 16))
    assert torch.allclose(features.norm(dim=1), torch.ones(7), atol=1e-5)


class TwoOutputs(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Conv2d(3, 4, 3), r"must return features of shape \(batch, d\)"),
        (nn.Linear(7, 2), "does not take images"),
        (TwoOutputs(), "must return features"),
    ],
)
def test_unfit_encoders_are_explained(module, message):
    with pytest.raises(ConfigError, match=message):
        feature_dim(module, 3, 16)


def test_registry_refuses_duplicates_and_says_what_there_is():
    with pytest.raises(ValueError, match="registered twice"):
        ENCODERS.register("conv4")(lambda channels: nn.Identity())
    assert set(ENCODERS) >= {"conv4", "resnet8", "resnet18"}
    assert ENCODERS["resnet8"].summary.startswith("three residual blocks")


@pytest.mark.parametrize(("momentum", "weight_decay", "clip"), [(0.9, 0.0, 1.0), (0.0, 0.01, 1e9), (0.5, 0.1, 0.01)])
def test_sgd_equals_torchs_with_clipping(momentum, weight_decay, clip):
    from oneflare.nn.optimisers import SGD, StepSettings

    ours, theirs = (
        initial_network({"name": "conv4", "width": 4}, ImageSpec.default(1, 8), 3, seed=0) for _ in range(2)
    )
    one = SGD(list(ours.parameters()), StepSettings(momentum, weight_decay, clip))
    two = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    for step in range(5):
        images = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        for network in (ours, theirs):
            network.zero_grad()
            (network(images) @ network.prototypes.T).square().sum().backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        two.step()
        one.step(0.1)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
