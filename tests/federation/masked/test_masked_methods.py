"""Masked sums beside networks: the statistics of flare_analytic, and class counts of methods that only train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hospitals import digits, tiny_charter
from oneflare.data import ClientData, Split
from oneflare.errors import ConfigError, RunError, UploadError
from oneflare.federation.charter import FILE, Charter, revised
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.masked.enrolment import enrol, next_roster
from oneflare.federation.masked.release import release
from oneflare.federation.masked.rounds import RoundFiles, close_round
from oneflare.federation.masked.secret import MaskSecrets
from oneflare.federation.masked.uploading import Masking
from oneflare.federation.member import Envelope, make_upload_in, upload_size
from oneflare.federation.model_signing import PRIVATE, make_key
from oneflare.federation.page import card
from oneflare.federation.quorum import Rules
from oneflare.fusion import UploadSet, build_fusion, load_model
from oneflare.fusion.single_upload import model_of_upload
from oneflare.upload import read_tensors, read_upload
from oneflare.upload.checking import read_manifest
from oneflare.upload.masking.fixed_point import from_vector
from oneflare.upload.signing import read_key

NAMES = ("a", "b", "c")


def images(index: int) -> ClientData:
    split, _ = digits()
    rows = slice(50 * index, 50 * index + 50)
    return ClientData.of(Split(split.images[rows], split.labels[rows]), 10)


def masked_federation(root: Path, settings: dict) -> tuple[Charter, dict[str, Masking]]:
    """Three members without signing keys, a roster, their uploads in `inbox`."""
    folder = root / "fed"
    folder.mkdir()
    tiny = {"encoder": {"name": "conv4", "width": 4}, "train": {"epochs": 1, "batch_size": 32}}
    charter = revised(tiny_charter(settings=tiny | settings), coordinator=make_key(folder))
    masks = {}
    for name in NAMES:
        secrets = MaskSecrets(root / f"{name}.mask")
        masks[name] = Masking(secrets, secrets.create())
    joined = [enrol(charter, name, 60, mask.key, None) for name, mask in masks.items()]
    charter = next_roster(charter, joined, (), read_key(folder / PRIVATE))
    charter.write(folder / FILE)
    for index, name in enumerate(NAMES):
        out = root / "inbox" / f"{name}.safetensors"
        make_upload_in(Envelope(name, None, (), masks[name]), charter, images(index), out)
    return charter, masks


def fused(root: Path, charter: Charter, masks: dict[str, Masking]):
    close_round(root / "fed", root / "inbox")
    for name in NAMES[1:]:  # two of three are enough, because nobody is missing
        out = root / "releases" / f"{name}.release.json"
        release(charter, RoundFiles(root / "fed").request, out, name, masks[name])
    return fuse_federation(root / "fed", rules=Rules(releases=root / "releases"))


def plain_vector(root: Path, name: str) -> torch.Tensor:
    path = root / "inbox" / f"{name}.work" / "upload.safetensors"
    return read_tensors(path, read_manifest(path), "statistics.")["statistics.fixed"]


def test_networks_travel_plain_beside_masked_statistics(tmp_path):
    analytic = {"name": "random_conv", "filters": 2, "colour_grid": 1}
    settings = {"method": "flare_analytic", "analytic": analytic, "upload": {"masked": True, "counts": "exact"}}
    charter, masks = masked_federation(tmp_path, settings)
    upload = tmp_path / "inbox" / "a.safetensors"
    assert abs(upload.stat().st_size - upload_size(charter)) < 4000
    found = fused(tmp_path, charter, masks)
    assert [row.samples for row in found.content.members] == [50, 50, 50]
    total = sum(plain_vector(tmp_path, name) for name in NAMES)
    uploads = tuple(
        read_upload(RoundFiles(tmp_path / "fed").uploads / f"{name}.safetensors", charter.masked_contract)
        for name in NAMES
    )
    contract = charter.contract
    plain = UploadSet(
        uploads,
        charter.masked_contract,
        charter.template(),
        total=from_vector(total, 10, contract.statistics.dim, contract.fixed),
    )
    expected = build_fusion(charter.terms.fusions[0]).fuse(plain).model
    test = digits()[1].images[:40]
    assert torch.equal(
        load_model(tmp_path / "fed" / "model.safetensors").predict_proba(test), expected.predict_proba(test)
    )
    with pytest.raises(UploadError, match="only the total of everybody"):
        plain.without({uploads[0].client}).statistics()
    with pytest.raises(UploadError, match="holds no plain statistics"):
        uploads[0].statistics()
    assert model_of_upload(upload).predict(test).shape == (40,)


def test_methods_that_only_train_give_the_total_of_their_class_counts(tmp_path):
    charter, masks = masked_federation(
        tmp_path, {"method": "fafi", "fusions": ["feature_mean"], "upload": {"masked": True}}
    )
    found = fused(tmp_path, charter, masks)
    counts = sum(images(index).counts for index in range(3)).long().tolist()
    assert list(found.content.masked.counts) == counts
    assert all(member.counts is None and member.samples == 60 for member in found.content.members)
    text = card(charter, found.content)
    assert "Fewer than 20 images in all: 0" in text
    assert "withheld: nobody can say" not in text


def test_class_means_come_from_the_total_too(tmp_path):
    """A method that needs sums of classes alone is fused from the same total."""
    analytic = {"name": "random_conv", "filters": 1, "colour_grid": 0}
    terms = {"method": "analytic", "analytic": analytic, "fusions": ["fedncm"], "upload": {"masked": True}}
    charter, masks = masked_federation(tmp_path, terms)
    found = fused(tmp_path, charter, masks)
    total = sum(plain_vector(tmp_path, name) for name in NAMES)
    plan, fixed = charter.contract.statistics, charter.contract.fixed
    sums = from_vector(total, 10, plan.dim, fixed)
    expected = sums.sums / sums.counts.clamp(min=1)[:, None]
    assert list(found.content.fusions) == ["fedncm"]
    uploads = tuple(
        read_upload(RoundFiles(tmp_path / "fed").uploads / f"{name}.safetensors", charter.masked_contract)
        for name in NAMES
    )
    collected = UploadSet(uploads, charter.masked_contract, charter.template(), total=sums)
    assert torch.equal(collected.class_means().means, expected)
    with pytest.raises(ConfigError, match="masked sums are G, b and n"):
        tiny_charter(settings=terms | {"upload": {"masked": True, "statistics": ["mixtures"]}})


def test_a_masked_upload_of_sums_alone_gives_no_model(tmp_path):
    analytic = {"name": "random_conv", "filters": 1, "colour_grid": 0}
    charter, masks = masked_federation(
        tmp_path, {"method": "analytic", "analytic": analytic, "upload": {"masked": True}}
    )
    with pytest.raises(UploadError, match="gives no model alone"):
        model_of_upload(tmp_path / "inbox" / "a.safetensors")
    rich = revised(charter, experiment=charter.experiment | {"fusions": [{"name": "analytic", "leave_out": True}]})
    rich.write(tmp_path / "fed" / FILE)
    with pytest.raises(UploadError, match="cannot be left out of masked sums"):
        fused(tmp_path, rich, masks)


def test_members_that_enrolled_for_too_many_images_are_told_before_anything_is_signed(tmp_path):
    folder = tmp_path / "fed"
    folder.mkdir()
    analytic = {"name": "random_conv", "filters": 1}
    terms = {"method": "analytic", "analytic": analytic, "upload": {"masked": {"bits": 20}}}
    charter = revised(tiny_charter(settings=terms), coordinator=make_key(folder))
    keys = [MaskSecrets(tmp_path / f"{name}.mask").create() for name in NAMES]
    joined = [enrol(charter, name, 10**9, key, None) for name, key in zip(NAMES, keys, strict=True)]
    with pytest.raises(ConfigError, match="3000000000 images could overflow"):
        next_roster(charter, joined, (), read_key(folder / PRIVATE))
    few = [row.model_copy(update={"images": 1000}) for row in joined]
    made = next_roster(charter, few, (), read_key(folder / PRIVATE)).roster
    assert (made.threshold, made.number, made.images) == (2, 1, 3000)
    high = revised(charter, experiment=charter.experiment | {"upload": {"masked": {"bits": 20, "threshold": 4}}})
    again = [enrol(high, name, 10, key, None) for name, key in zip(NAMES, keys, strict=True)]
    with pytest.raises(RunError, match="needs 4 to open a total"):
        next_roster(high, again, (), read_key(folder / PRIVATE))
