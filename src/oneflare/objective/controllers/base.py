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
    """Decides lambda_eff, the weight of alignment, in every step: the weights minimise L_local + lambda_eff L_align.

    A controller is registered under a name (`@CONTROLLERS.register("mine")`) and chosen by it. The keyword-only
    parameters of its constructor are its options. A subclass must define `loss`; one that learns also defines `step`,
    `state_dict` and `load_state_dict`. `oneflare.testing.check_controller` checks what every controller must keep.

    facts: what is known about the client before training, such as its class counts.
    """

    def __init__(self, facts: ClientFacts) -> None:
        self.facts = facts
        self._raw: Tensor | float = 0.0
        self._raw_max: Tensor | float = 0.0
        self._effective: Tensor | float = 0.0

    def to(self, device: torch.device) -> None:  # noqa: B027  (a rule without tensors has nothing to move)
        """Move the rule's own state to where the losses are."""

    @abstractmethod
    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        """The scalar that the loop differentiates: the weights' loss, plus whatever this rule learns its state from.

        local: L_local of the batch, a scalar with a graph. align: L_align, the mean squared distance of the prototypes
        from their targets, a scalar that takes a gradient. For clients that train as one batch of models, both are
        `(K,)`. progress: the part of training that is done, in [0, 1). Implementations call
        `record` with lambda before and after its schedule, so that the trace shows both. The state of the rule itself
        must not receive gradients that are meant for the weights, nor the other way round: detach what is held fixed.
        """

    def step(self) -> None:  # noqa: B027  (a rule without state has nothing to do)
        """Update the rule's own state from the gradients of the last backward pass, and clear those gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed training needs to go on bit for bit; tensors and plain values by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")

    def record(self, raw: Tensor | float, effective: Tensor | float) -> None:
        """Remember the latest lambdas, and the largest raw one since the last trace, for `trace`.

        raw: lambda before the schedule. effective: the weight that alignment had in this step. Tensors are kept as they
        are and read once per epoch, because reading one waits for the processor that computes it.
        """
        self._raw, self._effective = raw, effective
        if isinstance(raw, Tensor):
            self._raw_max = torch.maximum(raw, torch.as_tensor(self._raw_max, dtype=raw.dtype))
        else:
            self._raw_max = max(float(self._raw_max), raw)

    def trace(self) -> dict[str, float]:
        """The figures of the epoch that ends here, by name: the lambdas, and what `trace_state` adds."""
        row = {
            "lambda_raw": float(self._raw),
            "lambda_raw_max": float(self._raw_max),
            "lambda_effective": float(self._effective),
            **self.trace_state(),
        }
        self._raw_max = 0.0
        return row

    def trace_state(self) -> dict[str, float]:
        """Further figures for the trace, by name; a subclass may add its own."""
        return {}


CONTROLLERS: Registry[Controller] = Registry("controller")


def build_controller(spec: Mapping[str, Any], facts: ClientFacts) -> Controller:
    """The controller that `spec` names (`{name: ..., option: ...}`), for a client with these facts."""
    return CONTROLLERS.build(spec, facts)
