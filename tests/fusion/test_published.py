"""The published methods of the statistics family: each formula against an oracle, any split, and leaving."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import oneflare
from oneflare.client.start import make_contract, shared_start
from oneflare.client.statistics import exact_statistics
from oneflare.core.config import DataConfig
from oneflare.data import ClientData, load
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion import UploadSet, build_fusion, load_model
from oneflare.fusion.analytic.gaussian import FisherMix, fisher_space, precision_factor, shrunk, whitened_space
from oneflare.fusion.analytic.mixtures import sample
from oneflare.fusion.analytic.published import calibrated, oas_shrinkage, softmax_head, solve_symmetric
from oneflare.fusion.analytic.published_linear import (
    gaussian_rule,
    least_squares,
    pooled_covariance,
    ridge_with_intercept,
    total_covariance,
)
from oneflare.fusion.analytic.solver import Spectrum
from oneflare.methods.resolve import resolve
from oneflare.models import QuadraticModel
from oneflare.nn import build_feature_map
from oneflare.simulation.stages import fuse_run
from oneflare.upload import Contents, read_upload, write_upload
from oneflare.upload.class_statistics import pack_classes, unpack_classes
from oneflare.upload.disclosure import disclose
from oneflare.upload.mixtures import Mixtures
from oneflare.upload.statistics import Statistics
from shared import forge

DIGITS = load(DataConfig(train_size=500))
BELOW = {"name": "random_conv", "filters": 3, "mirror": False}
MAPS = {
    "fed3r": {"name": "random_features", "of": BELOW, "dim": 60},
    "safle": {"name": "buckets", "of": BELOW, "group": 1},
}
ADDING = ["afl", "fedcgs", "gh_lda", "gh_qda", "fisher_mix", "fedncm", "fed3r", "safle"]
FAMILY = [*ADDING, "fedpft"]


def toy(seed=0, n=240, dim=6, classes=3):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    centres = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    stretch = 1 + 0.5 * torch.rand(classes, dim, generator=generator, dtype=torch.float64)
    return centres[labels] + noise * stretch[labels] + 3, labels


PHI, LABELS = toy()
ONE_HOT = F.one_hot(LABELS, 3).double()
SUMS = Statistics(PHI.T @ PHI, ONE_HOT.T @ PHI, ONE_HOT.sum(0))
CLASSES = unpack_classes(
    {key: value.double() for key, value in pack_classes(PHI, LABELS, 3).items()}
    | {"sums": SUMS.sums, "counts": SUMS.counts}
)


def experiment(method, **settings):
    return resolve({"method": method, "analytic": MAPS.get(method, BELOW)}, settings)


def federation(folder, method, owners, **settings):
    """The uploads of a federation in which client `owners[i]` has digit number i."""
    terms = experiment(method, **settings)
    contract = make_contract(terms, DIGITS.image, DIGITS.classes, mirror=False, federation="test")
    plan = contract.statistics
    features = build_feature_map(plan.feature_map, 1, 8)
    uploads = []
    for client in sorted(set(owners.tolist())):
        rows = owners == client
        labels = DIGITS.train.labels[rows]
        data = ClientData(DIGITS.train.images[rows], labels, torch.bincount(labels, minlength=10))
        path = folder / f"{client}.safetensors"
        packed = exact_statistics(plan, features, data, 10)
        write_upload(path, None, contract, Contents(client=client, counts=data.counts, epoch=0, statistics=packed))
        uploads.append(read_upload(path, contract))
    return UploadSet(tuple(uploads), contract, shared_start(terms, contract))


def fused(uploads, method):
    quick = {"samples": 50, "steps": 20} if method == "fisher_mix" else {}
    return build_fusion(experiment(method).fusions[0] | quick).fuse(uploads).model


def splits():
    labels = DIGITS.train.labels
    generator = torch.Generator().manual_seed(0)
    return [torch.zeros(500, dtype=torch.long), labels // 2, torch.randint(0, 7, (500,), generator=generator)]


# ---- formulas


def test_afl_is_ordinary_least_squares():
    oracle = np.linalg.lstsq(PHI.numpy(), ONE_HOT.numpy(), rcond=None)[0]
    assert np.allclose(least_squares(SUMS, 0.0).numpy(), oracle, atol=1e-9)
    ridged = np.linalg.solve((PHI.T @ PHI).numpy() + 5 * np.eye(6), (PHI.T @ ONE_HOT).numpy())
    assert np.allclose(least_squares(SUMS, 5.0).numpy(), ridged, atol=1e-9)


def test_least_squares_of_too_few_images_has_least_norm():
    few, hot = PHI[:4], ONE_HOT[:4]
    statistics = Statistics(few.T @ few, hot.T @ few, torch.ones(3, dtype=torch.float64))
    oracle = np.linalg.pinv(few.numpy()) @ hot.numpy()
    assert np.allclose(least_squares(statistics, 0.0).numpy(), oracle, atol=1e-7)
    singular = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64))
    assert torch.allclose(solve_symmetric(singular, torch.ones(2, 1).double()), torch.tensor([[0.5], [0.0]]).double())


def test_fed3r_is_ridge_regression_on_features_with_a_one():
    wide = np.hstack([PHI.numpy(), np.ones((len(PHI), 1))])
    oracle = np.linalg.solve(wide.T @ wide + 0.3 * np.eye(7), wide.T @ ONE_HOT.numpy())
    weight, bias = ridge_with_intercept(SUMS, 0.3)
    assert np.allclose(weight.numpy(), oracle[:-1], atol=1e-9)
    assert np.allclose(bias.numpy(), oracle[-1], atol=1e-9)


def test_fedcgs_is_the_posterior_of_gaussians_with_the_covariance_of_all_images():
    from scipy.stats import multivariate_normal

    covariance = np.cov(PHI.numpy().T)
    assert np.allclose(total_covariance(SUMS).numpy(), covariance)
    weight, bias = gaussian_rule(total_covariance(SUMS), SUMS)
    means = [PHI[label == LABELS].mean(0).numpy() for label in range(3)]
    joint = np.stack(
        [
            multivariate_normal(mean, covariance).logpdf(PHI.numpy())
            + math.log(float((label == LABELS).double().mean()))
            for label, mean in enumerate(means)
        ],
        1,
    )
    scores = (PHI @ weight + bias).numpy()
    assert np.allclose(scores - scores[:, :1], joint - joint[:, :1], atol=1e-8)


@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0])
def test_gh_lda_shrinks_the_covariance_within_classes(shrinkage):
    centred = np.concatenate([(PHI[c == LABELS] - PHI[c == LABELS].mean(0)).numpy() for c in range(3)])
    pooled = centred.T @ centred / (len(PHI) - 3)
    oracle = (1 - shrinkage) * pooled + shrinkage * np.trace(pooled) / 6 * np.eye(6)
    assert np.allclose(pooled_covariance(SUMS, shrinkage)[0].numpy(), oracle)


def test_oas_is_scikit_learns_where_its_simplification_does_not_matter():
    """scikit-learn drops the terms in 2/p, which vanish for many features."""
    from sklearn.covariance import OAS

    x = np.random.RandomState(0).randn(80, 400) * np.linspace(0.2, 3, 400)
    oracle = OAS(assume_centered=True).fit(x)
    covariance = x.T @ x / 80
    found = oas_shrinkage(float(np.trace(covariance)), float((covariance**2).sum()), 400, 80)
    assert found == pytest.approx(oracle.shrinkage_, rel=0.01)
    assert 0.01 < found < 0.99


@pytest.mark.parametrize("shrinkage", [0.0, 0.4, 1.0])
def test_gh_qda_is_the_posterior_of_gaussians_with_shrunk_covariances(shrinkage):
    from scipy.stats import multivariate_normal

    ridge, spectrum = 0.05, Spectrum(SUMS)
    space = whitened_space(spectrum, ridge)
    x = ((PHI - PHI.mean(0)) / PHI.std(0, correction=0)).numpy()
    labels, prior = LABELS.numpy(), SUMS.counts.numpy() / len(PHI)
    own = [np.cov(x[labels == c].T, bias=True) + ridge * np.eye(6) for c in range(3)]
    pooled = sum(p * covariance for p, covariance in zip(prior, own, strict=True))
    z = ((PHI - space.mean) @ space.projection).numpy()
    for label in range(3):
        covariance = (1 - shrinkage) * own[label] + shrinkage * pooled
        oracle = multivariate_normal(x[labels == label].mean(0), covariance).logpdf(x)
        factor, determinant = precision_factor(shrunk(space.covariance(CLASSES, label), 1.0, shrinkage))
        distance = ((z - space.means(CLASSES)[label].numpy()) @ factor.numpy()) ** 2
        found = determinant - 0.5 * distance.sum(1)
        assert np.ptp(oracle - found) < 1e-4  # equal up to the constant of the change of coordinates
    constants = np.linalg.slogdet(pooled)[1]
    assert np.allclose(oracle - found, -0.5 * constants - 3 * math.log(2 * math.pi), atol=1e-4)


def test_fishers_directions_are_scikit_learns():
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    space = fisher_space(Spectrum(SUMS), 1e-9)
    assert space.projection.shape == (6, 2)
    z = (PHI - space.mean) @ space.projection
    within = sum(torch.cov(z[c == LABELS].T, correction=0) * float(SUMS.counts[c]) for c in range(3)) / len(PHI)
    assert torch.allclose(within, torch.eye(2, dtype=torch.float64), atol=1e-6)
    oracle = LinearDiscriminantAnalysis(solver="eigen", n_components=2).fit(PHI.numpy(), LABELS.numpy())
    theirs = torch.from_numpy(oracle.transform(PHI.numpy()))
    solution = torch.linalg.lstsq(z, theirs - theirs.mean(0)).solution
    assert torch.allclose(z @ solution, theirs - theirs.mean(0), atol=1e-6)


def test_fisher_mix_draws_the_gaussians_of_the_statistics_and_separates_them():
    space = fisher_space(Spectrum(SUMS), 1e-3)
    fusion = FisherMix(samples=2000, steps=5)
    z, labels = fusion.drawn(CLASSES, space)
    means = space.means(CLASSES)
    for label in range(3):
        own = z[labels == label]
        wanted = shrunk(space.covariance(CLASSES, label), float(SUMS.counts[label]), None)
        assert torch.allclose(own.mean(0), means[label], atol=0.1)
        assert torch.allclose(torch.cov(own.T), wanted, atol=0.15)
    head = fusion.trained(z, labels, means)
    before = F.normalize(means, dim=1)
    assert torch.allclose(head.norm(dim=1), torch.ones(3, dtype=torch.float64))

    def loss(rows):
        offset = fusion.margin * F.one_hot(labels, 3)
        return float(F.cross_entropy(fusion.scale * (F.normalize(z, dim=1) @ rows.T - offset), labels))

    assert loss(head) < loss(before)


def test_the_head_on_samples_is_scikit_learns_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    weight, bias = softmax_head(PHI, LABELS, 3, decay=0.01, steps=500)
    x = (PHI - PHI.mean(0)) / PHI.std(0, correction=0)
    oracle = LogisticRegression(C=1 / (0.01 * len(x)), tol=1e-10, max_iter=2000).fit(x.numpy(), LABELS.numpy())
    found = (PHI @ weight + bias).softmax(1).numpy()
    assert np.allclose(found, oracle.predict_proba(x.numpy()), atol=1e-3)


def test_samples_have_the_moments_of_their_mixture():
    weights = torch.tensor([[0.25, 0.75], [0.0, 0.0]])
    means = torch.tensor([[[0.0, 4.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    variances = torch.tensor([[[1.0, 0.25], [0.5, 1.0]], [[1.0, 1.0], [1.0, 1.0]]])
    counts = torch.tensor([40_000.0, 0.0])
    rows, labels = sample(Mixtures(weights, means, variances, counts), 0.5, torch.Generator().manual_seed(0))
    assert rows.shape == (20_000, 2)
    assert bool((labels == 0).all())
    assert torch.allclose(rows.mean(0), torch.tensor([1.5, 1.0]), atol=0.05)
    second = torch.tensor([0.25 * 1 + 0.75 * (0.5 + 4), 0.25 * (0.25 + 16) + 0.75 * 1])
    assert torch.allclose(rows.square().mean(0), second, rtol=0.05)


def test_calibration_changes_no_prediction():
    weight, bias = gaussian_rule(total_covariance(SUMS), SUMS)
    scaled, moved = calibrated(weight, bias, SUMS)
    assert torch.equal((PHI @ scaled + moved).argmax(1), (PHI @ weight + bias).argmax(1))


def test_fedncm_predicts_the_nearest_mean(tmp_path):
    uploads = federation(tmp_path, "fedncm", splits()[2])
    features = build_feature_map(uploads.plan.feature_map, 1, 8)
    phi, labels = features(DIGITS.train.images).double(), DIGITS.train.labels
    means = torch.stack([phi[labels == label].mean(0) for label in range(10)])
    test = features(DIGITS.test.images).double()
    cosine = F.cosine_similarity(test[:, None], means[None], dim=2).argmax(1)
    assert torch.equal(fused(uploads, "fedncm").predict(DIGITS.test.images), cosine)
    near = build_fusion({"name": "fedncm", "distance": "euclidean"}).fuse(uploads).model
    assert torch.equal(near.predict(DIGITS.test.images), torch.cdist(test, means).argmin(1))
    assert {name for name in uploads.uploads[0].entries if "scatter" in name} == set()


# ---- uploads


@pytest.mark.numeric
@pytest.mark.parametrize("method", ADDING)
def test_any_split_gives_the_same_predictions(tmp_path, method):
    answers = []
    for number, owners in enumerate(splits()):
        folder = tmp_path / str(number)
        folder.mkdir()
        answers.append(fused(federation(folder, method, owners), method).logits(DIGITS.test.images))
    for other in answers[1:]:
        assert torch.equal(other.argmax(1), answers[0].argmax(1))
    assert float((answers[0].argmax(1) == DIGITS.test.labels).float().mean()) > 0.7


@pytest.mark.parametrize("method", FAMILY)
def test_who_leaves_is_as_if_never_there_and_models_are_saved(tmp_path, method):
    everybody = federation(tmp_path, method, splits()[2])
    left = everybody.without({3})
    others = [read_upload(upload.path, everybody.contract) for upload in everybody if upload.client != 3]
    alone = UploadSet(tuple(others), everybody.contract, everybody.template)
    model = fused(left, method)
    answers = model.logits(DIGITS.test.images)
    assert torch.equal(answers, fused(alone, method).logits(DIGITS.test.images))
    assert not torch.equal(answers, fused(everybody, method).logits(DIGITS.test.images))
    path = tmp_path / "model.safetensors"
    model.save(path)
    assert torch.equal(load_model(path).logits(DIGITS.test.images), model.logits(DIGITS.test.images))


def test_the_mixtures_of_many_clients_still_make_a_good_head(tmp_path):
    model = fused(federation(tmp_path, "fedpft", splits()[1]), "fedpft")
    assert float((model.predict(DIGITS.test.images) == DIGITS.test.labels).float().mean()) > 0.7


@pytest.mark.parametrize("method", ["fedncm", "gh_qda", "fisher_mix", "fedpft", "gh_lda"])
def test_a_class_that_nobody_has_is_never_predicted(tmp_path, method):
    owners = torch.where(DIGITS.train.labels == 4, 9, DIGITS.train.labels % 2)
    uploads = federation(tmp_path, method, owners).without({9})
    model = fused(uploads, method)
    assert not bool((model.predict(DIGITS.test.images) == 4).any())
    assert bool(torch.isfinite(model.logits(DIGITS.test.images)).all())


def test_a_member_with_one_image_of_a_class_does_no_harm(tmp_path):
    owners = torch.ones(500, dtype=torch.long)
    owners[0] = 0
    for method in ("gh_qda", "fedpft"):
        folder = tmp_path / method
        folder.mkdir()
        model = fused(federation(folder, method, owners), method)
        assert float((model.predict(DIGITS.test.images) == DIGITS.test.labels).float().mean()) > 0.7


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_damaged_covariances_are_refused(tmp_path, dtype):
    uploads = federation(tmp_path, "gh_qda", splits()[0], **{"upload.statistics_dtype": dtype})
    path = uploads.uploads[0].path
    damaged = uploads.uploads[0]._tensors("statistics.class_scatter")["statistics.class_scatter"].clone()
    damaged[2].neg_()
    forge(path, {"statistics.class_scatter": damaged})
    with pytest.raises(UploadError, match=r"statistics\.class_scatter has a negative variance.*class number 2"):
        read_upload(path, uploads.contract)


def test_statistics_without_what_a_fusion_needs_are_refused(tmp_path):
    uploads = federation(tmp_path, "fedncm", splits()[0])
    with pytest.raises(UploadError, match=r"hold no statistics.*upload\.statistics"):
        build_fusion({"name": "afl"}).fuse(uploads)
    with pytest.raises(UploadError, match=r"hold no mixtures"):
        build_fusion({"name": "fedpft"}).fuse(uploads)


@pytest.mark.parametrize("method", ["analytic", "gh_qda", "fed3r", "safle"])
def test_models_export_for_any_number_of_images(tmp_path, method):
    from oneflare.models.onnx import export_onnx

    model = fused(federation(tmp_path, method, splits()[1]), method)
    assert isinstance(model, QuadraticModel) == (method == "gh_qda")
    assert export_onnx(model, tmp_path / "model.onnx").difference < 1e-4


@pytest.mark.parametrize(
    ("method", "held", "first"),
    [
        ("fedncm", "fixed features over your images of each class", "how well has not been measured"),
        ("gh_lda", "of their products, over your images", "found 100 %"),
        ("gh_qda", "sums of their products for each class", "for each class apart"),
        ("fedpft", "a mixture of up to 10 Gaussians", "nearly the features of those images"),
    ],
)
def test_the_description_of_an_upload_says_what_it_holds(tmp_path, method, held, first):
    described = disclose(federation(tmp_path, method, splits()[0]).uploads[0].path)
    assert held in next(field.holds for field in described.fields if field.name == "statistics")
    assert first in described.first[0]


# ---- terms


def test_what_is_sent_follows_from_the_fusions():
    def sent(**settings):
        return experiment("analytic", **settings).upload.statistics

    assert sent() is None
    assert sent(fusions="fedncm") == ()
    assert sent(fusions="analytic,gh_qda") == ("class_covariances",)
    assert sent(fusions="analytic,fedpft") == ("covariance", "mixtures")
    assert sent(**{"upload.statistics": "class_covariances"}) == ("class_covariances",)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"fusions": "gh_qda", "upload.statistics": "covariance"}, "gh_qda needs class_covariances"),
        ({"fusions": "analytic", "upload.statistics": "mixtures"}, "analytic needs statistics"),
        ({"upload.statistics": "mixture"}, "did you mean 'mixtures'"),
        ({"fusions": "fedpft", "upload.statistics_epsilon": 3, "upload.counts": "withheld"}, "cannot be noised"),
        ({"fusions": {"name": "gh_qda", "shrinkage": 2}}, r"gh_qda.shrinkage: must be at least 0 and at most 1"),
        ({"fusions": {"name": "fed3r", "ridge": 0}}, r"fed3r.ridge: must be greater than 0"),
        ({"fusions": {"name": "afl", "ridge": -1}}, r"afl.ridge: must be at least 0"),
    ],
)
def test_terms_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        experiment("analytic", **settings)


# ---- many classes


LONG = [pytest.param(name, marks=pytest.mark.soak) for name in ("analytic", "afl", "gh_lda", "fisher_mix")]


@pytest.mark.parametrize("fusion", ["fedncm", *LONG])
def test_a_thousand_classes(tmp_path, fusion):
    """Two images of each of 1,000 classes, each a class of its own by its noise, at two clients."""
    options = {"samples": 2, "steps": 2} if fusion == "fisher_mix" else {}
    terms = experiment("analytic", fusions=[{"name": fusion, **options}])
    classes = tuple(f"class {number}" for number in range(1000))
    contract = make_contract(terms, DIGITS.image, classes, mirror=False, federation="test")
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(1000, 1, 8, 8, generator=generator)
    features = build_feature_map(contract.statistics.feature_map, 1, 8)
    uploads = []
    for client in range(2):
        images = (patterns + 0.02 * torch.rand(1000, 1, 8, 8, generator=generator)).clamp(max=1)
        labels = torch.arange(1000)
        data = ClientData(images, labels, torch.ones(1000, dtype=torch.long))
        path = tmp_path / f"{client}.safetensors"
        packed = exact_statistics(contract.statistics, features, data, 1000)
        write_upload(path, None, contract, Contents(client=client, counts=data.counts, epoch=0, statistics=packed))
        uploads.append(read_upload(path, contract))
    together = UploadSet(tuple(uploads), contract, shared_start(terms, contract))
    found = build_fusion(terms.fusions[0]).fuse(together).model.predict((patterns + 0.01).clamp(max=1))
    assert float((found == torch.arange(1000)).float().mean()) > (0.9 if fusion in ("analytic", "gh_lda") else 0.05)


def test_rounded_sums_are_refused_by_rules_that_take_no_account_of_it(tmp_path):
    settings = {"data": {"name": "digits", "train_size": 300, "test_size": 40}, "method": "analytic", "clients": 3}
    own = {"name": "random_conv", "filters": 10}
    oneflare.run(**settings, analytic=own, upload={"statistics_dtype": "coarse"}, out=tmp_path / "run")
    with pytest.raises(UploadError, match="only the fusions analytic and flare_analytic"):
        fuse_run(tmp_path / "run", [{"name": "gh_lda"}])
    assert fuse_run(tmp_path / "run", [{"name": "fedncm"}]).fusions["fedncm"].accuracy > 0.5
