"""The state of controllers that learn: two log-variances with their own step size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.objective.controllers.base import ClientFacts, Controller, entropy_lambda

LARGEST_STEP = 0.5


class SigmaController(Controller):
    """Keeps log s = (log s_l, log s_a) and descends on it with its own step size.

    Starts at s_a = 1, which is L_align of untrained prototypes, and s_l = the entropy rule's lambda. One step moves a
    log-variance by at most LARGEST_STEP: after an explosion the way back would overflow otherwise.
    """

    def __init__(self, facts: ClientFacts, sigma_lr: float, lambda_start: tuple[float, float]) -> None:
        super().__init__(facts)
        if sigma_lr <= 0:
            raise ConfigError(f"controller: sigma_lr and rate must be positive (got {sigma_lr})")
        if min(lambda_start) <= 0:
            raise ConfigError(f"controller.lambda_start: must be positive (got {list(lambda_start)})")
        self.sigma_lr = sigma_lr
        start = math.log(entropy_lambda(facts, *lambda_start))
        self.log_s = torch.tensor([start, 0.0], requires_grad=True)

    def to(self, device: torch.device) -> None:
        self.log_s = self.log_s.detach().to(device).requires_grad_()

    @property
    def raw(self) -> Tensor:
        """s_l/s_a, detached"""
        log_s = self.log_s.detach()
        return (log_s[0] - log_s[1]).exp()

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
