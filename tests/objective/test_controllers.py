from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneflare.errors import ConfigError
from oneflare.objective import CONTROLLERS, ClientFacts, build_controller
from oneflare.objective.controllers.base import entropy_lambda
from oneflare.objective.controllers.valve import MetaLoss

FACTS = ClientFacts((10, 10, 5, 0))


def controller(name: str = "meta_annealed", facts: ClientFacts = FACTS, **options):
    return build_controller({"name": name, **options}, facts)


def play(chosen, local: float, align: float, progress: float, steps: int) -> None:
    for _ in range(steps):
        chosen.loss(torch.tensor(local, requires_grad=True), torch.tensor(align), progress).backward()
        chosen.step()


def raw_of(chosen) -> float:
    return float((chosen.log_s[0] - chosen.log_s[1]).detach().exp())


def test_entropy_rule():
    assert ClientFacts((5, 5, 5, 5)).entropy == pytest.approx(1.0)
    assert ClientFacts((7, 0, 0)).entropy == 0.0
    expected = -(0.4 * math.log(0.4) * 2 + 0.2 * math.log(0.2)) / math.log(4)
    assert FACTS.entropy == pytest.approx(expected)
    assert entropy_lambda(ClientFacts((1, 1)), 1.0, 20.0) == pytest.approx(20.0)
    assert entropy_lambda(ClientFacts((0, 9)), 1.0, 20.0) == 1.0
    log_example = 0.1 + 0.5743 * (10 - 0.1)  # the log's client 0: H = 0.5743 gives 5.7859
    assert log_example == pytest.approx(5.7859, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "options", "progress", "expected"),
    [
        ("none", {}, 0.5, 0.0),
        ("fixed", {"lambda_0": 3.0}, 0.9, 3.0),
        ("annealed", {"lambda_0": 8.0}, 0.25, 6.0),
        ("annealed", {"lambda_0": 8.0, "schedule": "cosine"}, 0.5, 4.0),
        ("annealed", {"lambda_0": 8.0}, 1.0, 0.0),
        ("entropy", {"lambda_min": 2.0, "lambda_max": 12.0}, 0.25, 0.75 * (2 + 10 * FACTS.entropy)),
        ("entropy", {"schedule": "constant"}, 0.9, 1 + 19 * FACTS.entropy),
    ],
)
def test_rules_that_learn_nothing(name, options, progress, expected):
    chosen = controller(name, **options)
    loss = chosen.loss(torch.tensor(2.0), torch.tensor(0.5), progress)
    assert float(loss) == pytest.approx(2.0 + expected * 0.5)
    assert chosen.trace()["lambda_effective"] == pytest.approx(expected)


def test_decoupling_is_exact_in_both_directions():
    """No gradient of the meta-loss on the weights, none of the weights' loss on the sigmas, in one backward pass."""
    weight = torch.tensor(1.3, requires_grad=True)
    chosen = controller(valve=0.02, lambda_max=50.0, floor=1e-3, ceiling=0.1)
    local, align = weight**2, (weight - 3) ** 2
    raw = raw_of(chosen)
    chosen.loss(local, align, 0.25).backward()
    assert float(weight.grad) == pytest.approx(2 * 1.3 + raw * 0.75 * 2 * (1.3 - 3), rel=1e-6)

    alone = controller(valve=0.02, lambda_max=50.0, floor=1e-3, ceiling=0.1)
    alone.meta_loss(local.detach(), align.detach(), 0.75).backward()
    assert torch.equal(chosen.log_s.grad, alone.log_s.grad)

    only_meta = torch.tensor(1.3, requires_grad=True)
    fresh = controller()
    meta = fresh.meta_loss((only_meta**2).detach(), (only_meta - 3).detach() ** 2, 0.75)
    assert torch.autograd.grad(meta, only_meta, allow_unused=True)[0] is None


EQUILIBRIA = {
    "uncertainty": lambda local, align, s, floor: (local, align),
    "uncertainty_rescaled": lambda local, align, s, floor: (local, align + 2 * floor),
    "uncertainty_coupled": lambda local, align, s, floor: (local, s * align),
    "decoupled": lambda local, align, s, floor: (local, align + 2 * floor),
    "meta_annealed": lambda local, align, s, floor: (local, s * align + 2 * floor),
    "autonomous": lambda local, align, s, floor: (local, (align + 2 * floor) / s),
}
"""s_l and s_a at rest, for constant losses and s = s(p)"""
UNGUARDED = {"uncertainty", "uncertainty_coupled"}


