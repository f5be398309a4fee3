"""Stochastic gradient descent with momentum and gradient clipping.

Written out because merely constructing `torch.optim.SGD` imports the compiler, which takes two seconds of every start
and of every worker; and because resetting or saving the momentum is then one line.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SGD:
    """g <- clip(g) + weight_decay w;  v <- momentum v + g;  w <- w - lr v"""

    def __init__(self, parameters: Sequence[Tensor], *, momentum: float, weight_decay: float, clip: float) -> None:
        self.parameters = list(parameters)
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.clip = clip
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the gradients, which are then dropped."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        norm = torch.stack(torch._foreach_norm(gradients)).norm()
        torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        if self.weight_decay:
            torch._foreach_add_(gradients, self.parameters, alpha=self.weight_decay)
        torch._foreach_mul_(self.velocity, self.momentum)
        torch._foreach_add_(self.velocity, gradients)
        torch._foreach_add_(self.parameters, self.velocity, alpha=-lr)
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> list[Tensor]:
        return self.velocity

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        for velocity, saved in zip(self.velocity, state, strict=True):
            velocity.copy_(saved)
