from __future__ import annotations

import copy
import math

import pytest
import torch

from conftest import TINY
from oneflare.client.files import ClientFiles
from oneflare.client.job import ClientJob
from oneflare.client.loop import build_training
from oneflare.client.observer import Observer
from oneflare.client.training import train_client
from oneflare.core.files import load_state, save_state
from oneflare.data import load
from oneflare.errors import ConfigError
from oneflare.methods.resolve import resolve
from oneflare.nn.optimisers import (
    OPTIMISERS,
    SGD,
    Optimiser,
    StepSettings,
    Thermostat,
    largest_curvature,
    scaled_rate,
    stable_rate,
)
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import run_experiment


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("eigenvalues", [(5.0, 2.0, 0.5), (3.0, -10.0, 1.0), (-1.0, -4.0, -2.0)])
def test_curvature_is_the_largest_eigenvalue_of_a_quadratic(eigenvalues):
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator(), dtype=torch.float64))
    hessian = turn @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ turn.T
    x = torch.randn(3, dtype=torch.float64, generator=generator(1)).requires_grad_()
    found = largest_curvature(lambda: x @ hessian @ x / 2, [x], generator(2), steps=200, tolerance=1e-9)
    assert found == pytest.approx(max(eigenvalues), rel=1e-4)
    assert stable_rate(found) == pytest.approx(2 / max(eigenvalues) if max(eigenvalues) > 0 else math.inf, rel=1e-4)


def test_curvature_of_several_tensors_equals_the_full_hessian():
    a = torch.randn(3, generator=generator(), dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, generator=generator(1), dtype=torch.float64, requires_grad=True)

    def loss(a, b):
        return (a**4).sum() + (a[:2] * b).sum() ** 2 + (b**2).sum()

    blocks = torch.autograd.functional.hessian(loss, (a, b))
    full = torch.cat([torch.cat(list(row), 1) for row in blocks])
    found = largest_curvature(lambda: loss(a, b), [a, b], generator(2), steps=300, tolerance=1e-10)
    assert found == pytest.approx(float(torch.linalg.eigvalsh(full)[-1]), rel=1e-4)


def test_a_loss_without_curvature():
    x = torch.ones(3, requires_grad=True)
    assert largest_curvature(lambda: x.sum(), [x], generator()) == 0.0
    assert stable_rate(0.0) == math.inf


def test_gradient_descent_is_stable_below_two_over_l_and_not_above():
    for factor, stays in ((0.95, True), (1.05, False)):
        x = torch.tensor([1.0, 1.0], dtype=torch.float64)
        curvature = torch.tensor([8.0, 1.0], dtype=torch.float64)
        for _ in range(200):
            x = x - factor * stable_rate(8.0) * curvature * x
        assert (float(x.norm()) < 1) is stays


def test_linear_scaling_with_the_batch():
    assert scaled_rate(0.05, 512, None) == 0.05
    assert scaled_rate(0.05, 64, 512) == pytest.approx(0.05 / 8)


def made_training(tmp_path, *layers, client: int = 0):
    experiment = resolve(TINY, {"method": "flare"}, *layers)
    made = Simulation.build(experiment, RunFiles(tmp_path), load(experiment.data))
    return build_training(ClientJob(experiment, made.contract, client, tmp_path, flip=False), made.clients.data(client))


def test_the_rate_follows_the_batch_size(tmp_path):
    training = made_training(tmp_path, {"train.lr_scale_batch": 64})
    assert training.run_epoch()["lr"] == pytest.approx(0.05 * 32 / 64)