@pytest.mark.parametrize("name", list(EQUILIBRIA))
@settings(max_examples=12)
@given(
    local=st.floats(0.3, 20),
    align=st.floats(0.01, 2),
    progress=st.floats(0, 0.9),
    floor=st.sampled_from([0.0, 1e-3, 0.05]),
)
def test_equilibrium_is_the_closed_form(name, local, align, progress, floor):
    options = {} if name in UNGUARDED else {"floor": floor}
    if name != "autonomous":
        options["sigma_lr"] = 0.5 / (
            local if name == "uncertainty_coupled" else 1
        )  # its gradient is 2 s_l times larger
    chosen = controller(name, **options)
    play(chosen, local, align, progress, 250)
    s_local, s_align = chosen.log_s.detach().exp().tolist()
    expected_local, expected_align = EQUILIBRIA[name](local, align, 1 - progress, options.get("floor", 0.0))
    assert s_local == pytest.approx(expected_local, rel=0.01)
    assert s_align == pytest.approx(expected_align, rel=0.01)
    assert chosen.trace()["lambda_raw"] == pytest.approx(expected_local / expected_align, rel=0.01)


@given(
    local=st.floats(0.3, 20),
    align=st.floats(0.01, 2),
    progress=st.floats(0, 1),
    floor=st.sampled_from([0.0, 1e-3, 0.05]),
)
def test_balanced_is_the_closed_form(local, align, progress, floor):
    chosen = controller("balanced", floor=floor, lambda_max=50.0)
    play(chosen, local, align, progress, 3)
    expected = min((1 - progress) * local / (align + 2 * floor), 50.0)
    assert chosen.trace()["lambda_effective"] == pytest.approx(expected, rel=1e-5)


def test_balanced_follows_a_running_mean():
    chosen = controller("balanced", memory=0.9, floor=0.0, schedule="constant")
    play(chosen, 4.0, 1.0, 0.0, 1)
    play(chosen, 8.0, 2.0, 0.0, 1)
    row = chosen.trace()
    assert (row["sigma_local2"], row["sigma_align2"]) == pytest.approx((4.4, 1.1))


