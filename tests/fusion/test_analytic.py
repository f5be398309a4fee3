"""Linear classifiers from statistics, their fusions, and what uploads with statistics must withstand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import TINY, same_answers
from oneflare.client.calibration import calibrate, hold_out
from oneflare.client.observer import Observer
from oneflare.core.config import DataConfig
from oneflare.data import ClientData, load
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion import UploadSet, build_fusion, load_model
from oneflare.fusion.analytic.solver import NEVER, PROBES, RIDGES, Factored, Spectrum, solve
from oneflare.fusion.analytic.sums import KNOWING, SEVERAL, knowers, networks_know, networks_say
from oneflare.fusion.densities import member_densities
from oneflare.methods.resolve import resolve
from oneflare.metrics.classification import expected_calibration_error
from oneflare.models.rules.density import Corroboration
from oneflare.models.rules.redistribution import Redistribution
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import read_experiment, run_experiment
from oneflare.upload import read_upload
from oneflare.upload.statistics import Statistics
from shared import forge

DIGITS = load(DataConfig())
SMALL = {"name": "random_conv", "filters": 12}


def linear_statistics(phi, labels, classes) -> Statistics:
    onehot = F.one_hot(labels, classes).double()
    return Statistics(phi.T @ phi, onehot.T @ phi, onehot.sum(0))


def toy(seed=0, n=200, dim=6, classes=3):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    centres = torch.randn(classes, dim, generator=generator, dtype=torch.float64)
    phi = centres[labels] + torch.randn(n, dim, generator=generator, dtype=torch.float64) + 3
    return phi, labels


def standardised(phi):
    return (phi - phi.mean(0)) / phi.std(0, correction=0)


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 10.0])
def test_ridge_regression_is_scikit_learns(ridge):
    from sklearn.linear_model import Ridge

    phi, labels = toy()
    spectrum = Spectrum(linear_statistics(phi, labels, 3))
    weight, bias = spectrum.in_features(ridge, *spectrum.regression(ridge))
    x, y = standardised(phi).numpy(), F.one_hot(labels, 3).numpy()
    oracle = Ridge(alpha=ridge * len(x)).fit(x, y)
    assert np.allclose((phi @ weight + bias).numpy(), oracle.predict(x), atol=1e-8)


@pytest.mark.parametrize("ridge", [1e-3, 0.1, 10.0])
def test_the_discriminant_is_scikit_learns_with_its_covariance_ridged(ridge):
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    phi, labels = toy()
    x = standardised(phi).numpy()
    spectrum = Spectrum(linear_statistics(phi, labels, 3))
    weight, bias = spectrum.in_features(ridge, *spectrum.discriminant(ridge))
    means = np.stack([x[labels.numpy() == c].mean(0) for c in range(3)])
    within = np.cov((x - means[labels.numpy()]).T, bias=True) + ridge * np.eye(x.shape[1])
    oracle = LinearDiscriminantAnalysis(solver="lsqr").fit(x, labels.numpy())
    oracle.coef_ = np.linalg.solve(within, means.T).T
    oracle.intercept_ = -0.5 * (means * oracle.coef_).sum(1) + np.log(oracle.priors_)
    assert np.allclose((phi @ weight + bias).numpy(), oracle.decision_function(x), atol=1e-8)


def test_without_a_ridge_the_discriminant_predicts_what_scikit_learns_does():
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    phi, labels = toy(n=400)
    spectrum = Spectrum(linear_statistics(phi, labels, 3))
    weight, bias = spectrum.in_features(1e-12, *spectrum.discriminant(1e-12))
    for solver in ("eigen", "lsqr"):
        oracle = LinearDiscriminantAnalysis(solver=solver, shrinkage=0.0).fit(phi.numpy(), labels.numpy())
        assert np.array_equal((phi @ weight + bias).argmax(1).numpy(), oracle.predict(phi.numpy()))


def test_generalised_cross_validation_is_leave_one_out_for_equal_leverage():
    """The moments that choose the ridge against predictions that really leave each image out."""
    phi, labels = toy(n=150, dim=20)
    spectrum = Spectrum(linear_statistics(phi, labels, 3))
    x, y = standardised(phi), F.one_hot(labels, 3).double()
    y = y - y.mean(0)
    for ridge in (0.03, 0.3, 3.0):
        hat = x @ torch.linalg.solve(x.T @ x / 150 + ridge * torch.eye(20), x.T) / 150 + 1 / 150
        leverage = hat.diagonal()[:, None]
        left_out = (hat @ y - leverage * y) / (1 - leverage)
        cosine = float((left_out * y).sum() / (left_out.norm() * y.norm()))
        assert spectrum.criterion(ridge) == pytest.approx(cosine, abs=0.02)


def test_the_chosen_ridge_is_near_the_best_on_images_not_seen():
    phi, labels = toy(seed=1, n=1200, dim=60, classes=4)
    train, test = slice(0, 100), slice(100, None)
    statistics = linear_statistics(phi[train], labels[train], 4)

    def accuracy(ridge):
        solved = solve(statistics, ridge=ridge)
        return float(((phi[test].float() @ solved.weight + solved.bias).argmax(1) == labels[test]).float().mean())

    assert accuracy(None) >= max(accuracy(10.0**e) for e in range(-4, 3)) - 0.03


@pytest.mark.parametrize("kind", [Spectrum, Factored])
def test_the_criterion_of_rounded_sums_is_that_of_exact_ones(kind):
    """Oracle: the same sums without the errors that rounding to a step of 60 adds."""
    phi, labels = toy(seed=2, n=900, dim=300, classes=4)
    exact = linear_statistics(standardised(phi), labels, 4)
    errors = (
        torch.rand(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).sub_(0.5).mul_(60).triu()
    )
    rounded = Statistics(exact.gram + errors + errors.triu(1).T, exact.sums, exact.counts)
    plain, aware, unaware = kind(exact), kind(rounded, 60**2 / 12), kind(rounded)
    assert plain.blur == 0
    for ridge in (1.0, 2.0, 4.0):
        wanted = plain.criterion(ridge)
        assert aware.criterion(ridge) == pytest.approx(wanted, abs=0.01)
        assert abs(unaware.criterion(ridge) - wanted) > 2 * abs(aware.criterion(ridge) - wanted)
    assert solve(rounded, rounding=60**2 / 12, least=0.5).ridge == pytest.approx(solve(exact).ridge, rel=1)


@pytest.mark.numeric
def test_where_sums_are_rounded_single_precision_solves_as_well(monkeypatch):
    """Rounding to a step of 60 moves what is solved a thousand times further than single precision does."""
    phi, labels = toy(seed=2, n=900, dim=300, classes=4)
    exact = linear_statistics(standardised(phi), labels, 4)
    errors = torch.rand(300, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).sub_(0.5).mul_(60)
    rounded = Statistics(exact.gram + errors.triu() + errors.triu(1).T, exact.sums, exact.counts)
    assert torch.equal(Spectrum(exact).vectors.float().double(), Spectrum(exact).vectors) is False
    single = Spectrum(rounded, 60**2 / 12)
    assert torch.equal(single.vectors.float().double(), single.vectors)
    monkeypatch.setattr("oneflare.fusion.analytic.solver.SINGLE_PRECISION", math.inf)
    double = Spectrum(rounded, 60**2 / 12)
    assert single.choose_ridge() == double.choose_ridge()
    for ridge in (0.05, 0.5, 5.0):
        change = (double.solved(ridge) - Spectrum(exact).solved(ridge)).norm()
        assert float((single.solved(ridge) - double.solved(ridge)).norm()) < 1e-3 * float(change)
        assert single.criterion(ridge) == pytest.approx(double.criterion(ridge), abs=1e-5)
        solved = double.solved(ridge)
        assert torch.allclose(double.squares(ridge), solved.T @ solved, atol=1e-12)


def test_noise_bounds_the_ridge_from_below():
    phi, labels = toy(n=50, dim=6)
    statistics = linear_statistics(phi, labels, 3)
    broken = Statistics(statistics.gram - 40 * torch.ones(6, 6), statistics.sums, statistics.counts)
    spectrum = Spectrum(broken)
    assert spectrum.noise > 0
    assert spectrum.choose_ridge() >= 2 * spectrum.noise


@pytest.mark.parametrize("dim", [20, PROBES + 40])
def test_factorisations_give_what_the_spectrum_gives(dim):
    """Up to PROBES features the trace is exact; beyond, its estimate is within its stated deviation."""
    statistics = linear_statistics(*toy(n=150, dim=dim), 3)
    spectrum, factored = Spectrum(statistics), Factored(statistics)
    for ridge in (1e-3, 0.1, 3.0):
        assert torch.allclose(factored.solved(ridge), spectrum.solved(ridge), atol=1e-9)
        for own, other in zip(factored.moments(ridge), spectrum.moments(ridge), strict=True):
            assert torch.allclose(own, other, atol=1e-9)
        allowed = 1e-6 if dim <= PROBES else 4 * math.sqrt(2 * dim / PROBES)
        assert factored.freedom(ridge) == pytest.approx(spectrum.freedom(ridge), abs=allowed)
        for own, other in zip(factored.discriminant(ridge), spectrum.discriminant(ridge), strict=True):
            assert torch.allclose(own, other, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_ridge_of_the_whole_list(seed):
    statistics = linear_statistics(*toy(seed=seed, n=120, dim=40), 3)
    assert Factored(statistics).choose_ridge() == Spectrum(statistics).choose_ridge()


def test_a_factorisation_takes_no_ridge_within_the_noise():
    phi, labels = toy(n=50, dim=6)
    statistics = linear_statistics(phi, labels, 3)
    broken = Statistics(statistics.gram - 40 * torch.ones(6, 6), statistics.sums, statistics.counts)
    chosen = Factored(broken).choose_ridge()
    assert chosen >= 2 * Spectrum(broken).noise
    assert chosen in RIDGES
    with pytest.raises(UploadError, match="too small for the noise"):
        Factored(broken).solved(1e-6)


@pytest.mark.parametrize("classes", [1, 3])
def test_absent_classes_are_never_predicted(classes):
    phi, labels = toy(classes=classes)
    solved = solve(linear_statistics(phi, labels, 5))
    assert (solved.bias[classes:] == NEVER).all()
    assert int((phi.float() @ solved.weight + solved.bias).argmax(1).max()) < classes


def test_one_image_is_enough_to_answer():
    phi, labels = toy(n=1)
    solved = solve(linear_statistics(phi, labels, 3))
    assert torch.isfinite(solved.weight).all()
    with pytest.raises(UploadError, match="hold no images"):
        solve(Statistics.zeros(4, 3))


def federation(folder, *layers) -> Simulation:
    experiment = resolve(TINY, {"method": "analytic", "analytic": SMALL}, *layers)
    return Simulation.build(experiment, RunFiles(folder), load(experiment.data))


def uploads_of(folder, *layers) -> UploadSet:
    made = federation(folder, *layers)
    return made.collect(made.train(Observer()), Observer())


def fuse(uploads, **options):
    return build_fusion({"name": "analytic", **options}).fuse(uploads).model


@pytest.mark.numeric
def test_two_partitions_give_the_same_predictions(tmp_path):
    data = {"data": {"train_size": 1438, "test_size": 359}}
    splits = [
        {"partition": {"kind": "dirichlet", "alpha": 0.05, "clients": 5}},
        {"partition": {"kind": "iid", "clients": 5}},
        {"partition": {"kind": "dirichlet", "alpha": 0.05, "clients": 100, "min_samples": 0}},
        {"partition": {"kind": "iid", "clients": 100}},
    ]
    uploads = [uploads_of(tmp_path / str(i), data, split) for i, split in enumerate(splits)]
    assert {each.statistics().samples for each in uploads} == {1438}
    models = [fuse(each) for each in uploads]
    first = models[0].logits(DIGITS.test.images)
    for model in models[1:]:
        logits = model.logits(DIGITS.test.images)
        assert torch.equal(logits.argmax(1), first.argmax(1))
        assert torch.allclose(logits, first, atol=1e-3)
    assert float((first.argmax(1) == DIGITS.test.labels).float().mean()) > 0.97
    assert expected_calibration_error(first.softmax(1), DIGITS.test.labels) < 0.05


@pytest.mark.numeric
def test_unlearning_a_client_is_fusing_without_it(tmp_path):
    uploads = uploads_of(tmp_path)
    rest = UploadSet(uploads.uploads[:1] + uploads.uploads[2:], uploads.contract, uploads.template)
    subtracted = uploads.statistics() - uploads.uploads[1].statistics()
    direct = rest.statistics()
    assert torch.allclose(subtracted.gram, direct.gram, rtol=1e-12)
    assert torch.allclose(subtracted.sums, direct.sums, rtol=1e-12, atol=1e-9)
    one, two = solve(direct), solve(subtracted)
    model = fuse(rest)
    assert torch.equal(model.weight, one.weight)
    phi = model.features(DIGITS.test.images)
    assert torch.equal((phi @ one.weight + one.bias).argmax(1), (phi @ two.weight + two.bias).argmax(1))


def test_an_upload_of_statistics_alone(tmp_path):
    uploads = uploads_of(tmp_path)
    for upload in uploads:
        assert upload.fields == {"statistics", "class_means", "counts"}
        assert upload.prototypes is None
    with pytest.raises(UploadError, match="holds no trained network"):
        uploads.prototypes  # noqa: B018
    with pytest.raises(ConfigError, match="fusion feature_mean needs prototypes and weights"):
        federation(tmp_path / "other", {"fusions": "feature_mean"})


@pytest.mark.parametrize("options", [{}, {"solver": "ridge"}, {"ridge": 0.5}])
def test_the_model_is_saved_and_loaded(tmp_path, options):
    model = fuse(uploads_of(tmp_path / "run"), **options)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors")
    images = DIGITS.test.images[:40]
    assert torch.equal(again.logits(images), model.logits(images))
    assert same_answers(model.predict(images, batch_size=7), again.logits(images))
    assert torch.allclose(again.predict_proba(images).sum(1), torch.ones(40))
    assert again.cost == model.cost
    assert model.cost.forward_passes == 1
    assert model.cost.parameters == 12 * 9 + model.weight.numel() + 10


def test_same_client_same_bytes_and_any_number_of_workers(tmp_path):
    for name, workers in (("a", 1), ("b", 2)):
        uploads_of(tmp_path / name, {"workers": workers})
    for client in range(3):
        one, two = (RunFiles(tmp_path / name).client(client).upload.read_bytes() for name in ("a", "b"))
        assert one == two


@pytest.mark.parametrize(
    ("tensors", "changes", "match"),
    [
        ({"statistics.sums": None}, {}, "statistics.sums is missing"),
        ({"statistics.scatter": torch.zeros(3)}, {}, "statistics.scatter has shape"),
        ({"statistics.counts": torch.zeros(10)}, {}, "statistics.counts has type"),
        ({"statistics.sums": torch.full((10, 152), math.nan)}, {}, "statistics.sums has values that are not finite"),
        ({"statistics.counts": torch.full((10,), 9)}, {}, "counts add up to 90 images"),
        ({"statistics.scatter": torch.full((11628,), -1.0)}, {}, "negative variance"),
        ({"statistics.scatter": torch.zeros(11628, dtype=torch.int16)}, {}, "statistics.scatter has type 'I16'"),
        ({"prototypes": torch.zeros(10, 16)}, {}, "is not a field"),
        ({}, {"statistics": None}, "statistics differs"),
        ({}, {"trust": -1.0}, "trust is -1.0"),
        ({}, {"trust": "much"}, "trust is 'much'"),
    ],
)
def test_damaged_statistics_are_refused(tmp_path, tensors, changes, match):
    uploads = uploads_of(tmp_path)
    path = uploads.uploads[0].path
    forge(path, tensors, **changes)
    with pytest.raises(UploadError, match=match) as caught:
        read_upload(path, uploads.contract)
    assert "\n" not in str(caught.value)


def test_statistics_of_another_feature_map_are_refused(tmp_path):
    uploads = uploads_of(tmp_path)
    path = uploads.uploads[0].path
    plan = dict(uploads.uploads[0].manifest["statistics"])
    forge(path, statistics=plan | {"fingerprint": "0" * 64})
    with pytest.raises(UploadError, match="statistics differs"):
        read_upload(path, uploads.contract)


def test_statistics_damaged_after_verification_are_noticed(tmp_path):
    uploads = uploads_of(tmp_path)
    path = uploads.uploads[0].path
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UploadError, match="does not match its digest"):
        fuse(uploads)


def test_int16_statistics_are_half_the_size_and_predict_alike(tmp_path):
    exact = uploads_of(tmp_path / "exact")
    small = uploads_of(tmp_path / "small", {"upload": {"statistics_dtype": "int16"}})
    assert small.uploads[0].file_bytes < 0.7 * exact.uploads[0].file_bytes
    images = DIGITS.test.images
    assert float((fuse(exact).predict(images) == fuse(small).predict(images)).float().mean()) > 0.97


PRIVATE = {"upload": {"statistics_epsilon": 50.0, "counts": "withheld", "statistics_noise_seed": 1}}


def test_private_statistics(tmp_path):
    uploads = uploads_of(tmp_path / "private", PRIVATE)
    manifest = uploads.uploads[0].manifest
    assert manifest["statistics"]["privacy"] == {"epsilon": 50.0, "delta": 1e-5, "clip": 1.0}
    assert uploads.uploads[0].fields == {"statistics", "class_means"}
    model = fuse(uploads)
    model.save(tmp_path / "model.safetensors")
    again = load_model(tmp_path / "model.safetensors")
    assert torch.equal(again.logits(DIGITS.test.images), model.logits(DIGITS.test.images))
    assert float(model.features(DIGITS.test.images).norm(dim=1).max()) <= 1 + 1e-5


def test_little_noise_costs_little(tmp_path):
    layer = {"upload": PRIVATE["upload"] | {"statistics_epsilon": 1e4}, "data": {"train_size": 1438}}
    model = fuse(uploads_of(tmp_path, layer, {"analytic": {"filters": 6}}))
    assert float((model.predict(DIGITS.test.images) == DIGITS.test.labels).float().mean()) > 0.85


def test_noise_is_secret_unless_a_simulation_asks_for_a_seed(tmp_path):
    layers = [PRIVATE, PRIVATE, {"upload": PRIVATE["upload"] | {"statistics_noise_seed": None}}]
    grams = []
    for name, layer in zip("abcd", [*layers, layers[2]], strict=True):
        grams.append(uploads_of(tmp_path / name, layer).uploads[0].statistics().gram)
    assert torch.equal(grams[0], grams[1])
    assert not torch.equal(grams[2], grams[3])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"analytic": "none"}, "at least one term"),
        ({"analytic": {"filtres": 3}}, "did you mean 'filters'"),
        ({"analytic": "random_cnov"}, "did you mean 'random_conv'"),
        ({"upload": {"counts": "withheld"}}, "exact statistics reveal the class counts"),
        ({"upload": {"statistics_epsilon": 1.0}}, "set upload.counts=withheld"),
        ({"fusions": [{"name": "analytic", "ridge": -1.0}]}, "must be greater than 0"),
        ({"method": "flare", "fusions": "analytic"}, "fusion analytic needs statistics"),
        (
            {"method": "flare_analytic", "upload": {"statistics_epsilon": 1.0}},
            "the trained network in the same upload is not private",
        ),
        ({"method": "flare_analytic", "upload": {"evidence": []}}, "needs density"),
        (
            {"method": "flare_analytic", "fusions": [{"name": "flare_analytic", "networks": "redistribution"}]},
            "needs calibration",
        ),
    ],
)
def test_mistakes_are_one_line_before_any_work(layer, message):
    with pytest.raises(ConfigError, match=message) as caught:
        resolve({"method": "analytic"}, layer)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Networks and statistics in one upload each."""
    folder = tmp_path_factory.mktemp("both") / "run"
    layer = {"method": "flare_analytic", "analytic": SMALL, "data": {"train_size": 900}, "epochs": 6}
    layer["train"] = {"holdout": 0.1}
    result = run_experiment(resolve(TINY, layer), folder)
    experiment, files = read_experiment(folder), RunFiles(folder)
    made = Simulation.build(experiment, files, load(experiment.data))
    return result, made.collect([files.client(client).read_summary() for client in range(3)], Observer())


