"""The valve and the other guards of a learned lambda, in the meta-loss that every such lambda shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.core.registry import Options
from oneflare.errors import ConfigError

SMALLEST = 1e-12
NEWTON_STEPS = 12


@dataclass(frozen=True)
class MetaLoss(Options):
    """The loss of the two learned variances, s_l of the local loss L_l and s_a of the alignment loss L_a.

    Their logarithms, log s = (log s_l, log s_a), minimise it; raw = s_l/s_a is lambda before its schedule.

    meta = L_l/(2 s_l) + w_data L_a/(2 s_a) + (log s_l + w_log log s_a)/2
           + floor/s_a + ceiling (log s_l)^2 + valve relu(raw - lambda_max)

    A rule puts its schedule on `w_data` or on `w_log`. The guards are independent. `floor` keeps s_a from falling to 0
    as the alignment loss does, `ceiling` keeps s_l near 1, and the valve, which is there when `lambda_max` is, pushes
    raw back where it passes that bound. Without ceiling and valve the minimum is s_l = L_l,
    s_a = (w_data L_a + 2 floor)/w_log.
    """

    floor: float = 0.0
    ceiling: float = 0.0
    lambda_max: float | None = None
    valve: float | None = None
    """strength; default 1/lambda_max, twice what holding the bound needs"""
    force: bool = False
    """take a valve that is too weak to hold its bound"""

    def __post_init__(self) -> None:
        if min(self.floor, self.ceiling, self.valve or 0.0) < 0 or (
            self.lambda_max is not None and self.lambda_max <= 0
        ):
            raise ConfigError("controller: floor, ceiling and valve must not be negative, lambda_max must be positive")
        if self.lambda_max is None:
            if self.valve:
                raise ConfigError("controller.valve: set controller.lambda_max, the bound that the valve holds")
        elif 0 < self.strength < 1 / (2 * self.lambda_max) and not self.force:
            raise ConfigError(
                f"controller.valve: {self.strength:g} is too weak to hold lambda_max={self.lambda_max:g}; "
                f"use at least {1 / (2 * self.lambda_max):g} (or controller.force=true)"
            )

    @property
    def strength(self) -> float:
        """of the valve; 0 when there is none"""
        if self.lambda_max is None:
            return 0.0
        return 1 / self.lambda_max if self.valve is None else self.valve

    def __call__(self, log_s: Tensor, local: Tensor, align: Tensor, w_data: float = 1.0, w_log: float = 1.0) -> Tensor:
        """log_s: `(2,)`, local and align: scalars. With a valve L_l counts as at most 2 s_l, which
        bounds the drive on log s_l by 1/2, so that the valve wins."""
        s_local, s_align = log_s.exp().unbind()
        if self.strength:
            local = torch.minimum(local, 2 * s_local.detach())
        logs = log_s.sum() if w_log == 1.0 else log_s[0] + w_log * log_s[1]
        meta = (local / s_local + (w_data * align + 2 * self.floor) / s_align + logs) / 2
        if self.ceiling:
            meta = meta + self.ceiling * log_s[0] ** 2
        if self.strength and self.lambda_max is not None:
            meta = meta + self.strength * torch.relu(s_local / s_align - self.lambda_max)
        return meta

    @torch.no_grad()
    def equilibrium(self, local: Tensor, align: Tensor, w_data: float = 1.0, w_log: float = 1.0) -> Tensor:
        """argmin over log s, `(2,)`.

        A valve that is strong enough makes raw = lambda_max a wall: where the free minimum lies beyond it, the
        minimum on it has s_l = (L_l + lambda_max (w_data L_a + 2 floor))/(1 + w_log), s_a = s_l/lambda_max.
        """
        pull = w_data * align + 2 * self.floor
        u_local = self._minimum(local, 1.0)
        u_align = _log(pull) - math.log(max(w_log, SMALLEST))
        if self.strength and self.lambda_max is not None:
            wall = math.log(self.lambda_max)
            held = self._minimum(local + self.lambda_max * pull, 1 + w_log)
            beyond = u_local - u_align > wall
            u_align = torch.where(beyond, held - wall, u_align)
            u_local = torch.where(beyond, held, u_local)
        return torch.stack([u_local, u_align])

    def _minimum(self, data: Tensor, log: float) -> Tensor:
        """argmin_u data e^-u / 2 + log u / 2 + ceiling u^2; Newton from the left of the root approaches it steadily."""
        u = _log(data / log)
        if self.ceiling:
            u = u.clamp(max=0.0)
            for _ in range(NEWTON_STEPS):
                push = data * torch.exp(-u)
                u = u + (push - log - 4 * self.ceiling * u) / (push + 4 * self.ceiling)
        return u


NO_GUARDS = MetaLoss()


def _log(value: Tensor) -> Tensor:
    return value.clamp(min=SMALLEST).log()
