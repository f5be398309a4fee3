"""The pull of the anchors on the prototypes, and what happens where it conflicts with the local gradient.

L_align touches nothing but the prototypes, and its gradient there is 2 (P - target)/(C d). So it enters the
controller's loss as a leaf: one backward pass leaves the local gradient on P and d loss / d L_align on the leaf, and
both halves are at hand without a second pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oneflare.objective.terms import align


class Pull:
    """L_align of one step; `apply` adds its gradient to the prototypes' after the backward pass.

    Works for one client, prototypes `(C, d)`, and for a batch of clients, `(K, C, d)`, each on its own.
    """

    def __init__(self, prototypes: Tensor, target: Tensor) -> None:
        """target: `(C, d)`"""
        self.prototypes = prototypes
        self.target = target
        self.loss = align(prototypes.detach(), target).requires_grad_()
        """L_align, a scalar or `(K,)`"""

    @torch.no_grad()
    def apply(self, project: bool) -> Tensor:
        """Add g_align; returns whether <g_local, g_align> < 0, as 0 or 1 for each client.

        project (PCGrad): where they conflict, g_local first loses its part along g_align,
        g_local <- g_local - <g_local, g_align>/|g_align|^2 g_align. Outside the prototypes g_align is zero, so neither
        the inner product nor the projection sees the encoder.
        """
        weight = self.loss.grad
        if weight is None:
            return torch.zeros_like(self.loss)
        if self.prototypes.grad is None:
            self.prototypes.grad = torch.zeros_like(self.prototypes)
        gradient = self.prototypes.grad
        direction = (self.prototypes - self.target) * (2 / self.target.numel())
        inner = (gradient * direction).sum((-2, -1))
        conflict = (inner < 0) & (weight > 0)
        if project:
            square = direction.square().sum((-2, -1))
            weight = weight - torch.where(conflict, inner / square, 0.0)
        gradient.addcmul_(direction, weight[..., None, None])
        return conflict.float()
