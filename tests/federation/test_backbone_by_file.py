"""Federations with a backbone: pinned by the terms, checked by every member, the same by file and in a simulation."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hospitals import DIGITS, digits, make, rows_of, write_pngs
from oneflare.client.training import train_client
from oneflare.data import Dataset
from oneflare.data.local import read_local
from oneflare.errors import ConfigError
from oneflare.federation.charter import new_charter, read_charter
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.member import charter_reader, member_data
from oneflare.fusion import load_model
from oneflare.methods.resolve import resolve
from oneflare.models.checking import check_task
from oneflare.models.predicting import classify
from oneflare.nn import backbone_kinds
from oneflare.nn.backbone_kinds import LITE0_DIGEST
from oneflare.nn.backbones import frozen
from oneflare.simulation.features import reader_for
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.upload import read_manifest
from shared import oneflare

BACKBONE = {"backbone": "efficientnet_lite0", "train": {"epochs": 2, "snapshots": 0, "precision": "float32"}}
MOST_BYTES = 1_500_000_000


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEFLARE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_pngs(folder, digits()[0], rows_of(0, 40))
    return folder


def charter_with(method: str, **image):
    return new_charter("photos", BACKBONE | {"method": method}, classes=DIGITS, image={"size": 32} | image)


@pytest.mark.parametrize("method", ["analytic", "flare"])
def test_by_file_and_in_a_simulation_uploads_are_the_same(method, images, tmp_path):
    charter = charter_with(method)
    given = {"data": {"name": "arrays"}, "partition": {"kind": "given", "clients": 1}}
    experiment = resolve(BACKBONE | {"method": method}, given)
    split = read_local(images, charter.classes, charter.inputs, reader=reader_for(experiment)).split
    owners = (torch.arange(len(split.labels)).numpy(),)
    dataset = Dataset("arrays", split, split, charter.classes, charter.inputs, flip=False, owners=owners)
    run = Simulation.build(experiment, RunFiles(tmp_path / "run"), dataset)
    assert replace(run.contract, federation=charter.fingerprint) == charter.contract
    sent = make(charter, images, tmp_path / "north.safetensors", "north")
    job = replace(run.clients.job(0), client=charter.client("north"))
    assert train_client(job, run.clients.data(0)).status == "trained"
    one, other = read_manifest(sent), read_manifest(job.folder / "upload.safetensors")
    assert one["tensors"] == other["tensors"]
    assert one["image"]["backbone"]["digest"] == LITE0_DIGEST
    assert not any("stem" in name or "blocks" in name for name in one["tensors"])  # the backbone stays at home


def test_terms_pin_the_digest_and_not_the_place_of_the_weights(tmp_path):
    charter = charter_with("analytic")
    charter.write(tmp_path / "federation.yaml")
    text = (tmp_path / "federation.yaml").read_text()
    assert LITE0_DIGEST in text
    assert "weights" not in text
    again = read_charter(tmp_path / "federation.yaml")
    assert again.fingerprint == charter.fingerprint
    (tmp_path / "federation.yaml").write_text(text.replace(LITE0_DIGEST, "ab" * 32))
    assert read_charter(tmp_path / "federation.yaml").fingerprint != charter.fingerprint


def test_the_size_is_the_backbones_own_unless_the_terms_say_otherwise():
    settings = BACKBONE | {"method": "analytic"}
    assert new_charter("photos", settings, classes=DIGITS).image.size == 224
    assert charter_with("analytic", size=512).inputs.decoded.size == 512
    assert new_charter("photos", {"method": "analytic"}, classes=DIGITS).image.size == 32


def test_a_member_without_the_agreed_weights_is_told_before_any_work(images, monkeypatch):
    charter = charter_with("analytic")
    monkeypatch.setattr(backbone_kinds, "LITE0_PACKAGE", "a_package_that_is_not_installed")
    frozen.cache_clear()
    with pytest.raises(ConfigError, match=f"SHA-256 {LITE0_DIGEST}.*this machine does not have it"):
        member_data(charter, images, reader=charter_reader(charter))


def test_a_fused_model_classifies_image_files_through_the_backbone(tmp_path):
    charter, (train, test) = charter_with("analytic"), digits()
    charter.write(tmp_path / "fed/federation.yaml")
    for number, name in enumerate(("north", "south")):
        write_pngs(tmp_path / name, train, rows_of(number))
        make(charter, tmp_path / name, tmp_path / f"up/{name}.safetensors", name)
    write_pngs(tmp_path / "test", test, range(40))
    held_out = read_local(tmp_path / "test", charter.classes, charter.inputs, reader=charter_reader(charter)).split
    fused = fuse_federation(tmp_path / "fed", uploads=tmp_path / "up", test=held_out)
    measured = fused.content.to_dict()["fusions"]["analytic"]["scores"]["accuracy"]
    assert measured > 0.5
    model = load_model(tmp_path / "fed/model.safetensors")
    files = sorted((tmp_path / "test").rglob("*.png"))
    rows = list(classify(model, files))
    right = sum(row["class"] == Path(row["image"]).parent.name for row in rows)
    assert right / len(rows) == pytest.approx(measured)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "short"}, "not a SHA-256"),
        ({"name": "a\nb"}, "printable word"),
        ({"name": 3}, "printable word"),
        ({"image": {"channels": 3, "size": 0, "mean": [0.5] * 3, "std": [1.0] * 3}}, "not a whole number"),
        ({"image": {"channels": 3, "size": 8, "mean": [0.5] * 3, "std": [1.0] * 3, "crop": {"part": 2.0}}}, "crop"),
        ({"image": 5}, "not a mapping"),
    ],
)
def test_damaged_fields_of_a_backbone_are_refused(change, message):
    inputs = charter_with("analytic").inputs
    image = inputs.to_dict()
    task = {"encoder": {"name": "mlp"}, "image": image, "classes": ["a", "b"], "dim": 8}
    check_task(task)
    with pytest.raises(ValueError, match=message):
        check_task(task | {"image": image | {"backbone": image["backbone"] | change}})
    with pytest.raises(ValueError, match="behind another backbone"):
        check_task(task | {"image": image | {"backbone": image["backbone"] | {"image": image}}})


def test_the_command_runs_a_simulation_on_features(tmp_path):
    words = ["backbone=efficientnet_lite0", "method=analytic", "data=digits", "data.train_size=120"]
    words += ["data.test_size=60", "data.image_size=32", "workers=1", "--json"]
    done = oneflare("run", *words, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fusions"]["analytic"]["accuracy"] > 0.6
    assert "computing features of 120 images by efficientnet_lite0" in done.stderr


@pytest.mark.soak
def test_three_members_with_large_images_of_several_kinds_by_file_in_little_memory(tmp_path):
    rng = np.random.default_rng(0)
    train, test = digits()
    for number, who in enumerate(("north", "south", "west", "test")):
        split = test if who == "test" else train
        for row in range(number * 60, number * 60 + 60) if who != "test" else range(60):
            folder = tmp_path / who / str(int(split.labels[row]))
            folder.mkdir(parents=True, exist_ok=True)
            shown = Image.fromarray(split.images[row, 0].numpy()).resize((600, 450), Image.Resampling.BICUBIC)
            noisy = np.clip(np.asarray(shown).astype(int) + rng.integers(-8, 9, (450, 600)), 0, 255)
            if who == "south":
                Image.fromarray((noisy * 16).astype(np.uint16)).save(folder / f"{row}.png")
            else:
                Image.fromarray(noisy.astype(np.uint8)).convert("RGB").save(folder / f"{row}.jpg")
    words = ["--classes", ",".join(DIGITS), "--pixels", "bits=12", "backbone=efficientnet_lite0", "method=analytic"]
    assert oneflare("server", "init", "fed", *words, cwd=tmp_path).returncode == 0
    for who in ("north", "south", "west"):
        arguments = ["fed/federation.yaml", "--data", who, "--name", who, "--out", f"up/{who}.safetensors"]
        done = oneflare("client", "train", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = oneflare("server", "fuse", "fed", "--uploads", "up", "--test", "test", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fusions"]["analytic"]["scores"]["accuracy"] > 0.6
    done = oneflare("predict", "fed", "test", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["predictions"]) == 60
    assert 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < MOST_BYTES
