"""The contract of a lambda controller.

The loop calls `loss` with the two losses and the progress, runs one backward pass over what it returns, then calls
`step`. A controller owns its state, its own step size, and its trace.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oneflare.core.registry import Registry


@dataclass(frozen=True)
class ClientFacts:
    """What a rule may know about its client before training."""

    counts: tuple[int, ...]
    """samples of each class"""

    @property
    def entropy(self) -> float:
        """H(p_i)/log C in [0, 1]: 1 for balanced classes, 0 for a single one."""
        total = sum(self.counts)
        shares = [count / total for count in self.counts if count > 0]
        return -sum(p * math.log(p) for p in shares) / math.log(len(self.counts)) if len(self.counts) > 1 else 0.0


def entropy_lambda(facts: ClientFacts, lambda_min: float, lambda_max: float) -> float:
    """lambda_i = lambda_min + H(p_i)/log C (lambda_max - lambda_min)"""
    return lambda_min + facts.entropy * (lambda_max - lambda_min)


class Controller(ABC):
    """Yields lambda_eff per step; the weights minimise L_local + lambda_eff L_align."""

    def __init__(self, facts: ClientFacts) -> None:
        self.facts = facts
        self._raw: Tensor | float = 0.0
        self._raw_max: Tensor | float = 0.0
        self._effective: Tensor | float = 0.0

    def to(self, device: torch.device) -> None:  # noqa: B027  (a rule without tensors has nothing to move)
        """Move the rule's own state to where the losses are."""

    @abstractmethod
    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        """The scalar to run backward on: the weights' loss, plus whatever this rule learns its own state from."""

    def step(self) -> None:  # noqa: B027  (a rule without state has nothing to do)
        """Update the rule's own state from the gradients of the last backward pass."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")

    def record(self, raw: Tensor | float, effective: Tensor | float) -> None:
        """Remember the latest lambdas and the largest raw one since the last trace, without synchronising."""
        self._raw, self._effective = raw, effective
        if isinstance(raw, Tensor):
            self._raw_max = torch.maximum(raw, torch.as_tensor(self._raw_max, dtype=raw.dtype))
        else:
            self._raw_max = max(float(self._raw_max), raw)

    def trace(self) -> dict[str, float]:
        """One row, for the epoch that ends here."""
        row = {
            "lambda_raw": float(self._raw),
            "lambda_raw_max": float(self._raw_max),
            "lambda_effective": float(self._effective),
            **self.trace_state(),
        }
        self._raw_max = 0.0
        return row

    def trace_state(self) -> dict[str, float]:
        return {}


CONTROLLERS: Registry[Controller] = Registry("controller")


def build_controller(spec: Mapping[str, Any], facts: ClientFacts) -> Controller:
    return CONTROLLERS.build(spec, facts)
