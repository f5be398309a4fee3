"""Optimisers by name, and additions to SGD: momentum at a restart, noise as the rate falls, the largest stable rate.

They are written out because merely constructing one of torch's imports its compiler, which takes seconds of every
start, and because a step of ours takes less time (`benchmarks/optimisers.py`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oneflare.core.registry import Registry


def minimise(value: Callable[[], Tensor], parameters: Sequence[Tensor], steps: int, **options: Any) -> None:
    """Move parameters to where `value()` is least, by at most so many steps of L-BFGS with a line search.

    options: of `torch.optim.LBFGS`
    """
    optimiser = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe", **options)

    def with_gradient() -> Tensor:
        optimiser.zero_grad()
        found = value()
        found.backward()
        return found

    with torch.enable_grad():
        optimiser.step(with_gradient)


@dataclass(frozen=True)
class StepSettings:
    """What the section `train` says about every step, whichever optimiser takes it."""

    momentum: float = 0.0
    """of sgd; the others have options of their own"""
    weight_decay: float = 0.0
    clip: float = math.inf
    """largest norm of the gradient of all weights together"""


class Optimiser(ABC):
    """Moves weights against their gradients. A subclass says in `update` how, and what it remembers between steps.

    parameters: the weights, which are changed in place. settings: what the section `train` says about every step.
    Keyword-only parameters of a subclass are its options. `state_dict` and `load_state_dict` carry what an interrupted
    training needs to go on bit for bit: tensors, numbers, and lists and mappings of them.
    """

    def __init__(self, parameters: Sequence[Tensor], settings: StepSettings = StepSettings()) -> None:
        self.parameters = list(parameters)
        self.settings = settings

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the clipped gradients, which are then dropped; lr: the learning rate of this step."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        if self.settings.clip < math.inf:
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            torch._foreach_mul_(gradients, (self.settings.clip / (norm + 1e-6)).clamp(max=1.0))
        self.update(gradients, lr)
        for parameter in self.parameters:
            parameter.grad = None

    @abstractmethod
    def update(self, gradients: list[Tensor], lr: float) -> None:
        """Change `self.parameters`. gradients: one for each of them, clipped, which may be overwritten."""

    def reset_momentum(self) -> None:  # noqa: B027
        """Forget the direction of earlier steps: after a restart only the new gradients count. Does nothing where an
        optimiser remembers no direction."""

    @abstractmethod
    def state_dict(self) -> Any:
        """What the optimiser remembers."""

    @abstractmethod
    def load_state_dict(self, state: Any) -> None:
        """Go on from what `state_dict` gave."""


OPTIMISERS: Registry[Optimiser] = Registry("optimiser")
DEFAULT = "sgd"


def build_optimiser(spec: Mapping[str, Any] | None, parameters: Sequence[Tensor], settings: StepSettings) -> Optimiser:
    """spec: name and options; None: sgd"""
    return OPTIMISERS.build(spec or {"name": DEFAULT}, parameters, settings)


@OPTIMISERS.register("sgd")
class SGD(Optimiser):
    """stochastic gradient descent with momentum

    g <- clip(g) + weight_decay w;  v <- momentum v + g;  w <- w - lr v
    """

    def __init__(self, parameters: Sequence[Tensor], settings: StepSettings = StepSettings()) -> None:
        super().__init__(parameters, settings)
        self.velocity = [torch.zeros_like(parameter) for parameter in self.parameters]

    def update(self, gradients: list[Tensor], lr: float) -> None:
        if self.settings.weight_decay:
            torch._foreach_add_(gradients, self.parameters, alpha=self.settings.weight_decay)
        torch._foreach_mul_(self.velocity, self.settings.momentum)
        torch._foreach_add_(self.velocity, gradients)
        torch._foreach_add_(self.parameters, self.velocity, alpha=-lr)

    def reset_momentum(self) -> None:
        torch._foreach_zero_(self.velocity)

    def state_dict(self) -> list[Tensor]:
        return self.velocity

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        _copy(self.velocity, state)


@OPTIMISERS.register("adam")
class Adam(Optimiser):
    """Adam (Kingma & Ba 2015), with torch's defaults

    g <- clip(g) + weight_decay w
    m <- b1 m + (1-b1) g;  v <- b2 v + (1-b2) g^2;  w <- w - lr m/(1-b1^t) / (sqrt(v/(1-b2^t)) + epsilon)
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        settings: StepSettings = StepSettings(),
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
    ) -> None:
        if not (0 <= beta1 < 1 and 0 <= beta2 < 1 and epsilon > 0):
            raise ValueError("beta1 and beta2 lie in [0, 1), and epsilon is larger than 0")
        super().__init__(parameters, settings)
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.mean = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.square = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.steps = 0

    def update(self, gradients: list[Tensor], lr: float) -> None:
        self._decay(gradients, lr)
        self.steps += 1
        torch._foreach_lerp_(self.mean, gradients, 1 - self.beta1)
        torch._foreach_mul_(self.square, self.beta2)
        torch._foreach_addcmul_(self.square, gradients, gradients, 1 - self.beta2)
        scale = torch._foreach_sqrt(self.square)
        torch._foreach_div_(scale, math.sqrt(1 - self.beta2**self.steps))
        torch._foreach_add_(scale, self.epsilon)
        torch._foreach_addcdiv_(self.parameters, self.mean, scale, -lr / (1 - self.beta1**self.steps))

    def _decay(self, gradients: list[Tensor], lr: float) -> None:
        """Weight decay as a part of the gradient, which the moments then see."""
        del lr
        if self.settings.weight_decay:
            torch._foreach_add_(gradients, self.parameters, alpha=self.settings.weight_decay)

    def reset_momentum(self) -> None:
        """m to zero; v, the scale of the gradients, is kept."""
        torch._foreach_zero_(self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean": self.mean, "square": self.square}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])
        _copy(self.mean, state["mean"])
        _copy(self.square, state["square"])


@OPTIMISERS.register("adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)

    w <- (1 - lr weight_decay) w, then the step of adam without weight decay
    """

    def _decay(self, gradients: list[Tensor], lr: float) -> None:
        """Weight decay on the weights themselves, which the moments do not see."""
        del gradients
        if self.settings.weight_decay:
            torch._foreach_mul_(self.parameters, 1 - lr * self.settings.weight_decay)


def _copy(own: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
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
