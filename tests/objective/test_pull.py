"""The pull of the anchors, against plain autograd with two backward passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import TINY
from oneflare.client.job import ClientJob
from oneflare.client.loop import build_training
from oneflare.data import load
from oneflare.methods.resolve import resolve
from oneflare.objective import CONTROLLERS, ClientFacts, Pull, align, build_controller
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
