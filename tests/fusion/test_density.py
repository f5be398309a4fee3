"""The density ratio against SciPy's Student density, scikit-learn's OAS and NumPy's moments."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_t
from sklearn.covariance import OAS

from oneflare.client.background import FEWEST, WAYS, background, quarter_turn, scrambled_phases, shuffled_quadrants
from oneflare.client.density import measure_density
from oneflare.core.config import DataConfig
from oneflare.core.seeds import torch_generator
from oneflare.data import ClientData, load, prepare
from oneflare.data.dataset import to_unit
from oneflare.errors import ConfigError, MemberFault, UploadError
from oneflare.fusion import build_fusion, load_model
from oneflare.fusion.densities import BLOCK, member_densities, oracle_shrinkage, shrunk, whitened_trace
from oneflare.fusion.density.ratio import rule_parts
from oneflare.methods.resolve import resolve
from oneflare.models.onnx import export_onnx
from oneflare.models.rules.density import FREEDOM, NEVER, DensityRatio, StudentDensities
from oneflare.nn.encoders import both_features
from oneflare.upload import Upload
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY_MEANS, WITHIN, complaint
from oneflare.upload.symmetric import unpack_symmetric
from oneflare.upload.tensors import copied_tensors


@pytest.fixture(params=["knowing_members", "widened_members"])
def members(request):
    """With 16 features of the encoder's own, and with those widened to 24."""
    return request.getfixturevalue(request.param)


DIGITS = load(DataConfig(train_size=200, test_size=60))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(d: int, seed: int = 0) -> torch.Tensor:
    factor = drawn(d, d + 3, seed=seed)
    return factor @ factor.T / d


def test_log_densities_are_scipys_up_to_a_constant_of_the_dimension():
    d, classes = 5, 3
    means, scale, spread = drawn(1, classes, d), covariance(d)[None], torch.tensor([[1.0, 1.5, 2.0]])
    points = drawn(7, d, seed=1)
    found = StudentDensities.of(means, scale, spread).log_densities(0, points.float()).double()
    wanted = np.stack(
        [
            multivariate_t(means[0, k].numpy(), (spread[0, k] * scale[0]).numpy(), df=FREEDOM).logpdf(points.numpy())
            for k in range(classes)
        ],
        axis=1,
    )
    shift = wanted - found.numpy()
    assert np.allclose(shift, shift[0, 0], atol=1e-3)


def test_shrinkage_is_scikit_learns_and_never_less_than_asked():
    samples = drawn(40, 6) @ torch.diag(torch.tensor([3.0, 2, 1, 1, 0.5, 0.2], dtype=torch.float64))
    fitted = OAS(assume_centered=True).fit(samples.numpy())
    empirical = (samples.T @ samples / 40)[None]
    assert float(oracle_shrinkage(empirical, torch.tensor([40.0]))) == pytest.approx(fitted.shrinkage_, rel=1e-6)
    assert np.allclose(shrunk(empirical, torch.tensor([40.0]), 0.0)[0].numpy(), fitted.covariance_)
    strong = shrunk(empirical, torch.tensor([1e9]), 0.5)[0]
    assert torch.allclose(strong, 0.5 * empirical[0] + 0.5 * empirical[0].trace() / 6 * torch.eye(6).double())


@given(st.integers(1, 40), st.integers(2, 12), st.integers(0, 3))
def test_shrunk_covariances_are_positive_definite_even_of_a_single_image(images, d, seed):
    samples = drawn(images, d, seed=seed)
    found = shrunk((samples.T @ samples / images)[None], torch.tensor([float(images)]), 0.5)
    assert float(torch.linalg.eigvalsh(found[0])[0]) > 0


