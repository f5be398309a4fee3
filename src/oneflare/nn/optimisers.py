"""Additions to SGD: momentum at a restart, noise as the rate falls, and the largest stable rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class SGD:
    """Stochastic gradient descent with momentum and clipping

    g <- clip(g) + weight_decay w;  v <- momentum v + g;  w <- w - lr v

    Written out because merely constructing torch's imports the compiler, which takes two seconds of every start.
    """

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

    def reset_momentum(self) -> None:
        """Velocity to zero: after a restart only the new gradients count."""
        torch._foreach_zero_(self.velocity)

    def state_dict(self) -> list[Tensor]:
        return self.velocity

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        for velocity, saved in zip(self.velocity, state, strict=True):
            velocity.copy_(saved)


class Adam:
    """Adam (Kingma & Ba 2015), with torch's defaults

    m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  w <- w - lr m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps)

    Written out for the same reason as SGD.
    """

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.mean = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.square = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = 0

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the gradients, which are then dropped."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        first, second = self.BETAS
        self.steps += 1
        torch._foreach_lerp_(self.mean, gradients, 1 - first)
        torch._foreach_mul_(self.square, second)
        torch._foreach_addcmul_(self.square, gradients, gradients, 1 - second)
        scale = torch._foreach_sqrt(self.square)
        torch._foreach_div_(scale, math.sqrt(1 - second**self.steps))
        torch._foreach_add_(scale, self.EPSILON)
        torch._foreach_addcdiv_(self.parameters, self.mean, scale, -lr / (1 - first**self.steps))
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean": self.mean, "square": self.square}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        for own, saved in ((self.mean, state["mean"]), (self.square, state["square"])):
            for tensor, value in zip(own, saved, strict=True):
                tensor.copy_(value)


def scaled_rate(rate: float, batch_size: int, reference: int | None) -> float:
    """Linear scaling: a rate chosen at batch size `reference`, for batches of `batch_size`."""
    return rate if reference is None else rate * batch_size / reference


class Thermostat:
    """Keeps the expected squared update at a target as the learning rate falls, by adding noise.

    After each step of SGD, with update d = -eta v, every weight gets N(0, max(0, K - E|d|^2)/n) for n weights.
    K is `level` times the mean |d|^2 of the warm-up steps; E|d|^2 is a running mean.
    """

    MEMORY = 0.9

    def __init__(self, level: float, warmup_steps: int) -> None:
        self.level = level
        self.warmup_steps = max(1, warmup_steps)
        self.seen = 0
        self.mean: Tensor | None = None
        """mean |d|^2: of all warm-up steps until they end, running from then on"""
        self.target: Tensor | None = None

    @torch.no_grad()
    def step(self, optimizer: SGD, lr: float, generator: torch.Generator) -> None:
        """Call after `optimizer.step`."""
        square = lr**2 * torch.stack(torch._foreach_norm(optimizer.velocity)).square().sum()
        self.seen += 1
        if self.mean is None:
            self.mean = square
        else:
            self.mean = self.mean.lerp(square, 1 / self.seen if self.target is None else 1 - self.MEMORY)
        if self.target is None:
            if self.seen >= self.warmup_steps:
                self.target = self.level * self.mean
            return
        deviation = ((self.target - self.mean).clamp(min=0) / sum(p.numel() for p in optimizer.parameters)).sqrt()
        for p in optimizer.parameters:
            p += deviation * torch.randn(p.shape, generator=generator).to(p.device)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean, "target": self.target}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen, self.mean, self.target = int(state["seen"]), state["mean"], state["target"]


def largest_curvature(
    loss: Callable[[], Tensor],
    parameters: Sequence[Tensor],
    generator: torch.Generator,
    *,
    steps: int = 30,
    tolerance: float = 1e-3,
) -> float:
    """L: the largest eigenvalue of the Hessian of `loss`, by power iteration on Hessian-vector products.

    Power iteration finds the eigenvalue of largest size; where that is negative, a second round on H - lambda I finds
    the largest one. Gradient descent is stable up to a rate of 2/L.
    """
    gradients = torch.autograd.grad(loss(), parameters, create_graph=True, allow_unused=True)
    used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None and g.requires_grad]
    if not used:
        return 0.0
    weights, slopes = [p for p, _ in used], [g for _, g in used]

    def hessian_times(vector: list[Tensor]) -> list[Tensor]:
        products = torch.autograd.grad(slopes, weights, vector, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(v) if h is None else h for h, v in zip(products, vector, strict=True)]

    def dominant(shift: float) -> float:
        vector = [torch.randn(p.shape, generator=generator).to(p) for p in weights]
        vector = _unit(vector)
        value = 0.0
        for _ in range(steps):
            image = [h - shift * v for h, v in zip(hessian_times(vector), vector, strict=True)]
            before, value = value, float(_inner(image, vector))
            vector = _unit(image)
            if abs(value - before) <= tolerance * abs(value):
                break
        return value + shift

    extreme = dominant(0.0)
    return extreme if extreme > 0 else dominant(extreme)


def stable_rate(curvature: float) -> float:
    """2/L"""
    return 2 / curvature if curvature > 0 else math.inf


def _inner(one: Sequence[Tensor], two: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(one, two, strict=True)]).sum()


def _unit(vector: Sequence[Tensor]) -> list[Tensor]:
    norm = _inner(vector, vector).sqrt().clamp(min=1e-30)
    return [part / norm for part in vector]
