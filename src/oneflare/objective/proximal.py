"""The proximal term of FedProx, which keeps the weights near the shared start."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Proximal:
    """L_prox = mu/2 |w - w_0|^2 over all weights that are trained (Li et al. 2020)

    Its gradient mu (w - w_0) is added after the backward pass, before clipping; no controller sees the term.
    """

    def __init__(self, parameters: Sequence[Tensor], mu: float) -> None:
        """parameters: where they are now is w_0"""
        self.parameters = list(parameters)
        self.start = [parameter.detach().clone() for parameter in self.parameters]
        self.mu = mu

    @torch.no_grad()
    def apply(self) -> Tensor:
        """Add the gradient; returns L_prox."""
        total = torch.zeros((), device=self.start[0].device)
        for parameter, start in zip(self.parameters, self.start, strict=True):
            away = parameter - start
            total += away.square().sum()
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.add_(away, alpha=self.mu)
        return self.mu / 2 * total
