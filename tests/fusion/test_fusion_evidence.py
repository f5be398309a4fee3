"""Fusions by what clients measured: against numpy, dense linear algebra and hand calculation."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import TINY, same_answers
from oneflare.client.evidence import measure_evidence
from oneflare.client.observer import Observer
from oneflare.data import load, prepare
from oneflare.errors import ConfigError
from oneflare.fusion import UploadSet, build_fusion, load_model
from oneflare.fusion.averaging.laplace import Precision, solve_posterior
from oneflare.fusion.averaging.regmean import Regression
from oneflare.methods.resolve import resolve
from oneflare.nn import build_anchors
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment
from oneflare.upload import Contents, read_upload, write_upload
from oneflare.upload.evidence import MEASURED

MERGED = ["fisher", "laplace", "regmean"]
NAMES = [*MERGED, "standardised", "standardised_raw", "standardised_batch", "fedproto"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Simulation:
    """A finished run whose uploads hold all evidence."""
    layer = {"method": "flare", "upload.evidence": list(MEASURED), "fusions": NAMES}
    experiment = resolve(TINY, layer)
    folder = tmp_path_factory.mktemp("evidence") / "run"
    run_experiment(experiment, folder)
    return Simulation.build(experiment, RunFiles(folder), load(experiment.data))


@pytest.fixture
def uploads(federation) -> UploadSet:
    summaries = [federation.files.client(client).read_summary() for client in range(3)]
    return federation.collect(summaries, Observer())


@pytest.fixture
def images(federation) -> torch.Tensor:
    return federation.dataset.test.images


def unit_features(uploads: UploadSet, images: torch.Tensor) -> list[torch.Tensor]:
    inputs = prepare(images, uploads.contract.image)
    with torch.no_grad():
        return [F.normalize(encoder(inputs), dim=1) for encoder in uploads.encoders()]


@pytest.fixture
def twins(federation, uploads, tmp_path):
    """One and the same model, measured on three clients' images."""
    network = copy.deepcopy(uploads.template)
    network.encoder.load_state_dict(uploads.uploads[0].weights())
    made = []
    for client in range(3):
        data, path = federation.clients.data(client), tmp_path / f"{client}.safetensors"
        evidence = measure_evidence(network, data, uploads.contract.image, MEASURED)
        options = {"client": client, "counts": data.counts, "epoch": 1, "evidence": evidence}
        write_upload(path, network, uploads.contract, Contents(**options))
        made.append(read_upload(path, uploads.contract))
    return UploadSet(tuple(made), uploads.contract, uploads.template), network


@pytest.mark.parametrize("name", MERGED)
def test_identical_models_fuse_to_themselves(name, twins):
    uploads, network = twins
    fused = build_fusion({"name": name}).fuse(uploads).model.network.state_dict()
    for key, tensor in network.state_dict().items():
        assert torch.allclose(fused[key].double(), tensor.double(), rtol=1e-4, atol=1e-6), key


