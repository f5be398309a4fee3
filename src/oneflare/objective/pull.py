"""The pull of the anchors on the prototypes: its loss L_align, and what happens where it conflicts with L_local.

L_align touches nothing but the prototypes, and its gradient there is 2 (P - target)/(C d). So it enters the
controller's loss as a leaf: one backward pass leaves the local gradient on P and d loss / d L_align on the leaf, and
both halves are at hand without a second pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

REFERENCE = 10 * 512
"""C d of ten classes and 512 features, the setting in which the strengths of the pull (lambda) were found"""


def align(prototypes: Tensor, anchors: Tensor, rows: Tensor | None = None) -> Tensor:
    """L_align = MSE(P, A), the mean over C d; for a batch of clients, of each

    rows: `(..., C)` whether a class counts, where the mean is over some rows only; 0 where none does
    """
    squares = (prototypes - anchors).square()
    if rows is None:
        return squares.mean((-2, -1))
    return torch.where(rows, squares.mean(-1), 0.0).sum(-1) / rows.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class PullOptions:
    """Which prototypes are pulled, and how the strength lambda of the pull is counted."""

    seen: bool = False
    """pull only the classes of the current batch"""
    per_prototype: bool = False
    """count lambda as if there were ten classes and 512 features"""

    def classes(self, labels: Tensor, classes: int) -> Tensor | None:
        """Which classes are pulled: `(C,)` for labels `(n,)`, `(K, C)` for a batch of clients; None for all."""
        if not self.seen:
            return None
        pulled = torch.zeros(*labels.shape[:-1], classes, dtype=torch.bool, device=labels.device)
        return pulled.scatter_(-1, labels, True)

    def factor(self, classes: int, dim: int) -> float:
        """By what the gradient of the mean is multiplied: C d / 5120, or 1.

        The gradient of lambda L_align on one prototype is 2 lambda (P_c - A_c)/(C d), so that lambda is weaker the
        more classes and features there are; with the factor it is 2 lambda (P_c - A_c)/5120 for every C and d.
        """
        return classes * dim / REFERENCE if self.per_prototype else 1.0


PLAIN = PullOptions()


class Pull:
    """L_align of one step; `apply` adds its gradient to the prototypes' after the backward pass.

    Works for one client, prototypes `(C, d)`, and for a batch of clients, `(K, C, d)`, each on its own.
    """

    def __init__(
        self, prototypes: Tensor, target: Tensor, labels: Tensor | None = None, options: PullOptions = PLAIN
    ) -> None:
        """target: `(C, d)`; labels: of the current batch, `(n,)` or `(K, n)`, needed where only seen classes count"""
        classes, dim = target.shape
        self.prototypes = prototypes
        self.target = target
        self.rows = None if labels is None else options.classes(labels, classes)
        self.factor = options.factor(classes, dim)
        self.loss = align(prototypes.detach(), target, self.rows).requires_grad_()
        """L_align, a scalar or `(K,)`"""

    def direction(self) -> Tensor:
        """g_align of lambda = 1: the gradient of L_align, times the factor of `PullOptions`."""
        away = self.prototypes - self.target
        if self.rows is None:
            return away * (2 * self.factor / self.target.numel())
        pulled = self.rows[..., None]
        number = self.rows.sum(-1)[..., None, None].clamp(min=1) * self.target.shape[1]
        return torch.where(pulled, away * (2 * self.factor) / number, 0.0)

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
        direction = self.direction()
        inner = (gradient * direction).sum((-2, -1))
        conflict = (inner < 0) & (weight > 0)
        if project:
            square = direction.square().sum((-2, -1))
            weight = weight - torch.where(conflict, inner / square, 0.0)
        gradient.addcmul_(direction, weight[..., None, None])
        return conflict.float()
