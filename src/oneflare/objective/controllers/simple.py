"""Controllers that learn nothing: lambda is zero, constant, a schedule, or computed from the client's classes."""

from __future__ import annotations

from torch import Tensor

from oneflare.core.schedules import ScheduleSpec, build_schedule
from oneflare.objective.controllers.base import CONTROLLERS, ClientFacts, Controller, entropy_lambda


@CONTROLLERS.register("none")
class NoAlignment(Controller):
    """lambda = 0"""

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        del align, progress
        return local


@CONTROLLERS.register("fixed")
class Fixed(Controller):
    """lambda = lambda_0"""

    def __init__(self, facts: ClientFacts, *, lambda_0: float = 5.0) -> None:
        super().__init__(facts)
        self.lambda_0 = lambda_0

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        del progress
        self.record(self.lambda_0, self.lambda_0)
        return local + self.lambda_0 * align


@CONTROLLERS.register("annealed")
class Annealed(Controller):
    """lambda = lambda_0 a(p)"""

    def __init__(
        self,
        facts: ClientFacts,
        *,
        lambda_0: float = 20.0,
        schedule: ScheduleSpec = {"name": "linear"},  # noqa: B006
    ) -> None:
        super().__init__(facts)
        self.lambda_0 = lambda_0
        self.schedule = build_schedule(schedule)

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        effective = self.lambda_0 * self.schedule(progress)
        self.record(self.lambda_0, effective)
        return local + effective * align


@CONTROLLERS.register("entropy")
class Entropy(Controller):
    """lambda = lambda_i a(p), lambda_i from how balanced the client's classes are

    lambda_i = lambda_min + H(p_i)/log C (lambda_max - lambda_min)
    """

    def __init__(
        self,
        facts: ClientFacts,
        *,
        lambda_min: float = 1.0,
        lambda_max: float = 20.0,
        schedule: ScheduleSpec = {"name": "linear"},  # noqa: B006
    ) -> None:
        super().__init__(facts)
        self.lambda_i = entropy_lambda(facts, lambda_min, lambda_max)
        self.schedule = build_schedule(schedule)

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        effective = self.lambda_i * self.schedule(progress)
        self.record(self.lambda_i, effective)
        return local + effective * align
