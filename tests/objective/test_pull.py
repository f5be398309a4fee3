"""The pull of the anchors, against plain autograd with two backward passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import TINY
from oneflare.client.job import ClientJob
from oneflare.client.loop import build_training
from oneflare.data import Augmentation, load
from oneflare.errors import ConfigError
from oneflare.methods.resolve import resolve
from oneflare.objective import CONTROLLERS, ClientFacts, Pull, PullOptions, align, build_controller
from oneflare.objective.pull import REFERENCE
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation


def scene(seed: int):
    """Prototypes, a target, an encoder's weights, and a local loss of both."""
    generator = torch.Generator().manual_seed(seed)
    prototypes, target, weights, mix = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(4))
    prototypes.requires_grad_()
    weights.requires_grad_()

    def local():
        return ((prototypes * mix).sum() + 0.3 * (prototypes * weights).sum()) ** 2 / 10 + (weights**2).sum()

    return prototypes, target, weights, local


@given(seed=st.integers(0, 500), weight=st.sampled_from([0.1, 3.0, 50.0]), project=st.booleans())
def test_one_backward_pass_equals_two(seed, weight, project):
    prototypes, target, weights, local = scene(seed)
    everything = (prototypes, weights)
    g_local = torch.cat([g.flatten() for g in torch.autograd.grad(local(), everything)])
    parts = torch.autograd.grad(align(prototypes, target), everything, allow_unused=True)
    g_align = weight * torch.cat([torch.zeros(24) if g is None else g.flatten() for g in parts]).double()
    inner = g_local @ g_align
    if project and inner < 0:
        g_local = g_local - inner / (g_align @ g_align) * g_align
    expected = g_local + g_align

    pull = Pull(prototypes, target)
    (local() + weight * pull.loss).backward()
    conflict = pull.apply(project)
    assert float(conflict) == float(inner < 0)
    found = torch.cat([prototypes.grad.flatten(), weights.grad.flatten()])
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    if project:
        assert float(g_local @ g_align) >= -1e-9


@pytest.mark.parametrize("name", list(CONTROLLERS))
def test_every_controller_moves_the_prototypes_as_plain_autograd_would(name):
    facts = ClientFacts((3, 5, 1))
    prototypes, target, _, local = scene(7)
    pull = Pull(prototypes, target)
    build_controller({"name": name}, facts).loss(local(), pull.loss, 0.3).backward()
    pull.apply(project=False)
    found = prototypes.grad.clone()
    (expected,) = torch.autograd.grad(
        build_controller({"name": name}, facts).loss(local(), align(prototypes, target), 0.3), prototypes
    )
    assert torch.allclose(found, expected, rtol=1e-6)


@given(seed=st.integers(0, 500), labels=st.lists(st.integers(0, 3), min_size=1, max_size=9), project=st.booleans())
def test_only_seen_classes_are_pulled_by_the_mean_over_their_rows(seed, labels, project):
    prototypes, target, _, local = scene(seed)
    seen = sorted(set(labels))
    (g_local,) = torch.autograd.grad(local(), prototypes)
    mean = ((prototypes[seen] - target[seen]) ** 2).mean()
    (g_align,) = torch.autograd.grad(mean, prototypes)
    inner = (g_local * g_align).sum()
    if project and inner < 0:
        g_local = g_local - inner / g_align.square().sum() * g_align

    pull = Pull(prototypes, target, torch.tensor(labels), PullOptions(seen=True))
    assert torch.allclose(pull.loss, mean.detach())
    (local() + 3.0 * pull.loss).backward()
    pull.apply(project)
    assert torch.allclose(prototypes.grad, g_local + 3.0 * g_align, rtol=1e-9, atol=1e-12)


@given(classes=st.integers(2, 40), dim=st.integers(1, 80), seen=st.booleans())
def test_counted_per_prototype_the_pull_does_not_depend_on_classes_and_features(classes, dim, seen):
    """A prototype that is one away from its anchor in one entry, in a batch that holds every class."""
    prototypes = torch.zeros(classes, dim, dtype=torch.float64, requires_grad=True)
    target = torch.zeros(classes, dim, dtype=torch.float64)
    target[1, 0] = 1.0
    pull = Pull(prototypes, target, torch.arange(classes), PullOptions(seen=seen, per_prototype=True))
    assert pull.loss.item() == pytest.approx(1 / (classes * dim))
    (7.0 * pull.loss).backward()
    pull.apply(project=False)
    assert float(prototypes.grad[1, 0]) == pytest.approx(-2 * 7.0 / REFERENCE)
    assert float(prototypes.grad.abs().sum()) == pytest.approx(2 * 7.0 / REFERENCE)


