"""Networks compute where `train.device` says, on a device that is apart from the processor and counts what passes.

`test_devices.py` runs these tests in a process of their own, because torch asks only once which devices there are.
"""

from __future__ import annotations

import pytest
import torch

from devices import NAME, counted_device, register
from oneflare import load_model, run
from oneflare.data.images import ImageFiles
from oneflare.federation import coordinator  # noqa: F401  (asks for a device)
from oneflare.nn.encoders import Features, build_encoder
from oneflare.simulation.features import FeatureReader

register()  # before the first gradient
TINY = {
    "data": {"name": "digits", "train_size": 90, "test_size": 30, "public": 20},
    "clients": 3,
    "alpha": 100,
    "epochs": 1,
    "encoder": {"name": "conv4", "width": 2},
    "train": {"snapshots": 0, "precision": "float32", "cohort": 1, "batch_size": 32},
    "workers": 1,
}
FEW = {"rounds": 1, "generator_steps": 1, "student_steps": 1, "batch_size": 4}
FUSIONS = [
    "density_ratio",
    "average",
    "feature_mean",
    "robust_prototypes",
    {"name": "distill_public", "steps": 2, "batch_size": 4},
    {"name": "distill_datafree", **FEW},
    {"name": "coboosting", **FEW},
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run on the processor."""
    return run(method="flare", fusions=FUSIONS, out=tmp_path_factory.mktemp("alone") / "run", **TINY)


def test_a_whole_run_computes_its_networks_on_the_device_and_gives_the_same_files(alone, tmp_path, monkeypatch):
    with counted_device(monkeypatch) as device:
        there = run(method="flare", fusions=FUSIONS, out=tmp_path / "run", **TINY)
    assert device.operations > 1000
    assert there.content.device == NAME
    for name, result in alone.fusions.items():
        assert there.fusions[name].accuracy == result.accuracy, name
    for client in range(3):
        one, other = (
            sorted((folder / f"clients/00{client}").glob("upload.safetensors"))[0].read_bytes()
            for folder in (alone.folder, tmp_path / "run")
        )
        assert one[-4096:] == other[-4096:]  # the tensors; the header says when it was made


@pytest.mark.parametrize("fusion", ["density_ratio", "average"])
def test_a_model_predicts_on_the_device_and_is_saved_from_it(fusion, alone, tmp_path, monkeypatch):
    model = alone.model(fusion)
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    expected = model.predict_proba(images)
    with counted_device(monkeypatch) as device:
        found = model.to(NAME).predict_proba(images)
        assert device.operations > 10
        model.save(tmp_path / "model.safetensors")
    assert found.device.type == "cpu"
    assert torch.equal(found, expected)
    assert torch.equal(load_model(tmp_path / "model.safetensors").predict_proba(images), expected)


def test_two_devices_in_one_operation_are_an_error(monkeypatch):
    with counted_device(monkeypatch) as device:
        encoder = build_encoder({"name": "conv4", "width": 2}, 1).to(NAME)
        with pytest.raises(RuntimeError, match="two devices"):
            encoder(torch.zeros(2, 1, 8, 8))
        before = device.back
        assert encoder(torch.zeros(2, 1, 8, 8).to(NAME)).cpu().device.type == "cpu"
        assert device.back == before + 1


def test_features_of_several_batches_come_back_as_one():
    own = torch.rand(3, 2)
    same = Features.together([Features(own, own).cpu()] * 2)
    assert same.own is same.projected
    assert same.own.shape == (6, 2)
    apart = Features.together([Features(own, own + 1)] * 2)
    assert torch.equal(apart.projected, torch.cat([own, own]) + 1)


def test_features_are_computed_on_the_device_by_one_process(monkeypatch, tmp_path):
    from PIL import Image

    from oneflare.nn.backbones import give_backbone, input_spec

    monkeypatch.setenv("ONEFLARE_CACHE", str(tmp_path / "cache"))
    Image.effect_noise((20, 20), 64).convert("RGB").save(tmp_path / "one.png")
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    spec = give_backbone(network)
    image = input_spec(spec, None, 16)
    files = ImageFiles([tmp_path / "one.png"], ["one"])
    expected, _ = FeatureReader(spec).read(files, image)
    monkeypatch.setenv("ONEFLARE_CACHE", str(tmp_path / "another"))
    with counted_device(monkeypatch) as device:
        found, _ = FeatureReader(spec, NAME).read(files, image)
        assert device.into > 0
        assert torch.equal(found, expected)