def test_the_combination_is_not_worse_than_its_better_part(both):
    result, uploads = both
    parts = {name: row["accuracy"] for name, row in result.fusions.items()}
    assert parts["flare_analytic"] >= max(parts["analytic"], parts["density_ratio"]) - 0.02
    fields = {"weights", "prototypes", "counts", "statistics", "class_means", "calibration", "density"}
    for upload in uploads:
        assert upload.fields == fields
    assert any(upload.trust > 0 for upload in uploads)


@pytest.mark.parametrize("knowing", [KNOWING, 6.0])
def test_the_combination_adds_two_log_posteriors(both, monkeypatch, knowing):
    """(log p + t score) / (1 + t^2/4), with t = b max(1, K / 1.6)^b, b = (R / 2.5)^2, R the ratio that members' images
    have on average and K the number of members that know an image's class."""
    monkeypatch.setattr("oneflare.fusion.analytic.sums.KNOWING", knowing)
    _, uploads = both
    images = DIGITS.test.images[:30]
    model, ratio, analytic = (
        build_fusion({"name": name}).fuse(uploads).model for name in ("flare_analytic", "density_ratio", "analytic")
    )
    scores, densities = ratio.logits(images) / ratio.rule.sharpness, member_densities(uploads)
    owners, labels = uploads.counts.nonzero(as_tuple=True)
    of_images = densities.expected[owners, labels].repeat_interleave(uploads.counts[owners, labels].long())
    t = min(1.0, (float(of_images.mean()) / densities.means.shape[2] ** 0.5 / knowing) ** 2)
    assert t == 1 if knowing == KNOWING else 0.05 < t < 0.95
    t *= max(1, literal_knowers(uploads.counts) / SEVERAL) ** t
    wanted = ((analytic.predict_proba(images).log() + t * scores) / (1 + t * t / 4)).softmax(1)
    assert torch.allclose(model.predict_proba(images), wanted, atol=1e-4)


