"""Controllers that learn lambda in the weights' own loss, the two designs that decoupling replaced."""

from __future__ import annotations

from torch import Tensor

from oneflare.core.schedules import ScheduleSpec, build_schedule
from oneflare.objective.controllers.base import CONTROLLERS, ClientFacts
from oneflare.objective.controllers.sigma import SigmaController
from oneflare.objective.controllers.valve import MetaLoss


@CONTROLLERS.register("uncertainty")
class Uncertainty(SigmaController):
    """weights and sigmas minimise one loss; it scales the learning rate by 1/(2 s_l)

    L = L_l/(2 s_l) + L_a/(2 s_a) + (log s_l + log s_a)/2;  lambda = s_l/s_a

    Equilibrium: s_l = L_l, s_a = L_a. Kept to show the failure: a large local loss slows its own descent.
    """

    def __init__(
        self,
        facts: ClientFacts,
        *,
        sigma_lr: float = 0.02,
        lambda_start: tuple[float, float] = (1.0, 20.0),
    ) -> None:
        super().__init__(facts, sigma_lr, lambda_start)
        self.meta_loss = MetaLoss()

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        del progress
        raw = self.raw
        self.record(raw, raw)
        return self.meta_loss(self.log_s, local, align)


@CONTROLLERS.register("uncertainty_coupled")
class UncertaintyCoupled(SigmaController):
    """weights and sigmas minimise one annealed loss, so that the annealing reaches the sigmas

    L = 2 [s_l] (L_l/(2 s_l) + a(p) L_a/(2 s_a) + (log s_l + log s_a)/2)
      = L_l + raw a(p) L_a + [s_l] (log s_l + log s_a)   for the weights;  [.] is detached;  raw = s_l/s_a

    Equilibrium: s_l = L_l, s_a = a(p) L_a, so raw rises as a(p) falls and raw a(p) stays where it was.
    The factor 2 [s_l] is in the sigmas' gradient too, which is why the default `sigma_lr` is smaller than other rules'.
    `as_written` takes the short form of the same loss at its word, L = L_l + raw a(p) L_a + (log s_l + log s_a)/2 with
    every gradient let through: then d log raw / dt = -2 raw a(p) L_a, and raw can only fall.
    """

    def __init__(
        self,
        facts: ClientFacts,
        *,
        schedule: ScheduleSpec = {"name": "linear"},  # noqa: B006
        sigma_lr: float = 0.005,
        lambda_start: tuple[float, float] = (1.0, 20.0),
        as_written: bool = False,
    ) -> None:
        super().__init__(facts, sigma_lr, lambda_start)
        self.schedule = build_schedule(schedule)
        self.as_written = as_written
        self.meta_loss = MetaLoss()

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        schedule, raw = self.schedule(progress), self.raw
        self.record(raw, raw * schedule)
        if self.as_written:
            return local + (self.log_s[0] - self.log_s[1]).exp() * schedule * align + self.log_s.sum() / 2
        return 2 * self.log_s.detach()[0].exp() * self.meta_loss(self.log_s, local, align, w_data=schedule)
