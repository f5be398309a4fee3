"""One federation, two roads: what a member sends by file is, bit for bit, what a simulation would have made of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hospitals import digits, make, rows_of, tiny_charter, write_pngs
from oneflare.client.training import train_client
from oneflare.data import Dataset, Split
from oneflare.errors import ConfigError
from oneflare.federation.member import member_data
from oneflare.methods import METHODS
from oneflare.methods.resolve import resolve
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.upload import read_manifest
from shared import small_map

TINIEST = {
    "encoder": {"name": "conv4", "width": 1, "dim": 16},
    "train": {"epochs": 1, "batch_size": 32, "precision": "float32", "snapshots": 0},
}
NEEDS_PUBLIC_IMAGES = {"public_bank", "two_stage"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_pngs(folder, digits()[0], rows_of(0, 40))
    return folder


def settings_of(method: str) -> dict:
    return TINIEST | small_map(method, 2) | {"method": method}


def simulation(method: str, charter, images, folder) -> Simulation:
    """The same terms and images, as `oneflare run` sets them up."""
    data = member_data(charter, images).data
    split = Split(data.images, data.labels)
    image = charter.image.spec()
    owners = (torch.arange(len(data)).numpy(),)
    dataset = Dataset("arrays", split, split, charter.classes, image, flip=False, owners=owners)
    experiment = resolve(
        settings_of(method), {"data": {"name": "arrays"}, "partition": {"kind": "given", "clients": 1}}
    )
    return Simulation.build(experiment, RunFiles(folder), dataset)


@pytest.mark.parametrize("method", sorted(set(METHODS) - NEEDS_PUBLIC_IMAGES))
def test_by_file_and_in_a_simulation_uploads_are_the_same(method, images, tmp_path):
    charter = tiny_charter(settings=settings_of(method))
    run = simulation(method, charter, images, tmp_path / "run")
    assert replace(run.contract, federation=charter.fingerprint) == charter.contract
    start, shared = run.template().state_dict(), charter.template().state_dict()
    assert start.keys() == shared.keys()
    assert all(torch.equal(start[name], shared[name]) for name in start)
    sent = make(charter, images, tmp_path / "north.safetensors", "north")
    job = replace(run.clients.job(0), client=charter.client("north"))
    assert train_client(job, run.clients.data(0)).status == "trained"
    one, other = read_manifest(sent), read_manifest(job.folder / "upload.safetensors")
    assert one["tensors"] == other["tensors"]
    assert len(one["tensors"]) >= 3
    assert {key: one[key] for key in ("samples", "epoch", "trust", "counts", "encoder_hash")} == {
        key: other[key] for key in ("samples", "epoch", "trust", "counts", "encoder_hash")
    }


@pytest.mark.parametrize("method", sorted(NEEDS_PUBLIC_IMAGES))
def test_a_method_with_public_images_has_none_by_file_and_says_so(method):
    with pytest.raises(ConfigError, match="public"):
        tiny_charter(settings=settings_of(method))