def test_files_that_know_no_overlap_answer_as_they_did(both):
    _, uploads = both
    rule = build_fusion({"name": "flare_analytic"}).fuse(uploads).model.rule
    old = Corroboration(**{name: value for name, value in vars(rule).items() if name != "overlap"})
    state, t = torch.randn(5, 2, 10, generator=torch.Generator().manual_seed(0)), rule.sharpness
    plain = state[:, 0] + (t * state[:, 1]).log_softmax(1)
    assert torch.equal(old.finish(state), plain)
    assert torch.allclose(rule.finish(state), plain / (1 + t * t / 4))


@pytest.mark.parametrize(("ratio", "t"), [(-1.0, 0.0), (0.0, 0.0), (0.5, 0.04), (1.25, 0.25), (2.5, 1.0), (9.0, 1.0)])
def test_networks_count_as_far_as_members_know_their_own_images(both, ratio, t):
    _, uploads = both
    densities = member_densities(uploads)
    expected = torch.full_like(densities.expected, ratio * densities.means.shape[2] ** 0.5)
    # what is said of classes without an image does not matter
    expected[uploads.counts == 0] = 1e6
    known = networks_know(replace(densities, expected=expected), uploads.counts)
    assert known == pytest.approx(t)
    for factor in (1, 100):  # few images of a class make no member that knows it
        counts = factor * uploads.counts
        wanted = t * max(1, literal_knowers(counts) / SEVERAL) ** t
        assert networks_say(known, counts) == pytest.approx(wanted)
    assert literal_knowers(counts) > SEVERAL