def test_expected_ratios_are_those_of_images_drawn_from_the_moments(knowing_members):
    """The mean over 4,000 draws of u ~ N(m_c, S_0); taking densities at the mean distance is off by a few per cent."""
    densities, counts = member_densities(knowing_members), knowing_members.counts
    for member, upload in enumerate(knowing_members):
        part = upload.evidence("density.")
        n, held, d = counts[member].sum(), (counts[member] > 0).sum(), knowing_members.contract.dim
        prior = unpack_symmetric(part[BACKGROUND]).trace() / d * torch.eye(d)
        values, vectors = torch.linalg.eigh((n * unpack_symmetric(part[WITHIN]) + prior) / (n - held + 1))
        half = vectors * values.clamp(min=0).sqrt()
        for label in torch.nonzero(counts[member]).flatten().tolist():
            u = part[DENSITY_MEANS][label].double() + drawn(4000, len(half), seed=label) @ half.T
            ratios = densities.ratios(member, (u.sign() * u.square()).float())[:, label]
            found = float(densities.expected[member, label])
            assert found == pytest.approx(float(ratios.mean()), rel=0.15, abs=0.5)


@pytest.mark.parametrize("d", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_the_whitened_trace_is_numpys(d):
    whitening, within = drawn(d, d).tril().float(), covariance(d, seed=1).float()
    wanted = np.trace(whitening.double().numpy() @ within.double().numpy() @ whitening.double().numpy().T)
    assert float(whitened_trace(whitening, within)) == pytest.approx(wanted, rel=1e-5)


def test_members_side_by_side_are_those_that_are_made_one_by_one(members):
    together = member_densities(members)
    assert together.take(torch.ones(len(members), dtype=torch.bool)) is together
    for row, upload in enumerate(members):
        alone = member_densities(dataclasses.replace(members, uploads=(upload,)))
        one = together.take(torch.arange(len(members)) == row)
        for name in ("held", "means", "expected", "spreads"):
            assert torch.equal(getattr(one, name), getattr(alone, name)), name
        for kind in ("classes", "background"):
            for name, value in vars(getattr(one, kind)).items():
                assert torch.equal(value, getattr(getattr(alone, kind), name)), (kind, name)


def test_a_fusion_reads_and_verifies_every_upload_once(members, monkeypatch):
    asked = []

    def noted(upload, prefix):
        asked.append((upload.client, prefix))
        return dict(copied_tensors(upload.path, upload.manifest, upload.entries, prefix))

    monkeypatch.setattr(Upload, "_tensors", noted)
    build_fusion({"name": "density_ratio"}).fuse(members)
    projected = members.contract.dim != 16  # whose weights say where their prototypes are
    for upload in members:
        assert asked.count((upload.client, "evidence.density.")) == 1
        assert asked.count((upload.client, "encoder.")) == 1 + projected


def test_answers_are_as_sure_as_the_law_says_and_otherwise_unchanged(knowing_members):
    densities = member_densities(knowing_members)
    root = knowing_members.contract.dim**0.5

    def sharpness(ratio: float) -> float:
        return dataclasses.replace(densities, expected=torch.full_like(densities.expected, ratio * root)).sharpness

    assert sharpness(1.0) == pytest.approx(2.2)
    assert sharpness(256.0) == pytest.approx(2.2 / 8)
    assert sharpness(-3.0) == sharpness(0.01)
    images = DIGITS.test.images[:20]
    plain = knowing_members.members(DensityRatio.of(*rule_parts(densities, knowing_members.counts))).logits(images)
    fused = build_fusion({"name": "density_ratio"}).fuse(knowing_members).model.logits(images)
    assert densities.sharpness != pytest.approx(1)
    assert torch.allclose(fused, densities.sharpness * plain, rtol=1e-5)


def test_what_a_client_measures_are_numpys_moments_of_rooted_features(members):
    network = members.template
    network.eval()
    data = ClientData.of(DIGITS.train.take(torch.arange(90)), 10)
    image = members.contract.image
    found = measure_density(network, data, image)
    with torch.no_grad():
        raw = both_features(network.encoder, prepare(data.images, image)).own.double().numpy()
        noise = torch.cat(list(background(data.images, 256)))
        behind = both_features(network.encoder, prepare(noise, image)).own.double().numpy()
    assert raw.shape[1] == 16
    roots, other = np.sign(raw) * np.sqrt(np.abs(raw)), np.sign(behind) * np.sqrt(np.abs(behind))
    labels = data.labels.numpy()
    for label in range(10):
        own = roots[labels == label]
        wanted = own.mean(0) if len(own) else np.zeros(roots.shape[1])
        assert np.allclose(found[DENSITY_MEANS][label], wanted, atol=1e-5)
    centred = roots - found[DENSITY_MEANS].double().numpy()[labels]
    assert np.allclose(unpack_symmetric(found[WITHIN]), centred.T @ centred / 90, atol=1e-5)
    assert np.allclose(found[BACKGROUND_MEAN], other.mean(0), atol=1e-5)
    assert np.allclose(unpack_symmetric(found[BACKGROUND]), np.cov(other.T, bias=True), atol=1e-5)
    assert complaint(found, data.counts) is None


def test_the_fused_scores_are_the_equation(members):
    """Member by member and class by class with SciPy, from what the uploads hold."""
    images = DIGITS.test.images[:20]
    densities = member_densities(members)
    model = members.members(DensityRatio.of(*rule_parts(densities, members.counts)))
    found = model.logits(images).double()
    counts, d, bound = members.counts, 16, densities.bound
    total, say = np.zeros((20, 10)), np.zeros(10)
    with torch.no_grad():
        for index, (upload, encoder) in enumerate(zip(members, members.encoders(), strict=True)):
            raw = both_features(encoder, prepare(images, members.contract.image)).own.double()
            u = (raw.sign() * raw.abs().sqrt()).numpy()
            part = {name: tensor.double() for name, tensor in upload.evidence("density.").items()}
            n, held = counts[index].sum(), (counts[index] > 0).sum()
            behind = unpack_symmetric(part[BACKGROUND])
            pooled = (n * unpack_symmetric(part[WITHIN]) + behind.trace() / d * torch.eye(d).double()) / (n - held + 1)
            within = shrunk(pooled[None], (n - held + 1)[None], 0.5)[0]
            backdrop = shrunk(behind[None], n[None], 0.5)[0]
            base = multivariate_t(part[BACKGROUND_MEAN].numpy(), backdrop.numpy(), df=FREEDOM).logpdf(u)
            for label in torch.nonzero(counts[index]).flatten().tolist():
                scale = (1 + 1 / counts[index, label]) * within
                ratio = multivariate_t(part[DENSITY_MEANS][label].numpy(), scale.numpy(), df=FREEDOM).logpdf(u) - base
                weight = float(counts[index, label].sqrt())
                total[:, label] += weight * np.clip(ratio, -bound, bound)
                say[label] += weight
    present = say > 0
    assert np.allclose(found.numpy()[:, present], total[:, present] / say[present] / d**0.5, atol=2e-3)
    assert (found.numpy()[:, ~present] <= NEVER).all()


def test_a_member_speaks_only_about_what_it_knows():
    """Two members with one class each, in feature spaces of their own; the ratio finds the owner of every image."""
    d, spread = 4, torch.full((2, 2), 1.0)
    means = torch.zeros(2, 2, d, dtype=torch.float64)
    means[0, 0, 0], means[1, 1, 1] = 3.0, 3.0
    classes = StudentDensities.of(means, torch.eye(d).double().expand(2, d, d) * 0.1, spread)
    behind = StudentDensities.of(torch.zeros(2, 1, d).double(), torch.eye(d).double().expand(2, d, d), torch.ones(2, 1))
    rule = DensityRatio.of(torch.eye(2), classes, behind, float(d))
    known, unknown = torch.zeros(1, d), torch.zeros(1, d)
    known[0, 0] = 9.0  # its root is the mean of member 0's class
    state = rule.start(1)
    rule.add(state, slice(None), 0, known)
    rule.add(state, slice(None), 1, unknown)
    assert float(state[0, 0]) > 0 > float(state[0, 1])


def test_flare_measures_densities_unless_told_otherwise():
    assert resolve({"method": "flare"}).upload.evidence == ("density",)
    assert resolve({"method": "flare", "fusions": "feature_mean"}).upload.evidence == ()
    assert resolve({"method": "fafi", "fusions": "density_ratio"}).upload.evidence == ("density",)
    with pytest.raises(ConfigError, match="density_ratio needs"):
        resolve({"method": "flare", "upload": {"evidence": []}})
    assert resolve({"method": "flare", "upload": {"evidence": "moments"}}).upload.evidence == ("density", "moments")
    for counts, other in (("withheld", "feature_mean"), ("noised", "count_prototypes")):
        with pytest.raises(ConfigError, match=f"needs exact averages.*fusions={other}"):
            resolve({"method": "flare", "upload": {"counts": counts}})


def test_saved_and_exported_models_give_the_same_answers(members, tmp_path):
    model = build_fusion({"name": "density_ratio"}).fuse(members).model
    images = DIGITS.test.images[:30]
    model.save(tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors").predict(images), model.predict(images))
    assert export_onnx(model, tmp_path / "model.onnx").difference < 1e-4


def test_honest_members_with_widened_features_are_believed_and_gates_take_both_features(widened_members):
    assert not build_fusion({"name": "density_ratio"}).fuse(widened_members).suspects
    inputs = prepare(DIGITS.test.images, widened_members.contract.image)
    for by in ("density", "virtual_logit", "length"):
        model = build_fusion({"name": "gated_votes", "by": by}).fuse(widened_members).model
        expected = torch.zeros(len(inputs), 10)
        with torch.no_grad():
            for member, encoder in enumerate(widened_members.encoders()):
                own, projected = both_features(encoder, inputs)
                logits = torch.nn.functional.normalize(projected, dim=1) @ model.rule.prototypes[member].T
                logits = torch.where(model.rule.held[member] > 0, logits, -torch.inf)
                knowledge = model.rule.knowledge(member, own, logits)
                expected += knowledge.clamp(-80, 80).exp()[:, None] * logits.softmax(1)
        assert torch.allclose(model.logits(DIGITS.test.images), expected.clamp(min=1e-37).log(), atol=1e-3)


@pytest.mark.parametrize("number", [0.0, 1e-42, 1e-31])
def test_a_member_whose_background_says_nothing_is_named(knowing_members, monkeypatch, number):
    """Some processors factor a covariance of numbers below float32's normal range, others do not."""
    original = type(knowing_members.uploads[0]).evidence

    def flat(upload, prefix=""):
        found = original(upload, prefix)
        if upload.client == 1:
            found = {
                name: torch.full_like(tensor, number) if name == BACKGROUND else tensor
                for name, tensor in found.items()
            }
        return found

    monkeypatch.setattr(type(knowing_members.uploads[0]), "evidence", flat)
    with pytest.raises(MemberFault, match="answers every background image alike") as caught:
        member_densities(knowing_members)
    assert caught.value.client == 1
    assert isinstance(caught.value, UploadError)


def test_background_images_keep_what_they_should_and_lose_what_they_show():
    images = to_unit(DIGITS.train.images[:16])
    generator = torch_generator(0, "test")
    grey = 0.25 + images / 2  # so that nothing is cut off
    scrambled = scrambled_phases(grey, generator)
    inside = (scrambled > 0).flatten(1).all(1) & (scrambled < 1).flatten(1).all(1)
    assert bool(inside.any())
    before, after = torch.fft.fft2(grey).abs(), torch.fft.fft2(scrambled).abs()
    assert torch.allclose(before[inside], after[inside], atol=1e-3)
    turned = quarter_turn(images, generator)
    for image, found in zip(images, turned, strict=True):
        assert any(torch.equal(found, torch.rot90(image, k, (1, 2))) for k in (1, -1))
    shuffled = shuffled_quadrants(images, generator)
    assert torch.equal(shuffled.flatten(1).sort(1).values, images.flatten(1).sort(1).values)
    for way in WAYS:
        destroyed = way(images, torch_generator(1, "test"))
        assert destroyed.shape == images.shape
        assert torch.equal(destroyed, way(images, torch_generator(1, "test")))
        assert not torch.allclose(destroyed, images)


def test_no_images_leave_no_background():
    assert list(background(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), 256)) == []


def test_few_images_are_destroyed_in_all_ways_and_many_in_one():
    few, many = DIGITS.train.images[:5], torch.zeros(FEWEST + 1, 1, 8, 8, dtype=torch.uint8)
    assert sum(len(part) for part in background(few, 4)) == 4 * len(few)
    assert sum(len(part) for part in background(many, 300)) == len(many)


@pytest.mark.parametrize("options", [{"shrinkage": 1.5}, {"count_cap": 0.5}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="density_ratio"):
        build_fusion({"name": "density_ratio", **options})