@settings(max_examples=60)
@given(
    local=st.floats(1e-3, 100),
    align=st.floats(1e-4, 5),
    w_data=st.sampled_from([1.0, 0.3, 0.01]),
    w_log=st.sampled_from([1.0, 0.3, 0.01]),
    floor=st.sampled_from([0.0, 1e-3]),
    ceiling=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_the_minimum_in_closed_form_is_where_the_gradient_vanishes(local, align, w_data, w_log, floor, ceiling):
    meta = MetaLoss(floor=floor, ceiling=ceiling)
    losses = torch.tensor(local, dtype=torch.float64), torch.tensor(align, dtype=torch.float64)
    log_s = meta.equilibrium(*losses, w_data, w_log).requires_grad_()
    (gradient,) = torch.autograd.grad(meta(log_s, *losses, w_data, w_log), log_s)
    assert gradient.tolist() == pytest.approx([0, 0], abs=1e-6)


@settings(max_examples=40)
@given(
    local=st.floats(0.1, 30),
    align=st.floats(1e-4, 1),
    w_log=st.sampled_from([1.0, 0.3]),
    ceiling=st.sampled_from([0.0, 0.1]),
)
def test_the_minimum_behind_a_valve_is_the_lowest_point_of_the_allowed_side(local, align, w_log, ceiling):
    free, held = MetaLoss(ceiling=ceiling), MetaLoss(ceiling=ceiling, lambda_max=5.0)
    losses = torch.tensor(local, dtype=torch.float64), torch.tensor(align, dtype=torch.float64)
    log_s = held.equilibrium(*losses, w_log=w_log)
    assert float(log_s[0] - log_s[1]) <= math.log(5.0) + 1e-9
    lowest = float(free(log_s, *losses, w_log=w_log))
    for angle in torch.linspace(0, 2 * math.pi, 17, dtype=torch.float64):
        near = log_s + 1e-2 * torch.stack([angle.cos(), angle.sin()])
        if near[0] - near[1] <= math.log(5.0):
            assert float(free(near, *losses, w_log=w_log)) >= lowest - 1e-12


def test_meta_annealing_raises_raw_lambda_as_the_schedule_falls():
    """The log expected the opposite; at equilibrium the schedule cancels in the product."""
    raws, effectives = [], []
    for progress in (0.0, 0.5, 0.9):
        chosen = controller(sigma_lr=0.5)
        play(chosen, 4.0, 0.5, progress, 400)
        row = chosen.trace()
        raws.append(row["lambda_raw"])
        effectives.append(row["lambda_effective"])
    assert raws == sorted(raws)
    assert raws[-1] > 9 * raws[0]
    assert effectives == pytest.approx([8.0] * 3, rel=0.02)


def test_autonomous_lowers_raw_lambda_to_zero_as_the_schedule_falls():
    chosen, raws = controller("autonomous"), []
    for step in range(201):
        play(chosen, 4.0, 0.5, step / 200, 1)
        raws.append(chosen.trace()["lambda_raw"])
    play(chosen, 4.0, 0.5, 1.0, 10)
    assert raws[20:] == sorted(raws[20:], reverse=True)
    assert raws[100] == pytest.approx(8.0 * 0.5, rel=0.02)
    assert chosen.trace()["lambda_effective"] < 1e-6


def test_coupling_raises_raw_lambda_too_and_the_short_form_of_its_loss_would_lower_it():
    raws = []
    for progress in (0.0, 0.5, 0.9):
        chosen = controller("uncertainty_coupled", sigma_lr=0.05)
        play(chosen, 4.0, 0.5, progress, 400)
        raws.append(chosen.trace()["lambda_raw"])
    assert raws == pytest.approx([8.0, 16.0, 80.0], rel=0.01)
    written = controller("uncertainty_coupled", as_written=True, sigma_lr=0.05)
    before = raw_of(written)
    play(written, 4.0, 0.5, 0.5, 1)
    middle = raw_of(written)
    assert math.log(before / middle) == pytest.approx(2 * 0.05 * before * 0.5 * 0.5, rel=1e-4)
    play(written, 4.0, 0.5, 0.99, 400)
    assert raw_of(written) < middle


def test_one_loss_for_weights_and_sigmas_scales_the_learning_rate():
    weight = torch.tensor(2.0, requires_grad=True)
    chosen = controller("uncertainty", lambda_start=(8.0, 8.0))
    chosen.loss(weight**2, torch.tensor(0.5), 0.0).backward()
    assert float(weight.grad) == pytest.approx(4.0 / (2 * 8.0))
    for name in ("uncertainty_rescaled", "uncertainty_coupled", "decoupled", "autonomous", "balanced"):
        other = torch.tensor(2.0, requires_grad=True)
        controller(name).loss(other**2, torch.tensor(0.5), 0.0).backward()
        assert float(other.grad) == pytest.approx(4.0)


@pytest.mark.parametrize("name", ["uncertainty_rescaled", "decoupled", "meta_annealed", "autonomous"])
def test_the_guards_are_options_of_every_decoupled_rule(name):
    held = (
        controller(name, lambda_max=5.0, schedule="constant")
        if name != "uncertainty_rescaled"
        else controller(name, lambda_max=5.0)
    )
    play(held, 4.0, 1e-3, 0.0, 600)
    assert raw_of(held) <= 5.0 * math.exp(0.05) + 1e-3
    low = controller(name, ceiling=1.0)
    play(low, 50.0, 0.5, 0.0, 300)
    assert float(low.log_s[0].detach().exp()) < 10
    with pytest.raises(ConfigError, match="too weak"):
        controller(name, lambda_max=50.0, valve=0.001)
    controller(name, lambda_max=50.0, valve=0.001, force=True)
    with pytest.raises(ConfigError, match=r"set controller\.lambda_max"):
        controller(name, valve=0.1)


@pytest.mark.parametrize("name", ["uncertainty_rescaled", "decoupled", "meta_annealed", "autonomous", "balanced"])
def test_sigmas_and_weights_do_not_see_each_other(name):
    weight = torch.tensor(1.3, requires_grad=True)
    chosen = controller(name)
    chosen.loss(weight**2, (weight - 3) ** 2, 0.25).backward()
    effective = chosen.trace()["lambda_effective"]
    assert float(weight.grad) == pytest.approx(2 * 1.3 + effective * 2 * (1.3 - 3), rel=1e-5)


def test_ceiling_holds_the_numerator_down():
    free, held = controller(sigma_lr=0.5), controller(ceiling=1.0, sigma_lr=0.2)
    for chosen in (free, held):
        play(chosen, 50.0, 0.5, 0.0, 400)
    assert float(held.log_s[0].detach().exp()) < 0.2 * float(free.log_s[0].detach().exp())
    u = float(held.log_s[0].detach())
    assert -50.0 / (2 * math.exp(u)) + 0.5 + 2 * u == pytest.approx(0, abs=1e-2)


@settings(max_examples=20)
@given(
    sequence=st.lists(
        st.tuples(st.sampled_from([1e-8, 0.01, 1.0, 30.0, 1e6]), st.sampled_from([0.0, 1e-9, 0.1, 5.0])),
        min_size=1,
        max_size=8,
    ),
    lambda_max=st.sampled_from([5.0, 50.0, 300.0]),
    sigma_lr=st.sampled_from([0.005, 0.05, 0.2]),
    strength=st.sampled_from([1.0, 2.0]),
)
def test_the_valve_holds_its_bound_under_adversarial_losses(sequence, lambda_max, sigma_lr, strength):
    """Whatever the losses do, raw <= lambda_max exp(sigma_lr), for any valve of at least 1/(2 lambda_max)."""
    chosen = controller(
        valve=strength / (2 * lambda_max), lambda_max=lambda_max, sigma_lr=sigma_lr, lambda_start=(1.0, 4.0)
    )
    for local, align in sequence:
        for _ in range(80):
            play(chosen, local, align, 0.5, 1)
            assert raw_of(chosen) <= lambda_max * math.exp(sigma_lr) * (1 + 1e-5)
    assert torch.isfinite(chosen.log_s).all()


def test_without_the_valve_the_same_losses_explode():
    chosen = controller()
    play(chosen, 3.0, 1e-6, 0.5, 2000)
    assert raw_of(chosen) > 1e4


def test_a_valve_that_is_too_weak_lets_lambda_through():
    weak = controller(valve=0.2 / 100, lambda_max=50.0, force=True)
    play(weak, 3.0, 1e-9, 0.5, 4000)
    assert raw_of(weak) > 100
    with pytest.raises(ConfigError, match="too weak"):
        controller(valve=0.2 / 100, lambda_max=50.0)


def test_the_trace_reports_the_largest_raw_lambda_since_the_last_row():
    chosen = controller()
    play(chosen, 3.0, 1e-6, 0.5, 50)
    before = raw_of(chosen)
    first = chosen.trace()
    assert first["lambda_raw_max"] >= first["lambda_raw"]
    play(chosen, 1e-3, 50.0, 0.0, 50)
    second = chosen.trace()
    assert second["lambda_raw_max"] == pytest.approx(before)
    assert second["lambda_raw"] < 0.1 * before
    assert set(chosen.trace()) >= {"lambda_raw", "lambda_effective", "sigma_local2", "sigma_align2"}


@pytest.mark.parametrize("name", list(CONTROLLERS))
def test_state_is_saved_and_resumed_bit_for_bit(name):
    one = controller(name)
    losses = [(torch.tensor(3.0 / (k + 1)), torch.tensor(1.0 / (k + 1)), k / 20) for k in range(20)]

    def step(chosen, local, align, progress):
        local = local.clone().requires_grad_()
        chosen.loss(local, align, progress).backward()
        chosen.step()

    for loss in losses[:10]:
        step(one, *loss)
    two = controller(name)
    two.load_state_dict(one.state_dict())
    one.trace(), two.trace()
    for loss in losses[10:]:
        step(one, *loss)
        step(two, *loss)
    assert one.trace() == two.trace()


def test_strange_state_is_refused():
    with pytest.raises(ValueError, match="keeps no state"):
        controller("fixed").load_state_dict({"log_s": torch.zeros(2)})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("meta_annealed", {"lambda_max": 0.0}, "lambda_max must be positive"),
        ("meta_annealed", {"sigma_lr": 0.0}, "must be positive"),
        ("autonomous", {"rate": -1.0}, "must be positive"),
        ("decoupled", {"lambda_start": (0.0, 20.0)}, "lambda_start"),
        ("balanced", {"memory": 1.0}, "memory must be in"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        controller(name, **options)