def literal_knowers(counts):
    """The harmonic mean over all images of how many members know their class: 1 over the sum of the squared shares of
    those with ten."""
    found = []
    for own in counts.T.tolist():
        say = [n**0.5 for n in own if n >= 10]
        several = sum(say) ** 2 / sum(part**2 for part in say) if say else 1.0
        found += [several] * round(sum(own))
    return len(found) / sum(1 / several for several in found)


@pytest.mark.parametrize(
    ("counts", "several"),
    [
        ([[100.0], [100.0], [100.0], [100.0]], 4.0),
        ([[400.0], [0.0], [0.0], [0.0]], 1.0),
        ([[400.0], [9.0], [9.0], [9.0]], 1.0),
        ([[9.0], [9.0], [9.0], [9.0]], 1.0),
        ([[400.0], [100.0], [0.0], [0.0]], 1.8),
    ],
)
def test_members_that_know_a_class_are_counted_by_their_say(counts, several):
    assert knowers(torch.tensor(counts, dtype=torch.float64)).tolist() == pytest.approx([several])


@pytest.mark.parametrize("networks", ["density", "redistribution"])
@pytest.mark.parametrize("embed", [True, False])
def test_the_combination_is_saved_and_loaded(both, tmp_path, embed, networks):
    _, uploads = both
    model = build_fusion({"name": "flare_analytic", "networks": networks}).fuse(uploads).model
    model.save(tmp_path / "model.safetensors", embed=embed)
    again = load_model(tmp_path / "model.safetensors")
    images = DIGITS.test.images[:30]
    assert torch.equal(again.logits(images), model.logits(images))
    assert same_answers(model.predict(images, batch_size=7), model.logits(images))
    assert again.cost == model.cost
    assert model.cost.forward_passes == 4