@pytest.mark.numeric
@pytest.mark.parametrize("name", NAMES)
def test_batch_size_does_not_change_predictions(name, uploads, images, tmp_path):
    model = build_fusion({"name": name}).fuse(uploads).model
    logits = model.logits(images)
    for batch_size in (1, 7):
        assert same_answers(model.predict(images, batch_size=batch_size), logits)
    model.save(tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors").logits(images), logits)


def test_the_run_scored_them_at_the_end_and_at_the_snapshots(federation):
    for name in NAMES:
        assert federation.files.metrics(name).exists()
        assert federation.files.model(name).exists()


def regression_problem(seed: int = 0):
    """Two clients' inputs and targets, their own least-squares solutions, and that of the pooled data."""
    generator = np.random.default_rng(seed)
    x = [generator.normal(size=(n, 5)) @ generator.normal(size=(5, 5)) for n in (30, 70)]
    y = [generator.normal(size=(len(part), 3)) for part in x]
    own = [np.linalg.lstsq(a, b, rcond=None)[0].T for a, b in zip(x, y, strict=True)]
    pooled = np.linalg.lstsq(np.concatenate(x), np.concatenate(y), rcond=None)[0].T
    grams = [torch.from_numpy(part.T @ part / len(part)) for part in x]
    return [torch.from_numpy(w) for w in own], grams, (0.3, 0.7), torch.from_numpy(pooled)


def test_regmean_of_two_linear_models_is_the_pooled_optimum():
    matrices, grams, shares, pooled = regression_problem()
    regression = Regression(scale=1.0, damping=0.0)
    for matrix, gram, share in zip(matrices, grams, shares, strict=True):
        regression.add(matrix, gram, share)
    assert torch.allclose(regression.result(), pooled, atol=1e-10)


def test_regmean_without_off_diagonals_weighs_columns():
    matrices, grams, shares, _ = regression_problem()
    regression = Regression(scale=0.0, damping=0.0)
    for matrix, gram, share in zip(matrices, grams, shares, strict=True):
        regression.add(matrix, gram, share)
    weights = [share * gram.diagonal() for gram, share in zip(grams, shares, strict=True)]
    expected = (weights[0] * matrices[0] + weights[1] * matrices[1]) / (weights[0] + weights[1])
    assert torch.allclose(regression.result(), expected)


def test_laplace_of_two_linear_models_is_the_pooled_optimum_in_one_step():
    """Squared errors have G = I at every client, so the preconditioner is exact."""
    matrices, grams, shares, pooled = regression_problem()
    identity = torch.eye(3, dtype=torch.float64)
    precisions = [Precision(share, gram, identity) for share, gram in zip(shares, grams, strict=True)]
    right = sum(one.times(matrix) for one, matrix in zip(precisions, matrices, strict=True))
    start = torch.zeros(3, 5, dtype=torch.float64)
    assert torch.allclose(solve_posterior(precisions, right, start, steps=1), pooled, atol=1e-10)


def test_laplace_solves_a_sum_of_kronecker_products():
    generator = torch.Generator().manual_seed(0)
    precisions, matrices = [], []
    for share in (0.2, 0.5, 0.3):
        a, g = (torch.randn(9, n, dtype=torch.float64, generator=generator) for n in (5, 3))
        precisions.append(Precision.damped(share, a.T @ a, g.T @ g, 1e-3))
        matrices.append(torch.randn(3, 5, dtype=torch.float64, generator=generator))
    right = sum(one.times(matrix) for one, matrix in zip(precisions, matrices, strict=True))
    found = solve_posterior(precisions, right, sum(matrices) / 3)
    dense = sum(one.share * torch.kron(one.gradients, one.inputs) for one in precisions)  # on rows of W in turn
    assert torch.allclose(found.flatten(), torch.linalg.solve(dense, right.flatten()), atol=1e-6)


def test_damping_is_a_part_of_the_mean_diagonal():
    damped = Precision.damped(1.0, torch.diag(torch.tensor([1.0, 3.0])), torch.eye(1), 0.1)
    assert torch.allclose(damped.inputs, torch.diag(torch.tensor([1.2, 3.2])))
    assert torch.allclose(damped.gradients, torch.tensor([[1.1]]))


class TwoClients:
    """Stands for a set of uploads with one weight tensor each, to check an equation by hand."""

    def __init__(self, uploads: UploadSet, values, informations, tmp_path) -> None:
        network, made = copy.deepcopy(uploads.template), []
        data_counts = [torch.tensor([1] + [0] * 9), torch.tensor([0, 3] + [0] * 8)]
        for client, (value, information) in enumerate(zip(values, informations, strict=True)):
            with torch.no_grad():
                network.prototypes[:2, :2] = value
            evidence = uploads.uploads[0].evidence()
            evidence["fisher.prototypes"] = torch.zeros_like(network.prototypes)
            evidence["fisher.prototypes"][:2, :2] = information
            evidence["class_means"] = torch.zeros_like(network.prototypes.detach())
            evidence["density.means"] = torch.zeros_like(network.prototypes.detach())
            path = tmp_path / f"two-{client}.safetensors"
            counts = data_counts[client]
            options = {"client": client, "counts": counts, "epoch": 1, "evidence": evidence}
            write_upload(path, network, uploads.contract, Contents(**options))
            made.append(read_upload(path, uploads.contract))
        self.uploads = UploadSet(tuple(made), uploads.contract, uploads.template)


def test_fisher_by_hand(uploads, tmp_path):
    """Sizes 1 and 3: (1 F_1 t_1 + 3 F_2 t_2)/(F_1 + 3 F_2); without information, the average by size."""
    values = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[5.0, 6.0], [0.0, 0.0]])
    informations = torch.tensor([[0.9, 0.3], [0.0, 0.0]]), torch.tensor([[0.3, 0.3], [0.6, 0.0]])
    two = TwoClients(uploads, values, informations, tmp_path).uploads
    fused = build_fusion({"name": "fisher", "damping": 1e-9}).fuse(two).model.network.prototypes[:2, :2]
    expected = torch.tensor([[(3 * 1 + 3 * 5) / 6, (2 + 3 * 6) / 4], [0.0, 2.0]])
    assert torch.allclose(fused, expected, atol=1e-5)


def test_damping_turns_fisher_into_the_average(uploads):
    """Were every weight equally certain, sizes alone would count."""
    fused = build_fusion({"name": "fisher", "damping": 1e9}).fuse(uploads).model.network.state_dict()
    plain = build_fusion({"name": "average"}).fuse(uploads).model.network.state_dict()
    assert all(torch.allclose(fused[key].float(), plain[key].float(), atol=1e-6) for key in plain)
    sure = build_fusion({"name": "fisher"}).fuse(uploads).model.network.state_dict()
    assert not torch.allclose(sure["encoder.layers.0.weight"], plain["encoder.layers.0.weight"], atol=1e-4)