def test_momentum_is_zero_after_a_restart(tmp_path):
    schedule = {"name": "cosine_restarts", "cycles": 2}
    plain, reset = (
        made_training(tmp_path, {"epochs": 2, "train": {"schedule": schedule, "momentum_reset": on}})
        for on in (False, True)
    )
    assert reset.restarts == {reset.total_steps // 2}
    assert plain.restarts == frozenset()
    assert plain.run_epoch() == reset.run_epoch()
    assert plain.run_epoch() != reset.run_epoch()
    reset.optimizer.reset_momentum()
    assert all(float(velocity.abs().sum()) == 0 for velocity in reset.optimizer.velocity)
    with pytest.raises(ConfigError, match=r"set train\.schedule=cosine_restarts"):
        resolve({"train.momentum_reset": True})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_thermostat_holds_the_squared_update_as_the_rate_falls(momentum):
    """Constant gradients: without noise the squared update falls with the rate; with it, it stays at the target."""
    weights = torch.zeros(2000, requires_grad=True)
    optimizer = SGD([weights], StepSettings(momentum))
    thermostat, draws, squares = Thermostat(1.0, warmup_steps=50), generator(), []
    for step in range(400):
        lr = 0.1 if step < 100 else 0.1 * (1 - (step - 100) / 300)
        before = weights.detach().clone()
        weights.grad = torch.full_like(weights, 0.01)
        optimizer.step(lr)
        thermostat.step(optimizer, lr, draws)
        squares.append(float((weights.detach() - before).square().sum()))
    target = float(thermostat.target)
    assert sum(squares[350:]) / 50 == pytest.approx(target, rel=0.1)
    assert sum(squares[200:250]) / 50 == pytest.approx(target, rel=0.15)


def test_the_thermostat_resumes_bit_for_bit(tmp_path):
    layer = {"epochs": 4, "train": {"thermostat": 0.5, "schedule": "linear"}}
    one = made_training(tmp_path, layer)
    for _ in range(2):
        one.run_epoch()
    save_state(tmp_path / "state", one.state_dict())
    two = made_training(tmp_path, layer)
    two.load_state_dict(load_state(tmp_path / "state"))
    assert [one.run_epoch() for _ in range(2)] == [two.run_epoch() for _ in range(2)]
    assert made_training(tmp_path, {"epochs": 4, "train": {"schedule": "linear"}}).thermostat is None


def test_the_check_of_the_rate_reports_and_changes_nothing(tmp_path):
    experiment = resolve(TINY, {"method": "flare", "epochs": 1})
    made = Simulation.build(experiment, RunFiles(tmp_path), load(experiment.data))
    rows = {}
    for check in (False, True):
        config = resolve(TINY, {"method": "flare", "epochs": 1, "train": {"check_lr": check}})
        job = ClientJob(config, made.contract, 0, tmp_path / str(check), flip=False)
        summary = train_client(job, made.clients.data(0))
        rows[check] = ClientFiles(tmp_path / str(check)).read_trace()
        assert (summary.stable_lr is not None) is check
    assert rows[False] == rows[True]
    assert 0 < summary.stable_lr < 10
    assert summary.peak_lr == 0.05


def test_a_rate_beyond_the_limit_is_a_warning(tmp_path):
    heard = []

    class Listening(Observer):
        def warn(self, text):
            heard.append(text)

    layer = {"method": "fafi", "epochs": 1, "fusions": "feature_mean", "train": {"check_lr": True, "lr": 50.0}}
    run_experiment(resolve(TINY, layer), tmp_path / "run", observer=Listening())
    assert any("exceeds 2/L" in text for text in heard)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(("name", "theirs"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_adam_and_adamw_are_torchs(name, theirs, weight_decay):
    random = torch.Generator().manual_seed(0)
    start = [torch.randn(4, 3, generator=random), torch.randn(5, generator=random)]
    ours, others = ([part.clone().requires_grad_() for part in start] for _ in range(2))
    settings = StepSettings(weight_decay=weight_decay, clip=50.0)
    spec = {"name": name, "beta1": 0.8, "beta2": 0.95}
    own = OPTIMISERS.build(spec, ours, settings)
    oracle = theirs(others, lr=0.1, betas=(0.8, 0.95), weight_decay=weight_decay)
    for step in range(8):
        for parameters in (ours, others):
            sum(((part - step) ** 4).sum() for part in parameters).backward()
        torch.nn.utils.clip_grad_norm_(others, 50.0)
        oracle.step()
        oracle.zero_grad()
        own.step(0.1)
        if step == 3:  # and it can be stopped and resumed
            state = copy.deepcopy(own.state_dict())
            own = OPTIMISERS.build(spec, ours, settings)
            own.load_state_dict(state)
    for one, two in zip(ours, others, strict=True):
        assert torch.allclose(one, two, atol=1e-5)
        assert not torch.allclose(one, torch.zeros_like(one))


def test_the_optimiser_is_chosen_by_name_and_plain_sgd_keeps_the_name_of_a_run():
    plain = resolve(TINY)
    assert resolve(TINY, {"train.optimiser": "sgd"}).training_digest() == plain.training_digest()
    chosen = resolve(TINY, {"train.optimiser": {"name": "adamw", "beta1": 0.8}}).train.optimiser
    assert chosen == {"name": "adamw", "beta1": 0.8, "beta2": 0.999, "epsilon": 1e-8}
    for layer, complaint in (
        ({"train.optimiser": "adamm"}, "unknown optimiser 'adamm'; did you mean 'adam'"),
        ({"train.optimiser": {"name": "adam", "beta1": 1.0}}, "beta1 and beta2 lie in"),
        ({"train.optimiser": "adam", "train.thermostat": 0.5}, "train.thermostat is about sgd, not adam"),
        ({"train.optimiser": "adam", "train.check_lr": True}, "train.check_lr is about sgd, not adam"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            resolve(TINY, layer)


class SignDescent(Optimiser):
    """w <- w - lr sign(g)"""

    def update(self, gradients, lr):
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter -= lr * gradient.sign()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def test_clients_train_with_an_optimiser_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setattr(OPTIMISERS, "_entries", dict(OPTIMISERS._entries))
    OPTIMISERS.register("sign")(SignDescent)
    layer = {"epochs": 1, "train.batch_size": 1000, "train.lr": 0.001, "train.snapshots": 0, "workers": 1}
    experiment = resolve(TINY, layer, {"train.optimiser": "sign"})
    federation = Simulation.build(experiment, RunFiles(tmp_path), load(experiment.data))
    training = build_training(federation.clients.job(0), federation.clients.data(0))
    before = [p.detach().clone() for p in training.network.parameters()]
    training.run_epoch()
    moved = torch.cat([(p - b).flatten() for p, b in zip(training.network.parameters(), before, strict=True)])
    assert set(moved.abs().mul(1e4).round().unique().tolist()) <= {0.0, 10.0}
    assert (moved != 0).float().mean() > 0.5
    state = training.state_dict()
    again = build_training(federation.clients.job(0), federation.clients.data(0))
    again.load_state_dict(state)
    assert again.run_epoch() == training.run_epoch()