def test_untrusted_networks_leave_the_analytic_answer(both):
    _, uploads = both
    model = build_fusion({"name": "flare_analytic", "networks": "redistribution"}).fuse(uploads).model
    images = DIGITS.test.images[:30]
    model.rule.trust.zero_()
    assert torch.allclose(model.predict_proba(images), model.analytic.predict_proba(images), atol=1e-6)


def test_a_member_moves_probability_only_among_the_classes_it_knows():
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([[40.0, 60.0, 3.0, 0.0, 0.0]])
    rule = Redistribution.of(counts, torch.tensor([0.7]), torch.randn(1, 5, 8, generator=generator))
    assert rule.shares.tolist() == [1.0]
    before = torch.randn(6, 5, generator=generator).log_softmax(1)
    state = rule.start(6)
    state[:, 0] = before
    features = F.normalize(torch.randn(6, 8, generator=generator), dim=1)
    rule.add(state, slice(0, 6), 0, features)
    after = rule.finish(state).exp()
    assert torch.allclose(after[:, :2].sum(1), before.exp()[:, :2].sum(1), atol=1e-6)
    assert torch.allclose(after[:, 2:], before.exp()[:, 2:], atol=1e-6)
    ratios = 0.7 * (features @ rule.prototypes[0, :2].T - counts[0, :2].log())
    assert torch.allclose(
        (after[:, 0] / after[:, 1]).log(), before[:, 0] - before[:, 1] + ratios[:, 0] - ratios[:, 1], atol=1e-5
    )


