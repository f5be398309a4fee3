"""Densities that lie: what an honest member's ratio is, who is named, and for how much a ratio counts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from oneflare.errors import ConfigError
from oneflare.fusion import UploadSet, build_fusion
from oneflare.fusion.densities import BOUND, expected_ratios, member_densities
from oneflare.fusion.spreads import claimed_spreads, compared, spreads_of
from oneflare.fusion.trust.probes import probe_features
from oneflare.fusion.trust.ratios import FAR, KNOWN, false_densities, fit, knows_nothing
from oneflare.methods.resolve import resolve
from oneflare.models.rules.density import FREEDOM, StudentDensities
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment
from oneflare.study.lies import LIES, rewritten
from oneflare.upload import COUNTS, EVIDENCE, read_upload
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY, DENSITY_MEANS, WITHIN

LOUD = ("far_background", "wide_background", "wide_classes")


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> UploadSet:
    """Four members that trained long enough to know their own images."""
    from oneflare.client.observer import Observer
    from oneflare.data import load

    settings = {"data": "digits", "encoder": {"name": "conv4", "width": 8}, "clients": 4, "alpha": 0.3}
    experiment = resolve(settings, {"method": "fafi", "fusions": "density_ratio", "epochs": 8, "train.snapshots": 0})
    folder = tmp_path_factory.mktemp("densities") / "run"
    run_experiment(experiment, folder)
    files = RunFiles(folder)
    run = Simulation.build(experiment, files, load(experiment.data))
    return run.collect([files.client(client).read_summary() for client in range(4)], Observer())


def lying(federation: UploadSet, position: int, name: str, folder) -> UploadSet:
    honest = federation.uploads[position]
    path = rewritten(honest, folder / f"{name}-{position}.safetensors", LIES[name][1])
    sent = read_upload(path, federation.contract)
    return dataclasses.replace(
        federation, uploads=tuple(sent if upload is honest else upload for upload in federation.uploads)
    )


def test_honest_members_are_not_suspected_and_know_nothing_of_probes(federation):
    densities, features = member_densities(federation), probe_features(federation).own
    assert false_densities(federation, features) == {}
    assert densities.usual is not None
    assert float(knows_nothing(densities, features).max()) < KNOWN * densities.usual


@pytest.mark.parametrize("name", [*LOUD, "exchanged_densities"])
def test_whoever_lies_about_densities_is_named_and_left_out(federation, tmp_path, name):
    position = int(torch.tensor([int((upload.counts > 0).sum()) for upload in federation]).argmax())
    uploads = lying(federation, position, name, tmp_path)
    client = federation.uploads[position].client
    found = false_densities(uploads, probe_features(uploads).own)
    assert list(found) == [client]
    word = "agree with its own prototypes" if name == "exchanged_densities" else "of pictures that show nothing"
    assert word in found[client]
    fused = build_fusion({"name": "density_ratio"}).fuse(uploads)
    assert [(one.client, one.treatment) for one in fused.suspects] == [(client, "left out")]


@pytest.mark.parametrize("times", [1e3, 1e6])
def test_whoever_denies_its_classes_by_wide_densities_is_named(federation, tmp_path, times):
    """So wide that they lose everywhere: a class that others hold too is then denied by whoever has most of it."""
    honest = federation.uploads[1]
    path = rewritten(honest, tmp_path / "wide.safetensors", lambda tensors: tensors[EVIDENCE + WITHIN].mul_(times))
    sent = read_upload(path, federation.contract)
    uploads = dataclasses.replace(
        federation, uploads=tuple(sent if upload is honest else upload for upload in federation.uploads)
    )
    found = false_densities(uploads, probe_features(uploads).own)
    assert list(found) == [honest.client]
    fused = build_fusion({"name": "density_ratio"}).fuse(uploads)
    assert [(one.client, one.treatment) for one in fused.suspects] == [(honest.client, "left out")]


@pytest.mark.parametrize("name", ["narrow_background", "narrow_classes"])
def test_whoever_narrows_its_densities_is_named(federation, tmp_path, name):
    for position, honest in enumerate(federation):
        uploads = lying(federation, position, name, tmp_path)
        found = false_densities(uploads, probe_features(uploads).own)
        assert list(found) == [honest.client]
        assert "said to differ" in found[honest.client] or "show nothing" in found[honest.client]


def scaled(federation: UploadSet, position: int, part: str, times: float, folder) -> UploadSet:
    honest = federation.uploads[position]
    path = folder / f"{position}-{part}-{times:.2f}.safetensors"
    sent = read_upload(
        rewritten(honest, path, lambda tensors: tensors[EVIDENCE + part].mul_(times)), federation.contract
    )
    return dataclasses.replace(
        federation, uploads=tuple(sent if upload is honest else upload for upload in federation.uploads)
    )


def test_spreads_are_bounded_by_those_of_the_median_member(federation, tmp_path):
    honest = spreads_of(federation)
    assert float(honest.within.median()) == pytest.approx(1.0)
    ones = torch.ones(len(federation), dtype=torch.float64)
    assert all(torch.allclose(factor, ones) for factor in honest.bounded(20.0))
    for part, times in ((WITHIN, 15.0), (WITHIN, 1 / 15), (BACKGROUND, 15.0), (BACKGROUND, 1 / 15)):
        told = spreads_of(scaled(federation, 1, part, times, tmp_path))
        behind, inside = told.bounded(2.0)
        assert torch.allclose(told.background * behind, told.background.clamp(0.5, 2))
        assert bool(((told.within * inside / behind >= 0.5 - 1e-9) & (told.within * inside / behind <= 2 + 1e-9)).all())
        assert abs(float((inside if part == WITHIN else behind)[1]) * times - 1) < 3.5


def test_moderate_lies_about_spreads_cost_little_where_these_are_bounded(federation, tmp_path):
    """Fifteen times as wide or as narrow names nobody; every member in turn says so."""
    from oneflare.core.config import DataConfig
    from oneflare.data import load

    test = load(DataConfig(name="digits")).test

    def accuracy(uploads: UploadSet, cap: float | None) -> float:
        model = build_fusion({"name": "density_ratio", "spread_cap": cap}).fuse(uploads).model
        return 100 * float((model.logits(test.images).argmax(1) == test.labels).double().mean())

    honest = accuracy(federation, None)
    assert abs(accuracy(federation, 2.0) - honest) < 2
    ways = [(position, part, times) for position in range(4) for part in (WITHIN, BACKGROUND) for times in (15, 1 / 15)]
    lies = [scaled(federation, *way, tmp_path) for way in ways]
    free, bounded = ([honest - accuracy(lie, cap) for lie in lies] for cap in (None, 2.0))
    assert max(free) > 1  # in points; training rounds differently on other processors
    assert max(bounded) < 0.5


def test_a_wide_background_is_not_held_against_a_member_of_one_class():
    """Its network answers everything almost as it answers the class, so their distance says nothing."""
    claims = torch.tensor([[1.0, 1.0], [1.2, 0.9], [300.0, 1.0], [0.8, 1.1]], dtype=torch.float64)
    images = [100, 200, 150, 90]
    assert compared(claims, images, [3, 2, 2, 4]).background[2] == 300
    told = compared(claims, images, [3, 2, 1, 4])
    assert told.background.tolist() == [1.0, 1.2, 1.0, 0.8]
    assert told.within.tolist() == claims[:, 1].tolist()
    assert all(torch.equal(factor, torch.ones(4, dtype=torch.float64)) for factor in told.bounded(2.0))
    claims[2] = torch.tensor([0.01, 50.0])
    told = compared(claims, images, [3, 2, 1, 4])
    assert float(told.background[2]) < 0.05
    assert float(told.within[2]) > 20


def test_a_member_of_one_class_with_a_background_around_it_is_kept(federation, tmp_path):
    """Its class mean is said to be where its background is: so is that of a network which knows one class."""
    honest = federation.uploads[1]
    largest = int(honest.counts.argmax())

    def one_class(tensors):
        tensors[COUNTS].mul_(torch.arange(len(tensors[COUNTS])) == largest)
        means, middle = tensors[EVIDENCE + DENSITY_MEANS], tensors[EVIDENCE + BACKGROUND_MEAN]
        near = middle + 0.01 * (means[largest] - middle)
        means.zero_()
        means[largest] = near

    sent = read_upload(rewritten(honest, tmp_path / "one.safetensors", one_class), federation.contract)
    uploads = dataclasses.replace(
        federation, uploads=tuple(sent if upload is honest else upload for upload in federation.uploads)
    )
    claims = torch.stack([claimed_spreads(upload.evidence(DENSITY), upload.counts) for upload in uploads])
    assert float(claims[1, 0] / claims[:, 0].median()) > FAR
    assert false_densities(uploads, probe_features(uploads).own) == {}


def test_means_of_a_few_images_may_disagree_with_prototypes_that_were_hardly_trained(federation):
    densities, features = member_densities(federation), probe_features(federation).own
    held = densities.held[0].nonzero().flatten().tolist()

    def exchanged(first: int, second: int):
        means = densities.means.clone()
        means[0, [first, second]] = means[0, [second, first]]
        return dataclasses.replace(densities, means=means)

    def agreement(pair: tuple[int, int]) -> float:
        value = fit(exchanged(*pair).means[0, held], federation.uploads[0].prototypes[held])
        return 1.0 if value is None else value

    pair = min(itertools.combinations(held, 2), key=agreement)
    assert list(false_densities(federation, features, exchanged(*pair))) == [federation.uploads[0].client]
    counts = federation.uploads[0].counts.clone()
    counts[list(pair)] = 5
    few = dataclasses.replace(federation.uploads[0], counts=counts)
    uploads = dataclasses.replace(federation, uploads=(few, *federation.uploads[1:]))
    assert false_densities(uploads, features, exchanged(*pair)) == {}
    counts[held] = 5  # nothing is known well: all classes are judged alike
    assert list(false_densities(uploads, features, exchanged(*pair))) == [federation.uploads[0].client]


def test_a_bound_below_one_is_refused():
    with pytest.raises(ConfigError, match="spread_cap: must be at least 1"):
        build_fusion({"name": "density_ratio", "spread_cap": 0.5})


def test_lies_about_densities_need_densities():
    names = {name for name, (needed, _) in LIES.items() if needed == EVIDENCE + DENSITY}
    assert names == {*LOUD, "narrow_background", "narrow_classes", "exchanged_densities"}


def test_the_ratio_of_own_images_is_the_equation():
    """One member, one class, by hand in two dimensions with diagonal covariances."""
    within, behind = torch.diag(torch.tensor([1.0, 4.0])), torch.diag(torch.tensor([9.0, 25.0]))
    mean, middle = torch.tensor([3.0, 5.0]), torch.zeros(2)
    classes = StudentDensities.of(mean[None, None], within[None], torch.tensor([[1.5]]))
    background = StudentDensities.of(middle[None, None], behind[None], torch.ones(1, 1))
    found = expected_ratios(classes, background, mean[None].double(), within.double())
    near, far = 2.0, 1 / 9 + 4 / 25 + 9 / 9 + 25 / 25
    level = -(torch.log(torch.tensor(4.0)) + 2 * torch.log(torch.tensor(1.5))) / 2 + torch.log(torch.tensor(225.0)) / 2
    half = (FREEDOM + 2) / 2
    wanted = level - half * (
        torch.log1p(torch.tensor(near / (FREEDOM * 1.5))) - torch.log1p(torch.tensor(far / FREEDOM))
    )
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


def test_no_ratio_counts_for_more_than_three_times_the_usual_one(federation):
    densities = member_densities(federation)
    assert densities.usual is not None
    assert densities.bound == pytest.approx(min(densities.means.shape[2], BOUND * densities.usual))
    hardly = dataclasses.replace(densities, held=torch.zeros_like(densities.held))
    assert hardly.usual is None
    assert hardly.bound == densities.means.shape[2]


def test_means_fit_prototypes_in_their_order_only():
    prototypes = torch.eye(4)
    means = torch.eye(4) * 2 + 0.1
    assert fit(means, prototypes) == pytest.approx(1.0)
    assert fit(means.roll(1, 0), prototypes) == pytest.approx(-1 / 3)
    assert fit(means[:2].flip(0), prototypes[:2]) == pytest.approx(-1.0)
    assert fit(means[:1], prototypes[:1]) is None
    assert fit(torch.zeros(3, 4), prototypes[:3]) == 0
