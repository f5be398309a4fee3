"""The tail of a backbone under training: it begins as published, its statistics stay, and the trunk is nobody's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_cutting import Small

from oneflare.data.dataset import ImageSpec
from oneflare.errors import ConfigError
from oneflare.nn import initial_network
from oneflare.nn.backbones import Frozen, frozen, give_backbone, input_spec, pinned
from oneflare.nn.encoders import both_features, own_dim
from oneflare.nn.given import GIVEN
from oneflare.nn.tuned import Tuned, encoder_on

LITE = {"name": "efficientnet_lite0", "tune": "last"}
MLP = {"name": "mlp", "width": 8, "dim": None}


@pytest.fixture
def small():
    """A module of the user's own, with statistics of batch normalisation that are not those of a new one."""
    torch.manual_seed(2)
    module = Small().train()
    for _ in range(3):
        module(torch.randn(8, 3, 20, 20) * 2 + 1)
    spec = pinned(give_backbone(module) | {"tune": "last"})
    yield module, input_spec(spec, None, 16)
    frozen.cache_clear()
    GIVEN.clear()


def pictures(number: int = 6, size: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8, generator=generator)


def test_what_a_trunk_gives_is_one_row_of_float16_per_image(small):
    module, image = small
    assert image.backbone.tune == "blocks.2"
    assert (image.channels, image.size) == (4 * 7 * 7, 1)
    found = frozen(image.backbone, "cpu", None)(pictures())
    assert (found.shape, found.dtype) == ((6, 196, 1, 1), torch.float16)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (image.decoded.mean, image.decoded.std))
    with torch.no_grad():
        maps = module.blocks[1](module.blocks[0](module.stem((pictures() / 255 - mean) / std)))
    assert torch.allclose(found.float().view_as(maps), maps, rtol=2e-3, atol=2e-3)


def test_before_training_the_encoder_is_the_head_on_the_published_features(small):
    _, image = small
    tuned = initial_network(MLP, image, 5, seed=3).eval()
    plain = initial_network(
        MLP, input_spec({"name": "custom", "digest": image.backbone.digest, "dim": 4}, None, 16), 5, seed=3
    ).eval()
    rows = frozen(image.backbone, "cpu", None)(pictures()).float()
    with torch.no_grad():
        features = Frozen(replace(image.backbone, tune=None))(pictures())
        assert torch.allclose(tuned(rows), plain(features), atol=5e-3)
    assert torch.equal(tuned.prototypes, plain.prototypes)


def test_training_moves_the_tail_and_neither_its_statistics_nor_the_trunk(small):
    module, image = small
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    encoder = encoder_on(MLP, image)
    start = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    rows, labels = frozen(image.backbone, "cpu", None)(pictures()).float(), torch.arange(6)
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for _ in range(4):
        encoder.train()
        optimiser.zero_grad()
        F.cross_entropy(encoder(rows), labels).backward()
        optimiser.step()
    after = encoder.state_dict()
    statistics = {name for name in after if "running" in name or "tracked" in name}
    assert statistics == {
        f"tail.blocks.2.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    still = {name for name in after if torch.equal(after[name], start[name])}
    assert still == statistics
    assert not encoder.tail.training
    assert encoder.head.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert not any(name.startswith(("tail.stem", "tail.blocks.0", "tail.blocks.1")) for name in after)


def test_a_head_that_widens_keeps_its_own_features(small):
    _, image = small
    encoder = encoder_on({"name": "mlp", "width": 8, "dim": 32}, image).eval()
    assert isinstance(encoder, Tuned)
    assert own_dim(encoder, 32) == 8
    with torch.no_grad():
        both = both_features(encoder, frozen(image.backbone, "cpu", None)(pictures()).float())
        assert torch.allclose(encoder.head.project(both.own), both.projected, atol=1e-6)
    assert both.own.shape == (6, 8)
    assert len(encoder.state_dict()) == len({tensor.data_ptr() for tensor in encoder.state_dict().values()})


def test_the_cut_of_the_backbone_that_works_offline():
    spec = pinned(LITE)
    assert (spec["tune"], spec["dim"]) == ("blocks.15", 1280)
    image = input_spec(spec, None, 64)
    assert image.channels == 192 * 2 * 2
    encoder = encoder_on({"name": "mlp", "width": 16, "dim": None}, image).eval()
    whole = Frozen(input_spec(pinned({"name": "efficientnet_lite0"}), None, 64).backbone)(pictures(2, 64))
    with torch.no_grad():
        rows = frozen(image.backbone, "cpu", None)(pictures(2, 64)).float()
        tail = encoder.tail(rows.reshape(2, 192, 2, 2))
    assert torch.allclose(tail, whole.flatten(1), rtol=5e-3, atol=5e-3)
    assert sum(tensor.numel() for name, tensor in encoder.state_dict().items() if "tail" in name) == 1_013_696


def test_the_cut_counts_in_the_terms_and_its_absence_changes_nothing(small):
    _, image = small
    told = image.to_dict()
    assert told["backbone"]["tune"] == "blocks.2"
    assert ImageSpec.from_dict(told) == image
    assert "tune" not in input_spec(pinned({"name": "efficientnet_lite0"}), None, 32).to_dict()["backbone"]
    assert pinned({"name": "efficientnet_lite0", "tune": "none"})["tune"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tune": "blocks.16"}, "has no module 'blocks.16'; did you mean"),
        ({"copies": "mirror"}, "leave one of the two out"),
        ({"tune": "blocks.0"}, "more than the 262,144 that are kept"),
    ],
)
def test_cuts_that_cannot_be_are_one_line(change, message):
    with pytest.raises(ConfigError, match=message):
        pinned(LITE | change)


def test_numbers_that_float16_does_not_hold_are_refused(small):
    module, image = small
    with torch.no_grad():
        module.blocks[1].two.bias.fill_(1e6)
    with pytest.raises(ConfigError, match="beyond float16"):
        Frozen(image.backbone)
