"""Lambda learned from task uncertainty, decoupled from the weights.

Two learnable log-variances give raw = s_l/s_a. They minimise a meta-loss in which both losses are detached, while in
the weights' loss lambda is detached: one backward pass, two objectives, no gradient across.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.objective.controllers.base import CONTROLLERS, ClientFacts, Controller, entropy_lambda
from oneflare.schedules import ScheduleSpec, build_schedule

LARGEST_STEP = 0.5


class SigmaController(Controller):
    """Keeps log s = (log s_l, log s_a) and descends on it with its own step size.

    Starts at s_a = 1, which is L_align of untrained prototypes, and s_l = the entropy rule's lambda. One step moves a
    log-variance by at most LARGEST_STEP: after an explosion the way back would overflow otherwise.
    """

    def __init__(self, facts: ClientFacts, sigma_lr: float, lambda_start: tuple[float, float]) -> None:
        super().__init__(facts)
        if sigma_lr <= 0:
            raise ConfigError(f"controller.sigma_lr: must be positive (got {sigma_lr})")
        self.sigma_lr = sigma_lr
        start = math.log(entropy_lambda(facts, *lambda_start))
        self.log_s = torch.tensor([start, 0.0], requires_grad=True)

    def step(self) -> None:
        gradient = self.log_s.grad
        if gradient is not None:
            with torch.no_grad():
                self.log_s -= (self.sigma_lr * gradient).clamp(-LARGEST_STEP, LARGEST_STEP)
            self.log_s.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"log_s": self.log_s.detach().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.log_s.copy_(state["log_s"])

    def trace_state(self) -> dict[str, float]:
        local, align = self.log_s.detach().exp().tolist()
        return {"sigma_local2": local, "sigma_align2": align}


@CONTROLLERS.register("meta_annealed")
class MetaAnnealed(SigmaController):
    """lambda_eff = raw s(p); the sigmas see s(p) on the alignment data term

    meta = L_l/(2 s_l) + s(p) L_a/(2 s_a) + (log s_l + log s_a)/2
           + floor/s_a + ceiling (log s_l)^2 + valve relu(raw - lambda_max)

    Equilibrium without ceiling and valve: s_l = L_l, s_a = s(p) L_a + 2 floor.
    The valve holds raw <= lambda_max exp(sigma_lr) if valve >= 1/(2 lambda_max): the drive on each log-variance is at
    most 1/2 (s_l's is limited to that by counting L_l as at most 2 s_l), and the valve answers with `valve * raw` each.
    """

    def __init__(
        self,
        facts: ClientFacts,
        *,
        schedule: ScheduleSpec = {"name": "linear"},  # noqa: B006
        sigma_lr: float = 0.02,
        lambda_start: tuple[float, float] = (1.0, 20.0),
        floor: float = 0.0,
        ceiling: float = 0.0,
        valve: float | None = None,
        lambda_max: float = 50.0,
        force: bool = False,
    ) -> None:
        super().__init__(facts, sigma_lr, lambda_start)
        if min(floor, ceiling, valve or 0.0) < 0 or lambda_max <= 0:
            raise ConfigError("controller: floor, ceiling and valve must not be negative, lambda_max must be positive")
        self.schedule = build_schedule(schedule)
        self.floor = floor
        self.ceiling = ceiling
        self.valve = 1 / lambda_max if valve is None else valve
        self.lambda_max = lambda_max
        if 0 < self.valve < 1 / (2 * lambda_max) and not force:
            raise ConfigError(
                f"controller.valve: {self.valve:g} is too weak to hold lambda_max={lambda_max:g}; "
                f"use at least {1 / (2 * lambda_max):g} (or controller.force=true)"
            )

    def meta_loss(self, local: Tensor, align: Tensor, schedule: float) -> Tensor:
        """local, align: detached scalars."""
        s_local, s_align = self.log_s.exp().unbind()
        if self.valve:
            local = torch.minimum(local, 2 * s_local.detach())
        meta = local / (2 * s_local) + schedule * align / (2 * s_align) + self.log_s.sum() / 2
        if self.floor:
            meta = meta + self.floor / s_align
        if self.ceiling:
            meta = meta + self.ceiling * self.log_s[0] ** 2
        if self.valve:
            meta = meta + self.valve * torch.relu(s_local / s_align - self.lambda_max)
        return meta

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        schedule = self.schedule(progress)
        raw = (self.log_s[0] - self.log_s[1]).detach().exp()
        self.record(raw, raw * schedule)
        return local + raw * schedule * align + self.meta_loss(local.detach(), align.detach(), schedule)
