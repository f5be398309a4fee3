"""Federations with a backbone: pinned by the terms, checked by every member, the same by file and in a simulation."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from pydicom import Dataset as Dicom
from pydicom.dataset import FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

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
from shared import forked, oneflare

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
    assert "weights" not in str(yaml.safe_load(text))
    again = read_charter(tmp_path / "federation.yaml")
    assert again.fingerprint == charter.fingerprint
    other = text.partition("\n")[2].replace(LITE0_DIGEST, "ab" * 32)  # the first line holds the fingerprint
    (tmp_path / "federation.yaml").write_text(other)
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
        ({"copies": "turned"}, "copies is not one of none, mirror"),
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
    done = forked("run", *words, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fusions"]["analytic"]["accuracy"] > 0.6
    assert "computing features of 120 images by efficientnet_lite0" in done.stderr


def write_scan(path: Path, pixels: np.ndarray, kind: str) -> None:
    """A grey image `(h, w)` of 8 bits as one of the files that hospitals have: jpeg, png (12 of 16 bits) or dicom."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "jpeg":
        Image.fromarray(pixels).convert("RGB").save(path.with_suffix(".jpg"))
    elif kind == "png":
        Image.fromarray(pixels.astype(np.uint16) * 16).save(path.with_suffix(".png"))
    else:
        scan = Dicom()
        scan.SOPClassUID, scan.SOPInstanceUID, scan.PatientID = SecondaryCaptureImageStorage, generate_uid(), path.stem
        (scan.Rows, scan.Columns), scan.SamplesPerPixel = pixels.shape, 1
        scan.BitsAllocated, scan.BitsStored, scan.HighBit, scan.PixelRepresentation = 16, 12, 11, 0
        scan.PhotometricInterpretation, scan.RescaleSlope, scan.RescaleIntercept = "MONOCHROME1", 1, 0
        scan.PixelData = (4095 - pixels.astype(np.uint16) * 16).tobytes()
        scan.file_meta = FileMetaDataset()
        scan.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        scan.save_as(path.with_suffix(".dcm"), enforce_file_format=True)


KINDS = {"north": "jpeg", "south": "png", "west": "dicom", "test": "jpeg"}


def write_hospitals(folder: Path, each: int, size: tuple[int, int]) -> None:
    """Digits as scans of `size` (width, height): a folder with files of its kind for every member, and one to test."""
    rng = np.random.default_rng(0)
    train, test = digits()
    for number, (who, kind) in enumerate(KINDS.items()):
        split, first = (test, 0) if who == "test" else (train, number * each)
        for row in range(first, first + each):
            shown = Image.fromarray(split.images[row, 0].numpy()).resize(size, Image.Resampling.BICUBIC)
            noisy = np.clip(np.asarray(shown).astype(int) + rng.integers(-8, 9, size[::-1]), 0, 255)
            write_scan(folder / who / str(int(split.labels[row])) / str(row), noisy.astype(np.uint8), kind)


def test_a_scan_gives_the_same_features_whatever_kind_of_file_holds_it(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (45, 60), dtype=np.uint8)
    charter = charter_with("analytic", pixels={"bits": 12})
    for kind in ("png", "dicom"):
        write_scan(tmp_path / kind / "0/scan", pixels, kind)
    png, dicom = (
        read_local(tmp_path / kind, charter.classes, charter.inputs, reader=charter_reader(charter)).split.images
        for kind in ("png", "dicom")
    )
    assert torch.equal(png, dicom)
    assert float(png.std()) > 0


@pytest.mark.soak
def test_three_members_with_large_images_of_several_kinds_by_file_in_little_memory(tmp_path):
    write_hospitals(tmp_path, 60, (600, 450))
    words = ["--classes", ",".join(DIGITS), "--pixels", "bits=12", "backbone=efficientnet_lite0", "method=analytic"]
    assert oneflare("server", "init", "fed", *words, cwd=tmp_path).returncode == 0
    for who in ("north", "south", "west"):
        arguments = ["fed/federation.yaml", "--data", who, "--name", who, "--out", f"up/{who}.safetensors"]
        done = oneflare("client", "train", *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert peak_bytes() < MOST_BYTES
    done = oneflare("server", "fuse", "fed", "--uploads", "up", "--test", "test", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fusions"]["analytic"]["scores"]["accuracy"] > 0.6
    done = oneflare("predict", "fed", "test", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["predictions"]) == 60
    assert peak_bytes() < MOST_BYTES


def peak_bytes() -> int:
    """The largest resident size of any process that this one has started and waited for, and of their children."""
    return 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
