"""Federations whose members train the last block of a backbone: by file, from the terms to an answer about an image."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hospitals import DIGITS, digits, make, rows_of, typed, write_pngs
from oneflare.core.files import load_state, save_state
from oneflare.errors import ConfigError, OneFlareError, UploadError
from oneflare.federation.charter import new_charter, read_charter
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.member import charter_reader, member_data
from oneflare.fusion import load_model
from oneflare.fusion.single_upload import model_of_upload
from oneflare.nn import backbone_kinds
from oneflare.nn.backbones import frozen, pinned
from oneflare.upload import read_manifest, read_upload
from oneflare.upload.disclosure import disclose

SETTINGS = {
    "method": "flare",
    "backbone": {"name": "efficientnet_lite0", "tune": "last"},
    "encoder": {"name": "mlp", "width": 16},
    "train": {"epochs": 3, "snapshots": 0, "precision": "float32"},
}
TAIL = 1_013_696
HEAD = 1280 * 16 + 16


def charter_with(**change):
    return new_charter("tuned", SETTINGS | change, classes=DIGITS, image={"size": 32})


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEFLARE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Two members whose uploads are fused; the folder with everything."""
    folder, (train, test) = tmp_path_factory.mktemp("tuned"), digits()
    charter = charter_with()
    charter.write(folder / "fed/federation.yaml")
    for number, name in enumerate(("north", "south")):
        write_pngs(folder / name, train, rows_of(number, 50))
        make(charter, folder / name, folder / f"up/{name}.safetensors", name)
    write_pngs(folder / "test", test, range(30))
    fuse_federation(folder / "fed", uploads=folder / "up")
    return folder


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_the_terms_name_the_block_and_the_digest_and_another_block_is_another_federation(federation):
    charter = read_charter(federation / "fed/federation.yaml")
    assert charter.terms.backbone["tune"] == "blocks.15"
    text = (federation / "fed/federation.yaml").read_text()
    assert text.count("tune: blocks.15") == 1
    (federation / "other.yaml").write_text(text.replace("tune: blocks.15", "tune: head"))
    with pytest.raises(ConfigError, match="was cut off or changed"):
        read_charter(federation / "other.yaml")
    other = charter_with(backbone={"name": "efficientnet_lite0", "tune": "head"})
    assert (charter.inputs.channels, other.inputs.channels) == (192, 320)


def test_an_upload_holds_the_trained_block_and_the_head_and_never_the_trunk(federation):
    sent = {name: tensors(federation / f"up/{name}.safetensors") for name in ("north", "south")}
    network = {name: value for name, value in sent["north"].items() if name.startswith("encoder.")}
    assert sum(value.numel() for value in network.values()) == TAIL + HEAD
    assert {".".join(name.split(".")[:4]) for name in network if "tail" in name} == {
        "encoder.tail.blocks.15", "encoder.tail.head.weight", "encoder.tail.head.bias",
    }  # fmt: skip
    size = (federation / "up/north.safetensors").stat().st_size
    assert 4 * (TAIL + HEAD) < size < 4 * (TAIL + HEAD) + 40_000
    start = charter_with().template().encoder.state_dict()
    for name, value in network.items():
        begun = start[name.removeprefix("encoder.")]
        assert not torch.equal(value, begun), name  # it was trained
        assert not torch.equal(value, sent["south"][name]), name  # and by each member on its own
    assert float((network["encoder.tail.head.weight"] - start["tail.head.weight"]).abs().max()) < 1


def test_nothing_that_members_do_changes_the_trunk(federation):
    charter = read_charter(federation / "fed/federation.yaml")
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    before = frozen(charter.inputs.backbone, "cpu", None)(images)
    make(charter, federation / "north", federation / "again.safetensors", "north")
    frozen.cache_clear()
    assert torch.equal(before, frozen(charter.inputs.backbone, "cpu", None)(images))
    one, two = (read_manifest(federation / name) for name in ("again.safetensors", "up/north.safetensors"))
    assert one["tensors"] == two["tensors"]


