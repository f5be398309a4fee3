from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conftest import same_answers
from oneflare.core.config import DataConfig, UploadConfig
from oneflare.core.files import load_state, save_state
from oneflare.data import ImageSpec, load, prepare
from oneflare.errors import ConfigError, DataError, RunError, UploadError
from oneflare.fusion import (
    FUSIONS,
    UploadSet,
    build_fusion,
    check_needs,
    load_model,
    logits_of_all,
    offered_fields,
)
from oneflare.fusion.features.sums import counted_prototypes, noise_features
from oneflare.models.base import Task
from oneflare.models.members import Member, MemberModel
from oneflare.models.rules.redistribution import Redistribution
from oneflare.models.rules.sums import EVEN, STRETCH, BoundedFeatureSum, FeatureSum, informative_weights
from oneflare.models.rules.votes import ProbabilityMean
from oneflare.upload import Contents, read_upload, write_upload

IMAGES = load(DataConfig(test_size=40)).test.images
BUILT = {name: build_fusion({"name": name}) for name in FUSIONS}
PLAIN = {"weights", "prototypes", "counts"}
"""what every upload of the tiny run holds"""
DEEP = [name for name, fusion in BUILT.items() if fusion.needs <= PLAIN and not fusion.trains]


def fuse(name: str, uploads: UploadSet):
    return build_fusion({"name": name}).fuse(uploads).model


def raw_features(uploads: UploadSet) -> list[torch.Tensor]:
    inputs = prepare(IMAGES, uploads.contract.image)
    with torch.no_grad():
        return [encoder(inputs) for encoder in uploads.encoders()]


def unit_features(uploads: UploadSet) -> list[torch.Tensor]:
    return [F.normalize(features, dim=1) for features in raw_features(uploads)]


def released_fafi(networks: list[torch.nn.Module], weights: torch.Tensor, inputs: torch.Tensor, prototypes):
    """The server of FAFI's released code, line by line: raw features are summed, and only the sum is normalised."""
    total = torch.zeros(len(inputs), prototypes.shape[1])
    for network, weight in zip(networks, weights, strict=True):
        total = total + weight * network(inputs)
    return (total / total.norm(dim=1, keepdim=True)) @ prototypes.T


@pytest.fixture
def twins(tiny_uploads, tmp_path):
    """Three uploads of one and the same model."""
    network = copy.deepcopy(tiny_uploads.template)
    network.encoder.load_state_dict(tiny_uploads.uploads[0].weights())
    uploads = []
    for client, size in enumerate((5, 50, 500)):
        path = tmp_path / f"{client}.safetensors"
        write_upload(
            path, network, tiny_uploads.contract, Contents(client=client, counts=torch.full((10,), size), epoch=1)
        )
        uploads.append(read_upload(path, tiny_uploads.contract))
    return UploadSet(tuple(uploads), tiny_uploads.contract, tiny_uploads.template), network.eval()


WHOLE = {"ties": {"density": 1.0}, "dare": {"drop": 0.0}, "trainable_prototypes": {"steps": 0}}
"""options under which a fusion leaves out nothing of a model and adds nothing of its own"""


@pytest.mark.numeric
@pytest.mark.parametrize("name", [name for name in DEEP if name != "standardised_batch"])  # depends on the other images
def test_identical_models_fuse_to_themselves(name, twins):
    uploads, network = twins
    with torch.no_grad():
        features = network(prepare(IMAGES, uploads.contract.image))
    prototypes = network.prototypes.detach()
    if name in ("count_prototypes", "median_prototypes", "robust_prototypes"):  # bring all prototypes to one length
        prototypes = F.normalize(prototypes, dim=1)
    model = build_fusion({"name": name, **WHOLE.get(name, {})}).fuse(uploads).model
    assert same_answers(model.predict(IMAGES), features @ prototypes.T)


def test_average_of_identical_models_is_the_model(twins):
    uploads, network = twins
    fused = fuse("average", uploads).network
    for name, tensor in network.state_dict().items():
        assert torch.allclose(fused.state_dict()[name].double(), tensor.double(), rtol=1e-6)


def test_average_weighs_by_size(tiny_uploads):
    fused = fuse("average", tiny_uploads).network
    weights = tiny_uploads.size_weights
    name = "layers.0.weight"
    expected = sum(w * upload.weights()[name].double() for w, upload in zip(weights, tiny_uploads, strict=True))
    assert torch.allclose(fused.encoder.state_dict()[name].double(), expected, atol=1e-7)
    assert float(weights.sum()) == pytest.approx(1)


def test_ensemble_is_the_weighted_mean_of_probabilities(tiny_uploads):
    expected = sum(
        float(weight) * (features @ upload.prototypes.T).softmax(1)
        for weight, features, upload in zip(
            tiny_uploads.size_weights, unit_features(tiny_uploads), tiny_uploads, strict=True
        )
    )
    assert torch.allclose(fuse("ensemble", tiny_uploads).predict_proba(IMAGES), expected, atol=1e-5)


def encoders_of(uploads: UploadSet) -> list[torch.nn.Module]:
    return [copy.deepcopy(encoder) for encoder in uploads.encoders()]


