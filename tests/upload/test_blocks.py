"""Products that are summed within blocks of features alone: the sums, the files, the classifiers and whole runs."""

from __future__ import annotations

import pytest
import torch

from oneflare.client.observer import Observer
from oneflare.client.statistics import measure, measure_blocks
from oneflare.core.config import DataConfig
from oneflare.data import ClientData, load
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion import UploadSet, build_fusion, load_model
from oneflare.fusion.analytic import solver
from oneflare.fusion.analytic.committee import committee, shares
from oneflare.fusion.analytic.solver import Factored, Spectrum, solve
from oneflare.fusion.trust.exchanged import find_exchanges
from oneflare.fusion.trust.sums import block_sketches, doubtful_sums
from oneflare.methods.resolve import resolve
from oneflare.models.analytic import AnalyticModel
from oneflare.models.onnx import export_onnx
from oneflare.nn import build_feature_map, feature_map_spec
from oneflare.nn.blocks import block_order, block_sizes
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.upload import Upload, read_upload
from oneflare.upload.blocks import apart, joined
from oneflare.upload.contract import statistics_bytes, statistics_layout
from oneflare.upload.disclosure import disclose
from oneflare.upload.statistics import FeatureLimits, Plan, Statistics, complaint, pack, unpack
from shared import forge

DIGITS = load(DataConfig())
SIZE = DIGITS.train.images.shape[-1]
SPEC = {"name": "paired", "features": 88, "mirror": False, "blocks": 3}
FEATURES = build_feature_map(SPEC, 1, SIZE)
SIZES = block_sizes(FEATURES.dim, 3)
SMALL = {"method": "analytic", "data": {"train_size": 400, "test_size": 100}, "analytic": SPEC | {"mirror": None}}


def client_data(n=200) -> ClientData:
    return ClientData.of(DIGITS.train.take(torch.arange(n)), 10)


def sub(statistics: Statistics, start: int, size: int) -> Statistics:
    """Oracle: the block cut out of the sums of all features."""
    own = slice(start, start + size)
    return Statistics(statistics.gram[own, own], statistics.sums[:, own], statistics.counts)


def cut_out(statistics: Statistics) -> list[Statistics]:
    return [sub(statistics, sum(SIZES[:block]), size) for block, size in enumerate(SIZES)]


def uploads_of(folder, *layers) -> UploadSet:
    experiment = resolve(SMALL, *layers)
    made = Simulation.build(experiment, RunFiles(folder), load(experiment.data))
    return made.collect(made.train(Observer()), Observer())


def fuse(uploads, **options):
    return build_fusion({"name": "analytic", **options}).fuse(uploads).model


def test_features_are_dealt_to_blocks_of_equal_size():
    assert block_sizes(10, None) == (10,)
    assert block_sizes(11, 3) == (4, 4, 3)
    order = block_order(1000, 3)
    assert torch.equal(order.sort().values, torch.arange(1000))
    assert torch.equal(order, block_order(1000, 3))
    for part in order.split(block_sizes(1000, 3)):
        assert torch.equal(part, part.sort().values)
        assert 120 < int((part < 500).sum()) < 215  # some of every kind of feature


def test_blocks_change_the_order_of_features_and_nothing_else():
    whole = build_feature_map({key: value for key, value in SPEC.items() if key != "blocks"}, 1, SIZE)
    order, images = block_order(whole.dim, 3), DIGITS.test.images[:9]
    assert torch.equal(FEATURES(images), whole(images)[:, order])
    assert torch.equal(FEATURES.range()[1], whole.range()[1][order])
    assert FEATURES.fingerprint() != whole.fingerprint()
    assert FEATURES.blocks == SIZES
    assert whole.blocks == (whole.dim,)


def test_a_spec_without_blocks_is_what_it_was_before_there_were_any():
    assert "blocks" not in feature_map_spec({"name": "paired"}, flip=True)
    assert feature_map_spec({"name": "paired", "blocks": 4}, flip=True)["blocks"] == 4


def test_sums_of_blocks_are_cut_out_of_the_sums_of_all_features():
    data = client_data()
    found = measure_blocks(FEATURES, data, 10, SIZES)
    for own, expected in zip(found, cut_out(measure(FEATURES, data.images, data.labels, 10)), strict=True):
        assert torch.allclose(own.gram, expected.gram, rtol=1e-12)
        assert torch.equal(own.sums, expected.sums)
        assert torch.equal(own.counts, expected.counts)


