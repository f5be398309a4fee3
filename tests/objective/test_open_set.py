"""Outliers and the class "unknown": against pixels moved by hand, SciPy's filter, and the printed loss."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import uniform_filter
from torch import nn

from conftest import TINY
from oneflare.client.cohort import supports
from oneflare.client.loop import build_training
from oneflare.client.observer import Observer
from oneflare.client.training import train_client
from oneflare.data import load
from oneflare.errors import ConfigError
from oneflare.fusion import build_fusion, load_model
from oneflare.methods.resolve import resolve
from oneflare.models.onnx import export_onnx
from oneflare.models.rules.votes import OpenSetVotes
from oneflare.objective import Batch, local_terms
from oneflare.objective.open_set import (
    STEP,
    STEPS,
    WAYS,
    OutlierMaker,
    blurred,
    destroy,
    erased,
    mixed_pairs,
    moved,
    part_turned,
    pasted,
    small_crop,
)
from oneflare.objective.terms import Outliers
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment
from oneflare.upload.disclosure import disclose


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbered(images: int = 40, size: int = 8, channels: int = 1) -> torch.Tensor:
    """Images whose pixels say where they come from."""
    return torch.arange(1.0, channels * size * size + 1).view(1, channels, size, size).repeat(images, 1, 1, 1)


def unit(rows: int, d: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(rows, d, generator=generator(seed)), dim=1)


def test_the_term_is_the_printed_loss():
    prototypes, unknown = torch.randn(3, 5, generator=generator(1)), torch.randn(5, generator=generator(2))
    labels = torch.tensor([0, 2, 1, 0])
    outliers = Outliers(unknown, unit(2, 5, 3), unit(2, 5, 4), unit(3, 5, 5))
    batch = Batch(unit(4, 5, 6), labels, prototypes, outliers=outliers)

    def cost(features, label, hidden=None) -> float:
        heads = [*prototypes.double(), unknown.double()]
        scores = [math.exp(float(features.double() @ head)) for head in heads]
        total = sum(score for index, score in enumerate(scores) if index != hidden)
        return -math.log(scores[label] / total)

    def mean(values) -> float:
        return sum(values) / len(values)

    pairs = list(zip(batch.features, labels.tolist(), strict=True))
    expected = mean([cost(z, y) for z, y in pairs]) + mean([cost(z, 3, hidden=y) for z, y in pairs])
    expected += mean([cost(z, 3) for z in outliers.destroyed]) + mean([cost(z, 3) for z in outliers.moved])
    expected += 0.01 * mean([cost(z, 3) for z in outliers.mixed])
    assert float(local_terms({"open_set": 1.0}, batch)["open_set"]) == pytest.approx(expected, rel=1e-5)
    none = dataclasses.replace(outliers, mixed=torch.zeros(0, 5))
    assert torch.isfinite(local_terms({"open_set": 1.0}, dataclasses.replace(batch, outliers=none))["open_set"])
    with pytest.raises(ValueError, match="needs outliers"):
        local_terms({"open_set": 1.0}, dataclasses.replace(batch, outliers=None))


@pytest.mark.parametrize("size", [8, 9, 16])
def test_a_strip_is_pasted_or_halves_change_places(size):
    source = numbered(60, size)
    half, kinds = size // 2, set()
    for image in pasted(source, generator(1))[:, 0]:
        whole = source[0, 0]
        if all(len(set(row.tolist()) - set(whole[index].tolist())) == 0 for index, row in enumerate(image)):
            image, whole = image.T, whole.T
        rows = [int((whole == row).all(1).nonzero()) for row in image]
        moved_rows = [index for index, row in enumerate(rows) if row != index]
        if len(set(rows)) == size:
            assert rows == [(index + half) % size for index in range(size)]
            kinds.add("swapped")
        else:
            shift = {rows[index] - index for index in moved_rows}
            assert len(moved_rows) == half
            assert moved_rows == list(range(moved_rows[0], moved_rows[0] + half))
            assert len(shift) == 1
            assert half / 2 <= abs(shift.pop()) <= half
            kinds.add("pasted")
    assert kinds == {"swapped", "pasted"}


def test_two_squares_are_turned_by_the_same_angle():
    source, angles = numbered(40, 8), set()
    for image in part_turned(source, generator(2))[:, 0].numpy():
        whole = source[0, 0].numpy()
        rows = np.flatnonzero((image != whole).any(1))
        first = rows[0]
        found = [
            number
            for number in (1, 2, 3)
            if all(
                np.array_equal(image[first : first + 4, side], np.rot90(whole[first : first + 4, side], number))
                for side in (slice(0, 4), slice(4, 8))
            )
        ]
        assert len(found) == 1
        angles.update(found)
        untouched = [row for row in range(8) if not first <= row < first + 4]
        assert np.array_equal(image[untouched], whole[untouched])
    assert angles == {1, 2, 3}


@given(seed=st.integers(0, 60))
def test_blurring_is_scipys_mean_over_a_window(seed):
    images = torch.rand(1, 1, 12, 12, generator=generator(seed))
    found = blurred(images, generator(seed))[0, 0].double().numpy()
    windows = [(a, b) for a in range(1, 10, 2) for b in range(1, 10, 2) if min(a, b) <= 5 and max(a, b) >= 3]
    candidates = [uniform_filter(images[0, 0].double().numpy(), window, mode="mirror") for window in windows]
    assert min(np.abs(found - candidate).max() for candidate in candidates) < 1e-6


@given(seed=st.integers(0, 60))
def test_erased_is_a_rectangle_of_a_third_to_a_half(seed):
    for image in erased(torch.ones(4, 2, 32, 32), generator(seed)):
        hole = image[0] == 0
        assert torch.equal(hole, image[1] == 0)
        rows, columns = hole.any(1), hole.any(0)
        assert torch.equal(hole, rows[:, None] & columns[None])
        assert 0.26 <= float(hole.float().mean()) <= 0.57


@given(seed=st.integers(0, 60))
def test_a_small_crop_shows_a_tenth_to_a_third_of_the_image(seed):
    """On a ramp, the distance between the outermost pixels tells how much of the side is shown."""
    across = torch.linspace(0, 1, 64).expand(3, 1, 64, 64)
    wide, tall = small_crop(across, generator(seed)), small_crop(across.transpose(2, 3), generator(seed))
    width, height = wide[:, 0, 0, -1] - wide[:, 0, 0, 0], tall[:, 0, -1, 0] - tall[:, 0, 0, 0]
    assert bool(((width * height > 0.09) & (width * height < 0.34)).all())


def test_every_image_is_destroyed_in_one_of_the_ways():
    images = torch.rand(200, 3, 8, 8, generator=generator())
    found = destroy(images, generator(1))
    assert found.shape == images.shape
    assert torch.equal(found, destroy(images, generator(1)))
    assert not torch.equal(found, destroy(images, generator(2)))
    assert float(((found != images).flatten(1).any(1)).float().mean()) == 1.0
    assert len(WAYS) == 7


def test_the_attack_follows_the_sign_of_the_gradient_and_leaves_the_network_as_it_was():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten()).train()
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    images, heads = torch.rand(6, 1, 5, 5), torch.randn(4, 36)
    found = moved(images, encoder, heads)
    assert encoder.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())
    encoder.eval()
    expected = images.clone()
    for _ in range(STEPS):
        expected = expected.detach().requires_grad_()
        scores = F.normalize(encoder(expected), dim=1) @ heads.T
        loss = -scores.log_softmax(1)[:, 3].mean()
        loss.backward()
        expected = expected + STEP * expected.grad.sign()
    assert torch.allclose(found, expected.detach(), atol=1e-6)

    def as_unknown(x: torch.Tensor) -> float:
        return float((F.normalize(encoder(x), dim=1) @ heads.T).softmax(1)[:, 3].mean().detach())

    assert as_unknown(found) < as_unknown(images)


def test_only_features_of_two_classes_are_mixed():
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    for seed in range(20):
        rows, partners, share = mixed_pairs(labels, generator(seed))
        assert bool((labels[rows] != labels[partners]).all())
        assert 0 <= share <= 1
    assert len(mixed_pairs(torch.zeros(4, dtype=torch.long), generator())[0]) == 0
    views, others = torch.randn(6, 3), torch.randn(6, 3)
    outliers = OutlierMaker(generator(3)).outliers(others, views, labels, torch.zeros(3))
    rows, partners, share = mixed_pairs(labels, generator(3))
    assert torch.allclose(outliers.mixed, F.normalize(share * views[rows] + (1 - share) * views[partners], dim=1))
    assert torch.allclose(torch.cat([outliers.destroyed, outliers.moved]), F.normalize(others, dim=1))


def test_the_surest_members_vote():
    """Two members on one image, by hand: the second has never seen anything like it."""
    prototypes = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [3.0, 0.0]]])
    rule = OpenSetVotes(prototypes, torch.tensor([[-1.0, 0.0], [4.0, 0.0]]), torch.tensor(1))
    image = torch.tensor([[1.0, 0.0]])
    first, second = (torch.tensor(scores).exp() for scores in ([2.0, 0.0, -1.0], [0.0, 3.0, 4.0]))
    first, second = first / first.sum(), second / second.sum()
    for experts, expected in ((1, first[:2]), (2, first[:2] + second[:2])):
        voting = dataclasses.replace(rule, experts=torch.tensor(experts))
        state = voting.start(1)
        voting.add(state, slice(None), 0, 5 * image)
        voting.add(state, slice(None), 1, image)
        assert torch.allclose(voting.finish(state).exp()[0], expected, atol=1e-6)
    state = rule.start(1)
    rule.add(state, slice(None), 1, image)  # the other one gave no answer
    assert torch.allclose(rule.finish(state).exp()[0], second[:2], atol=1e-6)


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Simulation:
    experiment = resolve(TINY, {"method": "fedov", "train.snapshots": 0})
    folder = tmp_path_factory.mktemp("fedov") / "run"
    run_experiment(experiment, folder)
    return Simulation.build(experiment, RunFiles(folder), load(experiment.data))


def test_a_federation_votes_saves_and_exports(federation, tmp_path):
    uploads = federation.collect([federation.files.client(i).read_summary() for i in range(3)], Observer())
    start = build_training(federation.clients.job(0), federation.clients.data(0)).network.unknown
    learned = [upload.evidence("unknown")["unknown"] for upload in uploads]
    assert not any(torch.allclose(row, start, atol=1e-3) for row in learned)
    model = build_fusion({"name": "open_set_votes"}).fuse(uploads).model
    images = federation.dataset.test.images
    model.save(tmp_path / "model.safetensors")
    assert torch.equal(load_model(tmp_path / "model.safetensors").logits(images), model.logits(images))
    assert export_onnx(model, tmp_path / "model.onnx").difference < 1e-4
    fields = {field.name for field in disclose(uploads.uploads[0].path).fields}
    assert "unknown" in fields
    assert "evidence" not in fields  # which is described as averages over images
    alone = build_fusion({"name": "open_set_votes", "experts": 99}).fuse(uploads).model
    assert int(alone.rule.experts) == 3


def test_outliers_resume_bit_for_bit(federation, tmp_path):
    experiment = resolve(TINY, {"method": "fedov", "epochs": 3, "train.snapshots": 0, "train.checkpoint_seconds": 0})
    made = Simulation.build(experiment, RunFiles(tmp_path / "run"), federation.dataset)
    assert not supports(made.clients.job(0))

    class CutAfterTwo(Observer):
        def epoch(self, client, epoch, row, samples):
            if epoch == 2:
                raise KeyboardInterrupt

    jobs = [dataclasses.replace(made.clients.job(1), folder=tmp_path / name) for name in ("whole", "cut")]
    train_client(jobs[0], made.clients.data(1))
    with pytest.raises(KeyboardInterrupt):
        train_client(jobs[1], made.clients.data(1), CutAfterTwo())
    train_client(jobs[1], made.clients.data(1))
    one, other = ((tmp_path / name / "upload.safetensors").read_bytes() for name in ("whole", "cut"))
    assert one == other


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "flare", "upload.evidence": "unknown"}, "no class unknown is trained"),
        ({"method": "flare", "fusions": "open_set_votes"}, "needs unknown"),
        ({"method": "fedov", "train.check_lr": True}, "train.check_lr"),
        ({"method": "fedov", "objective.bank": "public", "data.public": 20}, "objective.bank=public"),
        ({"method": "fedov", "fusions": [{"name": "open_set_votes", "experts": 0}]}, "experts"),
    ],
)
def test_what_does_not_fit_is_named_before_any_work(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        resolve(TINY, settings)