@torch.no_grad()
def test_feature_mean_is_the_released_formula_on_real_uploads(tiny_uploads):
    mean = torch.stack([upload.prototypes for upload in tiny_uploads]).mean(0)
    inputs, weights = prepare(IMAGES, tiny_uploads.contract.image), tiny_uploads.size_weights.float()
    expected = released_fafi(encoders_of(tiny_uploads), weights, inputs, mean)
    assert torch.allclose(fuse("feature_mean", tiny_uploads).logits(IMAGES), expected, atol=1e-4)
    unit = F.normalize(sum(w * z for w, z in zip(weights, unit_features(tiny_uploads), strict=True)), dim=1) @ mean.T
    assert not torch.allclose(fuse("feature_mean", tiny_uploads).logits(IMAGES), unit, atol=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_counted_prototypes_of_random_networks_are_the_literal_formula(seed, tiny_uploads, tmp_path):
    """Networks that answer with features of very different lengths."""
    generator = torch.Generator().manual_seed(seed)
    uploads, counts = [], torch.randint(0, 90, (3, 10), generator=generator)
    for client in range(3):
        network = copy.deepcopy(tiny_uploads.template)
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.5 + client / 2))
        path = tmp_path / f"{client}.safetensors"
        write_upload(path, network, tiny_uploads.contract, Contents(client=client, counts=counts[client], epoch=1))
        uploads.append(read_upload(path, tiny_uploads.contract))
    uploads = UploadSet(tuple(uploads), tiny_uploads.contract, tiny_uploads.template)
    rows = []
    for label in range(10):
        n = counts[:, label].float()
        row = (n[:, None] * uploads.prototypes[:, label]).sum(0) / n.sum()
        rows.append(row / row.norm())
    prototypes = uploads.prototypes.norm(dim=2).mean() * torch.stack(rows)
    weights = counts.sum(1) / counts.sum()
    inputs = prepare(IMAGES, uploads.contract.image)
    lengths = torch.stack([features.norm(dim=1).median() for features in raw_features(uploads)])
    assert lengths.max() > 3 * lengths.min()
    found = fuse("count_prototypes", uploads).logits(IMAGES)
    assert torch.allclose(found, released_fafi(encoders_of(uploads), weights, inputs, prototypes), rtol=1e-3, atol=1e-3)


def test_iffi_released_is_an_unweighted_sum_and_iffi_proper_is_not(tiny_uploads):
    features = raw_features(tiny_uploads)
    mean = tiny_uploads.prototypes.mean(0)
    released = fuse("iffi_released", tiny_uploads).logits(IMAGES)
    assert torch.allclose(released, F.normalize(sum(features), dim=1) @ mean.T, atol=1e-5)
    noise = noise_features(tiny_uploads, 0)
    unit = unit_features(tiny_uploads)
    cosines = [z @ F.normalize(n, dim=0) for z, n in zip(unit, noise, strict=True)]
    weighted = sum((1 - cosine)[:, None] * f for cosine, f in zip(cosines, features, strict=True))
    proper = fuse("iffi", tiny_uploads).logits(IMAGES)
    assert torch.allclose(proper, F.normalize(weighted, dim=1) @ mean.T, atol=1e-5)
    assert not torch.allclose(proper, released, atol=1e-3)


def test_informative_weights_are_per_sample():
    noise = torch.tensor([1.0, 0.0])
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert informative_weights(features, noise).tolist() == pytest.approx([0, 1, 2])


def test_the_count_rule_by_hand():
    prototypes = torch.tensor([[[1.0, 0.0], [9.0, 9.0], [2.0, 2.0]], [[5.0, 4.0], [0.0, 3.0], [4.0, 0.0]]])
    counts = torch.tensor([[3.0, 0.0, 0.0], [1.0, 7.0, 0.0]])
    expected = torch.tensor([[2.0, 1.0], [0.0, 3.0], [3.0, 1.0]])
    assert torch.allclose(counted_prototypes(prototypes, counts), expected)


@pytest.mark.numeric
@pytest.mark.parametrize("name", DEEP)
def test_batch_size_does_not_change_predictions(name, tiny_uploads):
    model = fuse(name, tiny_uploads)
    for batch_size in (1, 7, 256):
        assert same_answers(model.predict(IMAGES, batch_size=batch_size), model.logits(IMAGES))


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("embed", [True, False])
def test_models_are_saved_and_loaded(name, embed, tiny_uploads, tmp_path):
    model = fuse(name, tiny_uploads)
    model.save(tmp_path / "model.safetensors", embed=embed)
    again = load_model(tmp_path / "model.safetensors")
    assert torch.equal(again.logits(IMAGES), model.logits(IMAGES))
    assert again.cost == model.cost
    assert again.task == model.task


def test_shared_pass_equals_separate_passes(tiny_uploads):
    models = {name: fuse(name, tiny_uploads) for name in DEEP}
    together = logits_of_all(models, IMAGES, batch_size=16)
    for name, model in models.items():
        assert torch.allclose(together[name], model.logits(IMAGES, batch_size=16))


