"""A controller that sets lambda to the equilibrium of the meta-loss directly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oneflare.core.schedules import ScheduleSpec, build_schedule
from oneflare.errors import ConfigError
from oneflare.objective.controllers.base import CONTROLLERS, ClientFacts, Controller


@CONTROLLERS.register("balanced")
class Balanced(Controller):
    """the equilibrium of `autonomous` in closed form, from running means of the losses; no sigma optimiser

    lambda = min( s(p) EMA(L_l) / (EMA(L_a) + 2 floor), lambda_max )

    An EMA keeps `memory` of its old value per step and starts at the first loss.
    """

    def __init__(
        self,
        facts: ClientFacts,
        *,
        schedule: ScheduleSpec = {"name": "linear"},  # noqa: B006
        memory: float = 0.9,
        floor: float = 1e-3,
        lambda_max: float = 50.0,
    ) -> None:
        super().__init__(facts)
        if not 0 <= memory < 1 or floor < 0 or lambda_max <= 0:
            raise ConfigError(
                "controller: memory must be in [0, 1), floor must not be negative, lambda_max must be positive"
            )
        self.schedule = build_schedule(schedule)
        self.memory = memory
        self.floor = floor
        self.lambda_max = lambda_max
        self.means: Tensor | None = None
        """EMA of (L_l, L_a), `(2,)`"""

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        with torch.no_grad():
            losses = torch.stack([local.detach(), align.detach()])
            self.means = losses if self.means is None else self.means.lerp(losses.to(self.means), 1 - self.memory)
            ratio = self.means[0] / (self.means[1] + 2 * self.floor)
            raw = (self.schedule(progress) * ratio).clamp(max=self.lambda_max)
        self.record(raw, raw)
        return local + raw * align

    def state_dict(self) -> dict[str, Any]:
        return {"means": None if self.means is None else self.means.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.means = None if state["means"] is None else state["means"].clone()

    def trace_state(self) -> dict[str, float]:
        """The variances that the means stand for; s(p) is in lambda alone."""
        local, align = (0.0, 0.0) if self.means is None else self.means.tolist()
        return {"sigma_local2": local, "sigma_align2": align + 2 * self.floor}
