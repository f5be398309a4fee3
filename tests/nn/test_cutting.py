"""A backbone that is cut in two: both parts make the whole network, and the cut lies where its name says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from vision_libraries import require

from oneflare.errors import ConfigError
from oneflare.nn.backbone_kinds import without_classifier
from oneflare.nn.cutting import cut, cut_name
from oneflare.nn.efficientnet import EfficientNetLite


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.norm(self.one(x)).relu())


class Small(nn.Module):
    """What user's own networks look like: a stem, blocks in a list, pooling; not traced where it need not be."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2)
        self.blocks = nn.Sequential(Residual(4), Residual(4), Residual(4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.stem(x)).mean((2, 3)))


class Around(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.stem(x)).mean((2, 3))) + x.mean((1, 2, 3))[:, None]


class Undecided(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)


class Twice(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.blocks(self.stem(x))).mean((2, 3)))


def parts(network: nn.Module, tune: str = "last", size: int = 32) -> tuple[str, Tensor, Tensor, nn.Module]:
    """The name of the cut, what tail and network give for the same images, and the tail."""
    network.eval()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    name = cut_name(network, tune, "net")
    trunk, tail = cut(network, name, "net")
    with torch.no_grad():
        return name, tail(trunk(images)), network(images), tail


@pytest.mark.parametrize(
    ("network", "tune", "name"),
    [
        (Small, "last", "blocks.2"),
        (Small, "blocks.1", "blocks.1"),
        (Small, "blocks", "blocks"),
        (Small, "norm", "norm"),
        (EfficientNetLite, "last", "blocks.15"),
        (EfficientNetLite, "head", "head"),
    ],
)
def test_trunk_and_tail_make_the_whole_network_to_the_bit(network, tune, name):
    torch.manual_seed(0)
    found, composed, whole, _ = parts(network(), tune)
    assert found == name
    assert torch.equal(composed, whole)
    assert float(whole.std()) > 0


def test_a_tail_holds_the_named_module_and_what_follows_and_nothing_before_it():
    tail = parts(Small())[3]
    assert {name.rsplit(".", 1)[0] for name in tail.state_dict()} == {
        "blocks.2.one", "blocks.2.norm", "blocks.2.two", "norm",
    }  # fmt: skip
    lite = parts(EfficientNetLite())[3]
    assert sum(tensor.numel() for tensor in lite.state_dict().values()) == 1_013_696
    assert {name.split(".")[0] for name in lite.state_dict()} == {"blocks", "head"}


@pytest.mark.parametrize(
    ("network", "tune", "message"),
    [
        (Small, "stem", "nothing would be frozen"),
        (Small, "block.1", "did you mean 'blocks.1'"),
        (Around, "blocks.1", "goes around blocks.1 as well as through it"),
        (Undecided, "blocks.1", "cannot be cut at blocks.1"),
        (Twice, "blocks.1", "does not call blocks.1 once"),
    ],
)
def test_networks_without_such_a_cut_are_refused_in_one_line(network, tune, message):
    with pytest.raises(ConfigError, match=message) as error:
        parts(network(), tune)
    assert "\n" not in str(error.value)


def test_a_network_without_weights_is_answered_with_those_that_can_be_trained():
    with pytest.raises(ConfigError, match=r"no weights that could be trained; leave it frozen, or take efficientnet_l"):
        cut_name(nn.Flatten(), "last", "onnx:net.onnx")


def test_a_network_without_blocks_is_answered_with_names():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
    with pytest.raises(ConfigError, match=r"no list of blocks; name the module .* such as 0, 2"):
        cut_name(network, "last", "net")


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("resnet18", "layer4.1"),
        ("mobilenet_v2", "features.17"),
        ("efficientnet_b0", "features.7.0"),
        ("convnext_tiny", "features.7.2"),
        ("densenet121", "features.denseblock4"),
        ("swin_t", "features.7.1"),
    ],
)
def test_torchvision_networks_are_cut_before_their_last_block(name, block):
    require("torchvision")
    import torchvision

    network = without_classifier(torchvision.models.get_model(name, weights=None))
    found, composed, whole, _ = parts(network, size=64)
    assert found == block
    assert torch.equal(composed, whole)


@pytest.mark.parametrize(("name", "block"), [("resnet10t", "layer4.0"), ("mobilenetv3_small_050", "blocks.4.2")])
def test_timm_networks_are_cut_before_their_last_block(name, block):
    require("torchvision", "timm")
    import timm

    found, composed, whole, _ = parts(timm.create_model(name, pretrained=False, num_classes=0), size=64)
    assert found == block
    assert torch.equal(composed, whole)
