"""Controllers that learn lambda from task uncertainty, decoupled from the weights.

Two learnable log-variances give raw = s_l/s_a. They minimise a meta-loss in which both losses are detached, while in
the weights' loss lambda is detached: one backward pass, two objectives, no gradient across. The rules differ only in
where the schedule goes: on the weights' lambda, on the meta-loss's data term, or on its log term.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oneflare.core.schedules import ScheduleSpec, build_schedule
from oneflare.objective.controllers.base import CONTROLLERS, ClientFacts
from oneflare.objective.controllers.sigma import SigmaController
from oneflare.objective.controllers.valve import NO_GUARDS, MetaLoss


class DecoupledController(SigmaController):
    """Weights minimise L_l + [raw] a L_a, sigmas the meta-loss of the detached losses."""

    def __init__(self, facts: ClientFacts, step: float, lambda_start: tuple[float, float], guards: MetaLoss) -> None:
        super().__init__(facts, step, lambda_start)
        self.meta = guards

    def meta_loss(self, local: Tensor, align: Tensor, data: float = 1.0) -> Tensor:
        """local, align: detached scalars."""
        return self.meta(self.log_s, local, align, data)

    def decoupled(self, local: Tensor, align: Tensor, anneal: float, data: float) -> Tensor:
        raw = self.raw
        effective = raw * anneal
        self.record(raw, effective)
        return local + effective * align + self.meta_loss(local.detach(), align.detach(), data)


@CONTROLLERS.register("uncertainty_rescaled")
class UncertaintyRescaled(DecoupledController):
    """lambda = raw, not annealed; the local loss keeps weight 1, so the learning rate is not touched

    weights: L_l + [raw] L_a
    sigmas:  meta = L_l/(2 s_l) + L_a/(2 s_a) + (log s_l + log s_a)/2
                    + floor/s_a + ceiling (log s_l)^2 + valve relu(raw - lambda_max)

    Equilibrium without ceiling and valve: s_l = L_l, s_a = L_a + 2 floor.
    """

    def __init__(
        self,
        facts: ClientFacts,
        *,
        sigma_lr: float = 0.02,
        lambda_start: tuple[float, float] = (1.0, 20.0),
        guards: MetaLoss = NO_GUARDS,
    ) -> None:
        super().__init__(facts, sigma_lr, lambda_start, guards)

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        del progress
        return self.decoupled(local, align, anneal=1.0, data=1.0)


class AnnealedController(DecoupledController):
    """A decoupled rule with a schedule."""

    def __init__(
        self,
        facts: ClientFacts,
        *,
        schedule: ScheduleSpec = {"name": "linear"},  # noqa: B006
        sigma_lr: float = 0.02,
        lambda_start: tuple[float, float] = (1.0, 20.0),
        guards: MetaLoss = NO_GUARDS,
    ) -> None:
        super().__init__(facts, sigma_lr, lambda_start, guards)
        self.schedule = build_schedule(schedule)


@CONTROLLERS.register("decoupled")
class Decoupled(AnnealedController):
    """lambda_eff = raw a(p); the sigmas see the losses as they are

    weights: L_l + [raw] a(p) L_a
    sigmas:  meta = L_l/(2 s_l) + L_a/(2 s_a) + (log s_l + log s_a)/2
                    + floor/s_a + ceiling (log s_l)^2 + valve relu(raw - lambda_max)

    Equilibrium without ceiling and valve: s_l = L_l, s_a = L_a + 2 floor.
    """

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        return self.decoupled(local, align, anneal=self.schedule(progress), data=1.0)


@CONTROLLERS.register("meta_annealed")
class MetaAnnealed(AnnealedController):
    """lambda_eff = raw s(p); the sigmas see s(p) on the alignment data term

    weights: L_l + [raw] s(p) L_a
    sigmas:  meta = L_l/(2 s_l) + s(p) L_a/(2 s_a) + (log s_l + log s_a)/2
                    + floor/s_a + ceiling (log s_l)^2 + valve relu(raw - lambda_max)

    Equilibrium without ceiling and valve: s_l = L_l, s_a = s(p) L_a + 2 floor: raw rises as s(p) falls, and in
    raw s(p) the schedule cancels.
    The valve holds raw <= lambda_max exp(sigma_lr) if valve >= 1/(2 lambda_max): the drive on each log-variance is at
    most 1/2 (s_l's is limited to that by counting L_l as at most 2 s_l), and the valve answers with `valve * raw` each.
    """

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        schedule = self.schedule(progress)
        return self.decoupled(local, align, anneal=schedule, data=schedule)


@CONTROLLERS.register("autonomous")
class Autonomous(DecoupledController):
    """lambda = raw; s(p) is on the log term of s_a, so that raw anneals to 0 of its own accord

    weights: L_l + [raw] L_a
    sigmas:  meta = L_l/(2 s_l) + L_a/(2 s_a) + (log s_l + s(p) log s_a)/2
                    + floor/s_a + ceiling (log s_l)^2 + valve relu(raw - lambda_max)
             log s <- log s + rate (log s* - log s),  s* = argmin meta in closed form

    Equilibrium without ceiling and valve: s_l = L_l, s_a = (L_a + 2 floor)/s(p), so raw = s(p) L_l/(L_a + 2 floor).
    Gradient steps lag behind a falling schedule; a step in log space toward the minimum does not.
    """

    def __init__(
        self,
        facts: ClientFacts,
        *,
        schedule: ScheduleSpec = {"name": "linear"},  # noqa: B006
        rate: float = 0.5,
        lambda_start: tuple[float, float] = (1.0, 20.0),
        guards: MetaLoss = NO_GUARDS,
    ) -> None:
        super().__init__(facts, rate, lambda_start, guards)
        self.schedule = build_schedule(schedule)
        self.rate = min(rate, 1.0)
        self._target: Tensor | None = None

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        raw = self.raw
        self.record(raw, raw)
        self._target = self.meta.equilibrium(local.detach(), align.detach(), w_log=self.schedule(progress))
        return local + raw * align

    def step(self) -> None:
        if self._target is not None:
            with torch.no_grad():
                self.log_s.lerp_(self._target, self.rate)
            self._target = None
