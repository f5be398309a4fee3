"""The pull of the anchors on the prototypes, and what to do where it conflicts with the local gradient.

L_align touches nothing but the prototypes, and its gradient there is 2 (P - target)/(C d). So it enters the
controller's loss as a leaf: one backward pass leaves the local gradient on P and d loss / d L_align on the leaf, and
both halves are at hand without a second pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oneflare.objective.terms import align


class Pull:
    """L_align of one step; `apply` adds its gradient to the prototypes' after the backward pass."""

    def __init__(self, prototypes: Tensor, target: Tensor) -> None:
        """prototypes, target: `(C, d)`"""
        self.prototypes = prototypes
        self.target = target
        self.loss = align(prototypes.detach(), target).requires_grad_()

    @torch.no_grad()
    def apply(self, project: bool) -> Tensor:
        """Add g_align; returns whether <g_local, g_align> < 0, as 0 or 1.

        project (PCGrad): where they conflict, g_local first loses its part along g_align,
        g_local <- g_local - <g_local, g_align>/|g_align|^2 g_align. Outside the prototypes g_align is zero, so neither
        the inner product nor the projection sees the encoder.
        """
        gradient, weight = self.prototypes.grad, self.loss.grad
        if weight is None:
            return self.loss.new_zeros(())
        direction = (self.prototypes - self.target) * (2 / self.target.numel())
        if gradient is None:
            self.prototypes.grad = weight * direction
            return self.loss.new_zeros(())
        inner = torch.dot(gradient.flatten(), direction.flatten())
        conflict = (inner < 0) & (weight > 0)
        if project:
            square = torch.dot(direction.flatten(), direction.flatten())
            weight = weight - torch.where(conflict, inner / square, 0.0)
        gradient.addcmul_(direction, weight)
        return conflict.float()