@pytest.mark.parametrize("dtype", ["float32", "int16", "int12"])
def test_blocks_are_packed_as_the_contract_expects_and_come_apart_again(dtype):
    found = measure_blocks(FEATURES, client_data(), 10, SIZES)
    parts = [pack(own, dtype) for own in found]
    packed = joined(parts)
    layout = statistics_layout(Plan.of(SPEC, 1, SIZE, dtype), 10)
    assert {name: tuple(tensor.shape) for name, tensor in packed.items()} == {
        name: shape for name, (shape, _) in layout.items()
    }
    sent = sum(tensor.numel() * tensor.element_size() for tensor in packed.values())
    assert abs(sent - statistics_bytes(FEATURES.dim, 10, dtype, 3)) < 32
    for again, part in zip(apart(packed, SIZES), parts, strict=True):
        assert set(again) == set(part)
        assert all(torch.equal(again[name], part[name]) for name in part)
        limits = FeatureLimits(*(torch.full((part["sums"].shape[1],), limit).double() for limit in (0, 1e3)))
        assert complaint(again, 200, limits) is None
    assert joined(parts[:1]) == parts[0]


@pytest.mark.parametrize("ridge", [0.3, None])
def test_the_model_is_the_weighed_mean_of_the_classifiers_of_its_blocks(tmp_path, ridge):
    uploads = uploads_of(tmp_path)
    total = measure(FEATURES, *uploads_images(uploads), 10)
    alone = [solve(unpack(pack(own)), ridge=ridge, blocks=3) for own in cut_out(total)]
    phi = FEATURES(DIGITS.test.images)
    scores = [part.float() @ one.weight + one.bias for part, one in zip(phi.split(SIZES, 1), alone, strict=True)]
    logits = fuse(uploads, ridge=ridge).logits(DIGITS.test.images)
    weights = shares([one.cosine for one in alone]).tolist()
    length = sum(weight * one.spread for weight, one in zip(weights, alone, strict=True))
    each = zip(weights, alone, scores, strict=True)
    assert torch.allclose(logits, sum(weight * length / one.spread * own for weight, one, own in each), atol=2e-3)
    assert all(0.1 < weight < 0.6 for weight in weights)  # blocks of the same kinds of features
    assert float((logits.argmax(1) == DIGITS.test.labels).float().mean()) > 0.9


def uploads_images(uploads):
    """The images of all clients: the first of the data set that the run drew."""
    data = load(resolve(SMALL).data)
    assert sum(upload.samples for upload in uploads) == len(data.train.labels)
    return data.train.images, data.train.labels


@pytest.mark.parametrize("kind", [Spectrum, Factored])
def test_the_ridge_of_a_committee_is_one_kth(kind):
    sums = cut_out(measure(FEATURES, DIGITS.train.images[:300], DIGITS.train.labels[:300], 10))[0]
    made, of_rounded_images = kind(sums), kind(sums, blurred=1 / 12)
    assert made.shared_ridge(0.4, 0.0, 1) == of_rounded_images.shared_ridge(0.4, 0.0, 1) == 0.4
    assert of_rounded_images.shared_ridge(0.4, 0.0, 4) == pytest.approx(0.025)
    assert made.shared_ridge(0.4, 0.0, 4) == pytest.approx(0.1)
    assert made.shared_ridge(0.4, 0.8, 4) == pytest.approx(0.2)


@pytest.mark.parametrize("from_factored", [True, False])
def test_negative_eigenvalues_count_as_nothing_in_a_committee(from_factored, monkeypatch):
    """Oracle: least squares with the correlation matrix put together again from its eigenvalues, negative ones 0."""
    if from_factored:
        monkeypatch.setattr(solver, "FACTORED_FROM", 1)
    own = cut_out(measure(FEATURES, DIGITS.train.images[:300], DIGITS.train.labels[:300], 10))[0]
    plain = Spectrum(own)
    noised = Statistics(own.gram - 0.06 * own.samples * torch.diag(plain.inverse.clamp(min=1e-9) ** -2), *rest_of(own))
    found = solve(noised, kind="ridge", blocks=64)
    made = Spectrum(noised)
    assert made.noise > found.ridge  # K + r is indefinite
    values, vectors = torch.linalg.eigh(made.matrix)
    repaired = vectors @ torch.diag(values.clamp(min=0)) @ vectors.T
    expected = torch.linalg.solve(repaired + found.ridge * torch.eye(len(values)), made.cross) * made.inverse[:, None]
    ratio = (found.weight * expected).sum() / expected.square().sum()
    assert torch.allclose(found.weight.double(), ratio * expected, atol=1e-3 * float(found.weight.abs().max()))