def test_cost_counts_every_member(tiny_uploads):
    single, several = fuse("average", tiny_uploads), fuse("feature_mean", tiny_uploads)
    assert single.cost.forward_passes == 1
    assert several.cost.forward_passes == 3
    assert several.cost.parameters > 2 * single.cost.parameters


def test_needs_are_checked_before_training():
    offered = offered_fields(UploadConfig(counts="withheld"))
    check_needs([{"name": "feature_mean"}], offered)
    with pytest.raises(ConfigError, match="count_prototypes needs counts"):
        check_needs([{"name": "count_prototypes"}], offered)


def test_withheld_counts_are_named_at_fusion(tiny_uploads):
    first = tiny_uploads.uploads[0]
    hidden = dataclasses.replace(first, counts=None)
    uploads = UploadSet((hidden, *tiny_uploads.uploads[1:]), tiny_uploads.contract, tiny_uploads.template)
    with pytest.raises(UploadError, match="class counts were withheld"):
        fuse("count_prototypes", uploads)


def test_mistakes_are_explained(tiny_uploads, tmp_path):
    model = fuse("feature_mean", tiny_uploads)
    with pytest.raises(DataError, match="the model takes"):
        model.predict(torch.zeros(2, 3, 8, 8))
    with pytest.raises(RunError, match="no model at"):
        load_model(tmp_path / "nothing")
    (tmp_path / "broken").write_bytes(b"12345678901234")
    with pytest.raises(RunError, match="is damaged"):
        load_model(tmp_path / "broken")
    with pytest.raises(UploadError, match="no upload to fuse"):
        UploadSet((), tiny_uploads.contract, tiny_uploads.template)


class Answers(torch.nn.Module):
    """An encoder whose feature is the image's first pixel times a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images[:, 0, :1, 0] * self.scale


PIXEL = ImageSpec(1, 8, (0.0,), (1.0,))


def model_of(rule, *weights: list[float]) -> MemberModel:
    members = [Member(Path(), str(i), partial(dict, {"scale": torch.tensor(w)})) for i, w in enumerate(weights)]
    return MemberModel(Task({"name": "custom"}, PIXEL, ("a", "b"), 2), members, rule, Answers())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["features", "bounded", "probabilities", "redistribution"])
def test_a_member_without_a_usable_feature_has_no_say_in_that_answer_and_is_counted(name, bad):
    weights, prototypes = torch.tensor([0.5, 0.5]), torch.eye(2)
    both = torch.stack([prototypes, prototypes])
    rules = {
        "features": FeatureSum(weights, prototypes),
        "bounded": BoundedFeatureSum(weights, prototypes, torch.tensor([5.0, 5.0])),
        "probabilities": ProbabilityMean(weights, both),
        "redistribution": Redistribution.of(torch.full((2, 2), 50.0), torch.ones(2), both),
    }
    images = torch.ones(5, 1, 8, 8)
    model = model_of(rules[name], [1.0, 0.2], [bad, bad])
    found = model.logits(images)
    assert bool(torch.isfinite(found).all())
    assert model.unanswered == [0, 5]
    alone = torch.zeros(5, 2, 2) if name == "redistribution" else rules[name].start(5)
    rules[name].add(alone, slice(None), 0, torch.tensor([[1.0, 0.2]]).repeat(5, 1))
    assert torch.equal(found, rules[name].finish(alone))


def test_only_the_images_that_a_member_overflows_on_lose_its_say():
    rule = FeatureSum(torch.tensor([0.5, 0.5]), torch.eye(2))
    images = torch.ones(4, 1, 8, 8)
    images[2] = 0.0
    model = model_of(rule, [1.0, 0.0], [0.0, 1e30])  # the second is silent but where the pixel is 0
    assert model.logits(images)[:, 0].tolist() == [1, 1, 0, 1]
    assert model.unanswered == [0, 3]


def test_lengths_are_bounded_by_what_members_give_to_pictures_that_show_nothing():
    probes = torch.ones(3, 7, 4) / 2  # length 1
    probes[2] *= 1000
    rule = BoundedFeatureSum.of(torch.full((3,), 1 / 3), torch.eye(4), probes)
    shares = []
    for member, scale in enumerate((1.0, 1.0, 1000.0)):
        state = rule.start(2)
        rule.add(state, slice(None), member, scale * torch.tensor([[1.0, 0, 0, 0], [100.0, 0, 0, 0]]))
        shares.append((3 * state[:, 0]).tolist())
    assert shares[0] == shares[1] == pytest.approx([1, STRETCH])
    assert shares[2] == pytest.approx([EVEN, STRETCH])


def test_a_model_file_of_the_first_release_is_refused_by_name(tiny_uploads, tmp_path):
    path = tmp_path / "model.safetensors"
    fuse("feature_mean", tiny_uploads).save(path)
    content = load_state(path)
    del content["state"]["features"]  # as it was written before features were raw
    save_state(path, content)
    with pytest.raises(RunError, match=r"earlier version.*fuse the uploads again"):
        load_model(path)
