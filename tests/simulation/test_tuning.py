"""Runs whose clients train the last block of a backbone: every kind of fusion, and what does not go with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oneflare import load_model, run
from oneflare.client.cohort import supports
from oneflare.client.loop import build_training
from oneflare.data.augment import DRAWS
from oneflare.errors import ConfigError
from oneflare.methods.resolve import resolve
from oneflare.simulation.features import load_data
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation

LITE = {"backbone": "efficientnet_lite0", "backbone.tune": "last"}
FUSIONS = ["density_ratio", "ensemble", "average", "count_prototypes", "iffi", "robust_prototypes", "laplace", "ties"]


class Two(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(12, 24, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu()).relu()


class Net(nn.Module):
    """A small stand-in for a pretrained network, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 7, 4)
        self.blocks = nn.ModuleList([Two()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        for block in self.blocks:
            x = block(x)
        return x.mean((2, 3))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEFLARE_CACHE", str(tmp_path / "cache"))


def test_every_kind_of_fusion_works_with_a_block_of_each_client(tmp_path):
    torch.manual_seed(0)
    module = Net()
    result = run(
        "backbone.tune=last", backbone=module, method="flare", fusions=FUSIONS, clients=3, alpha=0.5, epochs=4,
        data={"name": "digits", "train_size": 240, "test_size": 100}, encoder={"name": "mlp", "width": 32},
        train={"snapshots": 0, "precision": "float32"}, upload={"evidence": ["density", "kronecker"]},
        out=tmp_path / "run", workers=1,
    )  # fmt: skip
    assert set(result.fusions) == set(FUSIONS)
    assert result.fusions["density_ratio"].accuracy > 0.3  # 0.1 by chance
    model = load_model(tmp_path / "run/fusions/average/model.safetensors")
    assert model.task.image.backbone.tune == "blocks.0"
    assert {name.split(".")[0] for name in model.network.encoder.state_dict()} == {"tail", "head"}


def test_clients_with_a_block_to_train_train_alone_and_pass_each_image_once(tmp_path):
    settings = {"data": {"name": "digits", "train_size": 20, "test_size": 10, "image_size": 32}, "clients": 2}
    experiment = resolve({**LITE, **settings, "alpha": 100, "train.precision": "float32", "workers": 1})
    clients = Simulation.build(experiment, RunFiles(tmp_path), load_data(experiment)).clients
    assert not supports(clients.job(0))
    training = build_training(clients.job(0), clients.data(0))
    views, labels = training.views(torch.arange(5), torch.zeros(10, DRAWS))
    passed: list[int] = []
    training.network.encoder.tail.register_forward_hook(lambda module, inputs, output: passed.append(len(inputs[0])))
    once = training._features(views, labels)[0]
    assert passed == [5]
    assert torch.allclose(once, training.network.encoder(views), atol=1e-5)
    (slope,) = torch.autograd.grad(once.square().sum(), [training.network.encoder.head.hidden.weight])
    twice = training.network.encoder(views).square().sum()
    (expected,) = torch.autograd.grad(twice, [training.network.encoder.head.hidden.weight])
    assert torch.allclose(slope, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**LITE, "method": "analytic"}, "trains no network; leave it out"),
        ({**LITE, "method": "flare_analytic"}, "set analytic=none"),
        ({**LITE, "backbone.copies": "mirror"}, "leave one of the two out"),
        ({**LITE, "backbone.tune": "block.15"}, "did you mean 'blocks.15'"),
    ],
)
def test_what_does_not_go_with_a_trained_block_is_one_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(settings)


def test_the_block_counts_in_the_identity_of_a_run():
    pinned = {"name": "efficientnet_lite0", "digest": "a" * 64, "dim": 1280}
    digests = {resolve({"backbone": pinned | {"tune": tune}}).training_digest() for tune in ("head", "blocks.15")}
    assert len(digests | {resolve({"backbone": pinned}).training_digest()}) == 3
    assert (
        resolve({"backbone": pinned}).training_digest()
        == resolve({"backbone": pinned | {"tune": "none"}}).training_digest()
    )