def rest_of(own: Statistics):
    return own.sums, own.counts


def test_a_committee_of_one_is_its_member():
    own = cut_out(measure(FEATURES, DIGITS.train.images[:300], DIGITS.train.labels[:300], 10))[0]
    one = solve(own)
    assert committee([one]) is one
    assert torch.equal(solve(own, blocks=1).weight, one.weight)


@pytest.mark.numeric
def test_every_split_gives_the_same_predictions_and_a_client_can_leave(tmp_path):
    skewed = uploads_of(tmp_path / "skewed", {"alpha": 0.05})
    even = uploads_of(tmp_path / "even", {"partition": {"kind": "iid", "clients": 8}})
    first, second = (fuse(each).logits(DIGITS.test.images) for each in (skewed, even))
    assert torch.equal(first.argmax(1), second.argmax(1))
    assert torch.allclose(first, second, atol=1e-2)
    whole = [sum(parts[1:], parts[0]) for parts in zip(*(own.solved_statistics() for own in skewed), strict=True)]
    left = skewed.uploads[1].solved_statistics()
    rest = UploadSet(skewed.uploads[:1] + skewed.uploads[2:], skewed.contract, skewed.template)
    again = [sum(parts[1:], parts[0]) for parts in zip(*(own.solved_statistics() for own in rest), strict=True)]
    for total, own, direct in zip(whole, left, again, strict=True):
        assert torch.allclose((total - own).gram, direct.gram, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "int16", "int12", "fine", "coarse"])
def test_uploads_in_blocks_are_as_large_as_the_limit_allows(tmp_path, dtype):
    own = {"upload": {"limit": 60_000, "statistics_dtype": dtype}, "analytic": {"features": None}}
    uploads = uploads_of(tmp_path, own)
    sizes = [path.stat().st_size for path in tmp_path.glob("clients/*/upload.safetensors")]
    assert 0.7 * 60_000 < max(sizes) <= 60_000
    alone = resolve(SMALL, own, {"analytic": {"blocks": None}})
    made = Simulation.build(alone, RunFiles(tmp_path / "alone"), load(alone.data))
    assert uploads.plan.dim > 1.3 * made.contract.statistics.dim
    model = fuse(uploads)
    model.save(tmp_path / "model.safetensors")
    images = DIGITS.test.images[:40]
    assert torch.equal(load_model(tmp_path / "model.safetensors").logits(images), model.logits(images))
    right = model.logits(DIGITS.test.images).argmax(1) == DIGITS.test.labels
    assert float(right.float().mean()) > 0.85