def test_at_ten_classes_and_512_features_both_counts_are_the_same():
    assert PullOptions(per_prototype=True).factor(10, 512) == PullOptions().factor(10, 512) == 1.0


@pytest.mark.parametrize("seen", [False, True])
def test_a_batch_of_clients_is_pulled_as_each_of_them_alone(seen):
    generator = torch.Generator().manual_seed(0)
    together = torch.randn(3, 4, 6, generator=generator).requires_grad_()
    target, labels = torch.randn(4, 6, generator=generator), torch.tensor([[0, 0, 1], [2, 2, 2], [3, 1, 0]])
    options = PullOptions(seen=seen, per_prototype=True)
    pull = Pull(together, target, labels, options)
    (pull.loss * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    pull.apply(project=False)
    for client in range(3):
        alone = together[client].detach().clone().requires_grad_()
        one = Pull(alone, target, labels[client], options)
        (one.loss * (client + 1)).backward()
        one.apply(project=False)
        assert torch.allclose(alone.grad, together.grad[client])
        assert torch.allclose(one.loss, pull.loss[client])


def test_a_pull_that_is_already_there_conflicts_with_nothing():
    prototypes, _, _, local = scene(1)
    pull = Pull(prototypes, prototypes.detach().clone())
    (local() + 5 * pull.loss).backward()
    assert float(pull.apply(project=True)) == 0
    assert torch.isfinite(prototypes.grad).all()


def training(tmp_path, *layers):
    experiment = resolve(TINY, {"method": "flare"}, *layers)
    made = Simulation.build(experiment, RunFiles(tmp_path), load(experiment.data))
    return build_training(ClientJob(made.experiment, made.contract, 0, tmp_path, flip=False), made.clients.data(0))


def test_prototypes_of_classes_outside_the_batch_feel_no_pull(tmp_path):
    """A loss without prototypes and a batch of one class: only that prototype moves, toward its anchor."""
    terms = {"supcon": 1.0, "cls": 0.0, "proto_feature": 0.0, "proto_separation": 0.0}
    layer = {"objective": {"terms": terms}, "controller": {"name": "fixed", "lambda_0": 50.0}}
    moved = {}
    for name in ("all", "seen"):
        loop = training(tmp_path, layer, {"objective": {"align_classes": name}})
        start = loop.network.prototypes.detach().clone()
        rows = (loop.data.labels == loop.data.labels[0]).nonzero().flatten()[:4]
        loop.step(*loop.views(rows, Augmentation.draw(len(rows), torch.Generator().manual_seed(0))), 0.0)
        moved[name] = (loop.network.prototypes.detach() != start).any(1).nonzero().flatten().tolist()
    assert moved["all"] == list(range(10))
    assert moved["seen"] == [int(loop.data.labels[0])]


def test_options_of_the_pull_are_part_of_a_runs_name():
    chosen = [{}, {"align_reduction": None}, {"align_reduction": "mean"}, {"align_classes": "seen"}]
    names = [resolve(TINY, {"method": "etf_annealed", "objective": options}).training_digest() for options in chosen]
    assert len(set(names)) == len(chosen)
    assert resolve(TINY, {"method": "etf_annealed"}).objective.align_reduction == "per_prototype"
    with pytest.raises(ConfigError, match="align_classes"):
        resolve(TINY, {"objective": {"align_classes": "some"}})


def test_the_trace_reports_the_share_of_conflicting_steps(tmp_path):
    """Shrinking opposes a classifier whose prototypes are small and who wants larger logits."""
    layer = {"anchors": "shrink", "controller": {"name": "fixed", "lambda_0": 1.0}}
    rows = []
    for on in (False, True):
        chosen = training(tmp_path, layer, {"objective": {"pcgrad": on}})
        chosen.network.prototypes.data.mul_(0.1)
        rows.append(chosen.run_epoch())
    assert rows[0]["conflicts"] == rows[1]["conflicts"] == 1.0
    assert rows[1]["align"] < rows[0]["align"]
    assert "conflicts" not in training(tmp_path, {"method": "fafi"}).run_epoch()