def test_members_who_know_the_same_classes_average():
    counts = torch.tensor([[100.0, 100.0, 0.0], [100.0, 100.0, 0.0], [0.0, 0.0, 50.0]])
    rule = Redistribution.of(counts, torch.ones(3), torch.zeros(3, 3, 4))
    assert rule.shares.tolist() == [0.5, 0.5, 1.0]
    assert rule.trust.tolist() == [1.0, 1.0, 0.0]


def test_hold_out_takes_its_share_of_every_class():
    labels = torch.tensor([0] * 50 + [1] * 19 + [2] * 9)
    data = ClientData.of(type(DIGITS.train)(torch.arange(78).view(-1, 1, 1, 1), labels), 4)
    kept, held = hold_out(data, 0.1, (0, 0))
    assert held.counts.tolist() == [5, 1, 0, 0]
    assert (kept.counts + held.counts).tolist() == data.counts.tolist()
    assert sorted([*kept.images.flatten().tolist(), *held.images.flatten().tolist()]) == list(range(78))
    assert hold_out(data, 0.0, (0, 0)) == (data, None)
    again = hold_out(data, 0.1, (0, 0))[1]
    assert torch.equal(again.images, held.images)


def test_a_network_that_knows_nothing_is_not_trusted(tmp_path):
    made = federation(tmp_path, {"method": "flare_analytic"})
    train = DIGITS.train
    data = ClientData.of(train, 10)
    _, held = hold_out(data, 0.1, (0, 0))
    shuffled = ClientData(
        held.images, held.labels[torch.randperm(len(held), generator=torch.Generator().manual_seed(0))], held.counts
    )
    assert calibrate(made.template(), data.counts, shuffled, made.contract) < 0.1
    few = torch.tensor([50, 19, 0, 0, 0, 0, 0, 0, 0, 0])
    assert calibrate(made.template(), few, held, made.contract) == 0


def test_the_command_line(tmp_path, here):
    from shared import TINY_WORDS

    outcome = here("run", *TINY_WORDS, "method=analytic", "analytic.filters=12", "--out", "r", "--json", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    content = json.loads(outcome.stdout)
    assert content["epochs"] == 0
    assert content["fusions"]["analytic"]["accuracy"] > 0.9
    page = here("report", "r", cwd=tmp_path)
    assert page.returncode == 0, page.stderr