def test_models_of_blocks_have_an_onnx_form(tmp_path):
    assert export_onnx(fuse(uploads_of(tmp_path)), tmp_path / "model.onnx").difference < 1e-4


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"statistics.scatter.1": None}, "statistics.scatter.1 is missing"),
        ({"statistics.scatter.3": torch.zeros(3)}, "is not a field"),
        ({"statistics.scatter": torch.zeros(3)}, "is not a field"),
        ({"statistics.scatter.2": torch.zeros(3)}, "statistics.scatter.2 has shape"),
        ({"statistics.scatter.0": torch.full((SIZES[0] * (SIZES[0] + 1) // 2,), -1.0)}, "negative variance"),
        ({"statistics.scatter.2": torch.zeros(SIZES[2] * (SIZES[2] + 1) // 2)}, "contradict each other"),
        ({"statistics.counts": torch.full((10,), 9)}, "counts add up to 90 images"),
    ],
)
def test_damaged_blocks_are_refused(tmp_path, tensors, match):
    uploads = uploads_of(tmp_path)
    path = uploads.uploads[0].path
    forge(path, tensors)
    with pytest.raises(UploadError, match=match) as caught:
        read_upload(path, uploads.contract)
    assert "\n" not in str(caught.value)


def test_damaged_code_of_a_block_is_refused(tmp_path):
    uploads = uploads_of(tmp_path, {"upload": {"statistics_dtype": "coarse"}})
    path = uploads.uploads[0].path
    for words in (torch.zeros(1, dtype=torch.int64), torch.tensor([99, 1, 2])):
        forge(path, {"statistics.scatter.1": words})
        with pytest.raises(UploadError, match="scatter is not in the code of sums"):
            read_upload(path, uploads.contract)


def test_what_blocks_do_not_hold_is_said(tmp_path):
    uploads = uploads_of(tmp_path)
    with pytest.raises(UploadError, match="within blocks alone"):
        uploads.statistics()
    shown = " ".join(field.holds for field in disclose(uploads.uploads[0].path).fields)
    assert "their products within each of 3 blocks" in shown


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"upload": {"masked": True}}, "masked sums"),
        ({"upload": {"statistics_epsilon": 1.0, "counts": "withheld"}}, "noised sums"),
        ({"fusions": "gh_lda"}, "gh_lda needs products of all features"),
    ],
)
def test_terms_that_blocks_do_not_fit_are_refused(layer, words):
    with pytest.raises(ConfigError, match=words) as caught:
        resolve(SMALL, layer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("blocks", [0, 65])
def test_numbers_of_blocks_have_limits(blocks):
    with pytest.raises(ConfigError, match=r"analytic\.blocks: must lie between 1 and 64"):
        build_feature_map(SPEC | {"blocks": blocks}, 1, SIZE)


def test_plans_that_blocks_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"analytic\.blocks"):
        Plan.of(SPEC, 1, SIZE, parts=("class_covariances",))
    assert Plan.of(SPEC, 1, SIZE, parts=()).blocks == SIZES


def test_models_of_maps_with_many_features_are_read_again(tmp_path):
    task = fuse(uploads_of(tmp_path)).task
    large = SPEC | {"features": 4_200}
    dim = build_feature_map(large, 1, SIZE).dim
    AnalyticModel(task, large, None, torch.zeros(dim, 10), torch.zeros(10)).save(tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors").spec["features"] == 4_200


@pytest.fixture
def four(tmp_path) -> UploadSet:
    """Four members that have every class."""
    return uploads_of(tmp_path, {"data": {"train_size": 1200}, "partition": {"clients": 4, "kind": "iid"}})


def test_a_model_may_ask_moved_copies_as_well(four, tmp_path):
    """Scores are linear in the features: those of mean features are the mean of the scores."""
    plain, moved = fuse(four), fuse(four, moved=1)
    images = DIGITS.test.images[:40]
    wide = torch.nn.functional.pad(images.float(), (1, 1, 1, 1), mode="replicate").to(images.dtype)
    copies = [images, wide[:, :, 2:, :-2], wide[:, :, :-2, 2:]]
    expected = torch.stack([plain.logits(copy) for copy in copies]).mean(0)
    assert torch.allclose(moved.logits(images), expected, atol=1e-3)
    moved.save(tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors").logits(images), moved.logits(images))
    with pytest.raises(ConfigError, match="between 1 and"):
        fuse(four, moved=9)


def test_the_weights_of_blocks_are_noted_and_printed(four):
    from oneflare.cli.show import block_weights

    notes = build_fusion({"name": "analytic"}).fuse(four).notes
    assert len(notes["block_weights"]) == 3
    assert sum(notes["block_weights"]) == pytest.approx(1, abs=1e-3)
    said = block_weights("analytic", notes["block_weights"])
    assert said.startswith("analytic weighs its 3 blocks of features by 0.")


def test_honest_members_are_compared_in_every_block_and_nobody_is_named(four):
    assert [len(block) for block in block_sketches(four)] == [4, 4, 4]
    assert not doubtful_sums(four)
    assert not list(find_exchanges(four))


def test_whoever_exchanges_two_classes_in_one_block_alone_is_named(four, monkeypatch):
    honest = Upload.solved_statistics

    def lying(upload, into=None):
        parts = honest(upload, into)
        if upload.client != 2:
            return parts
        last, order = parts[-1], [1, 0, *range(2, 10)]
        means = last.sums / last.counts[:, None]
        others = means[order]
        between = [own.T @ (last.counts[:, None] * own) for own in (means, others)]
        return [
            *parts[:-1],
            Statistics(last.gram - between[0] + between[1], others * last.counts[:, None], last.counts),
        ]

    monkeypatch.setattr(Upload, "solved_statistics", lying)
    assert set(doubtful_sums(four)) == {2}
    assert {exchange.members for _, exchange in find_exchanges(four)} == {(2,)}
    assert [suspect.client for suspect in build_fusion({"name": "analytic"}).fuse(four).suspects] == [2]