def test_the_fused_model_answers_about_image_files_and_can_be_exported_and_forget(federation, tmp_path, capsys):
    charter = read_charter(federation / "fed/federation.yaml")
    shutil.copytree(federation, tmp_path / "copy")
    here = tmp_path / "copy"
    code, out, _ = typed(capsys, "predict", str(here / "fed"), str(here / "test"), "--json")
    rows = json.loads(out)["predictions"]
    assert (code, len(rows)) == (0, 30)
    code, out, _ = typed(capsys, "evaluate", str(here / "fed"), "--data", str(here / "test"), "--json")
    assert code == 0
    right = np.mean([row["class"] == Path(row["image"]).parent.name for row in rows])
    assert json.loads(out)["accuracy"] == pytest.approx(right)
    assert right > 0.3  # 0.1 by chance
    code, out, _ = typed(capsys, "export", str(here / "fed"), "--onnx", str(tmp_path / "model.onnx"))
    assert code == 0
    assert (tmp_path / "model.onnx").stat().st_size > 4 * 2 * TAIL  # both members' blocks, and the trunk once
    held_out = member_data(charter, here / "test", reader=charter_reader(charter))[0]
    left = fuse_federation(here / "fed", remove=["north"])
    assert [one["name"] for one in left.content.to_dict()["members"]] == ["south"]
    alone, own = load_model(here / "fed/model.safetensors"), model_of_upload(here / "up/south.safetensors")
    assert len(alone.members) == 1
    weights = alone.members[0].weights()
    assert all(torch.equal(value, own.network.encoder.state_dict()[name]) for name, value in weights.items())
    assert len(alone.predict(held_out.images)) == 30


def test_the_model_gives_the_same_from_pixels_and_from_what_the_cache_holds(federation):
    charter = read_charter(federation / "fed/federation.yaml")
    model = load_model(federation / "fed/model.safetensors")
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(
        model.predict_proba(images), model.predict_proba(frozen(charter.inputs.backbone, "cpu", None)(images))
    )


def test_an_upload_says_in_words_what_was_trained(federation):
    (network,) = [field for field in disclose(federation / "up/north.safetensors").fields if field.name == "network"]
    assert "1,034,192 trained numbers (mlp, and efficientnet_lite0 from its module blocks.15 on)" in network.holds


def test_a_dry_run_says_how_long_without_computing_anything(federation):
    charter = read_charter(federation / "fed/federation.yaml")
    found = member_data(charter, federation / "south", reader=charter_reader(charter, rehearse=True))[0]
    assert (found.images.shape[1:], found.images.dtype) == ((192, 1, 1), torch.float16)


@pytest.mark.parametrize("change", [{"backbone": {"name": "efficientnet_lite0"}}, {"seed": 4}])
def test_an_upload_of_another_federation_is_refused(federation, change):
    contract = charter_with(**change).contract
    with pytest.raises(UploadError, match=r"was it made for another one|exceed the limit"):
        read_upload(federation / "up/north.safetensors", contract)


def test_a_block_of_another_shape_or_with_damaged_numbers_is_refused(federation, tmp_path):
    contract = read_charter(federation / "fed/federation.yaml").contract
    path = federation / "up/north.safetensors"
    other = charter_with(backbone={"name": "efficientnet_lite0", "tune": "head"}).contract
    with pytest.raises(UploadError):
        read_upload(path, replace(other, federation=contract.federation))
    content = bytearray(path.read_bytes())
    content[-2_000_000] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(content)
    with pytest.raises(UploadError, match="digest"):
        read_upload(tmp_path / "damaged.safetensors", contract).weights()


def test_a_model_file_with_a_foreign_block_is_refused(federation, tmp_path):
    model = load_state(federation / "fed/model.safetensors")
    for name, tune, message in (
        ("unknown", "blocks.99", "has no module 'blocks.99'"),
        ("later", "head", "do not fit each other"),
        ("strange", "a\nb", "printable word"),
    ):
        model["task"]["image"]["backbone"]["tune"] = tune
        save_state(tmp_path / f"{name}.safetensors", model)
        with pytest.raises(OneFlareError, match=message) as error:
            load_model(tmp_path / f"{name}.safetensors")
        assert "\n" not in str(error.value)


def test_without_the_backbones_weights_everybody_gets_one_line_with_the_remedy(federation, monkeypatch):
    charter = charter_with()
    pinned(charter.terms.backbone)
    monkeypatch.setattr(backbone_kinds, "LITE0_PACKAGE", "a_package_that_is_not_installed")
    frozen.cache_clear()
    for work in (
        lambda: member_data(charter, federation / "north", reader=charter_reader(charter)),
        lambda: load_model(federation / "fed/model.safetensors"),
    ):
        with pytest.raises(ConfigError, match=r"SHA-256 .*this machine does not have it; pip install"):
            work()
    frozen.cache_clear()