def test_standardised_is_the_equation(uploads, images):
    total = torch.zeros(len(images), uploads.contract.dim)
    for upload, z in zip(uploads, unit_features(uploads, images), strict=True):
        moments = upload.evidence("moments.")
        scored = (z - moments["moments.mean"]) / (moments["moments.variance"] + 1e-5).sqrt()
        total += upload.samples**0.5 * scored
    anchors = build_anchors(uploads.contract.anchors, 10, uploads.contract.dim)
    expected = F.normalize(total, dim=1) @ anchors.T  # unit rows
    found = build_fusion({"name": "standardised"}).fuse(uploads).model.logits(images)
    assert torch.allclose(found / uploads.prototypes.norm(dim=2).mean(), expected, atol=1e-4)


def raw_features(uploads: UploadSet, images: torch.Tensor) -> list[np.ndarray]:
    inputs = prepare(images, uploads.contract.image)
    with torch.no_grad():
        return [encoder(inputs).double().numpy() for encoder in uploads.encoders()]


@pytest.mark.parametrize("name", ["standardised_raw", "standardised_batch"])
def test_fedsras_server_is_the_equation(federation, uploads, images, name):
    """With moments over each client's own images, or over the images that are asked about."""
    total = np.zeros((len(images), uploads.contract.dim))
    for index, (upload, f) in enumerate(zip(uploads, raw_features(uploads, images), strict=True)):
        own = raw_features(uploads, federation.clients.data(upload.client).images)[index]
        known = own if name == "standardised_raw" else f
        deviation = np.sqrt(known.var(0) + 1e-5) if name == "standardised_raw" else np.maximum(known.std(0), 1e-6)
        total += upload.samples**0.5 * (f - known.mean(0)) / deviation
    anchors = build_anchors(uploads.contract.anchors, 10, uploads.contract.dim).double().numpy()
    expected = total / np.linalg.norm(total, axis=1, keepdims=True) @ anchors.T
    model = build_fusion({"name": name}).fuse(uploads).model
    found = model.logits(images).numpy() / float(uploads.prototypes.norm(dim=2).mean())
    assert np.allclose(found, expected, atol=1e-3)
    alone = model.logits(images[:1]) - model.logits(images)[:1]
    assert bool(alone.abs().max() < 1e-4) == (name == "standardised_raw")
    assert any("depends on which others" in line for line in model.remarks()) == (name == "standardised_batch")


def test_a_single_image_gets_no_answer_from_its_own_moments(uploads, images):
    logits = build_fusion({"name": "standardised_batch"}).fuse(uploads).model.logits(images[:1])
    assert not logits.any()


def test_fedproto_is_the_mean_distance_to_the_mean_of_each_class(federation, uploads, images):
    features = unit_features(uploads, images)
    own = [federation.clients.data(upload.client) for upload in uploads]
    inputs = [unit_features(uploads, data.images)[index] for index, data in enumerate(own)]
    pooled, labels = torch.cat(inputs), torch.cat([data.labels for data in own])
    found = build_fusion({"name": "fedproto"}).fuse(uploads).model.logits(images)
    for c in range(10):
        mean = pooled[labels == c].mean(0)  # every image counts once, whoever has it
        shares = uploads.size_weights.float()
        expected = -sum(w * (z - mean).square().sum(1) for w, z in zip(shares, features, strict=True))
        assert torch.allclose(found[:, c], expected, atol=1e-4)


def test_a_class_nobody_has_is_never_the_answer(uploads, images, tmp_path):
    values = informations = torch.zeros(2, 2), torch.zeros(2, 2)
    two = TwoClients(uploads, values, informations, tmp_path).uploads
    logits = build_fusion({"name": "fedproto"}).fuse(two).model.logits(images)
    assert set(logits.argmax(1).tolist()) <= {0, 1}


NEEDED = {
    "fisher": "fisher",
    "laplace": "kronecker",
    "regmean": "gram",
    "standardised": "moments",
    "standardised_raw": "raw_moments",
    "fedproto": "class_means",
}


@pytest.mark.parametrize(("name", "evidence"), NEEDED.items())
def test_what_is_not_measured_is_named_before_training(name, evidence):
    reason = f"fusion {name} needs {evidence}, which the uploads withhold; set upload.evidence={evidence}"
    with pytest.raises(ConfigError, match=reason):
        resolve(TINY, {"fusions": name})
    resolve(TINY, {"fusions": name, "upload.evidence": evidence})


def test_the_remedy_names_everything_at_once():
    with pytest.raises(ConfigError, match=r"set upload\.evidence=fisher,gram,moments"):
        resolve(TINY, {"fusions": "fisher,regmean,standardised", "upload.evidence": "moments"})


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"name": "fisher", "damping": 0.0}, "fisher.damping"),
        ({"name": "laplace", "damping": -1.0}, "laplace.damping"),
        ({"name": "regmean", "scale": 2.0}, "regmean.scale"),
        ({"name": "regmean", "damping": -1.0}, "regmean.damping"),
    ],
)
def test_impossible_options_are_refused(spec, reason):
    with pytest.raises(ConfigError, match=reason):
        build_fusion(spec)
