"""Finds which axes of which tensors hold the same channels, from an encoder's graph.

Reordering the output channels of a layer changes nothing if everything that reads them is reordered alike. Channels
that are added to each other (residual connections) share one order: they form one group.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from oneflare.errors import ConfigError

PROTOTYPES = "prototypes"
FIXED = 0
"""the group of the image's own channels, which nobody may reorder"""

PASSING_MODULES = (
    nn.ReLU, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Dropout, nn.Dropout2d,
    nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Flatten,
)  # fmt: skip
PASSING_FUNCTIONS = (
    F.relu, F.leaky_relu, F.gelu, F.silu, F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.dropout, torch.relu,
    torch.tanh, torch.sigmoid, torch.flatten,
)  # fmt: skip
PASSING_METHODS = ("relu", "relu_", "tanh", "sigmoid", "flatten", "float", "contiguous", "mean", "amax")
JOINING = (operator.add, operator.iadd, operator.mul, operator.imul, torch.add, torch.mul)
JOINING_METHODS = ("add", "add_", "mul", "mul_")


@dataclass(frozen=True)
class Axis:
    """One axis of one tensor of the network's state."""

    tensor: str
    axis: int


class Channels:
    """The groups of an encoder, in the order in which the data meets them."""

    def __init__(self, encoder: nn.Module) -> None:
        self._parent = [FIXED]
        self._size: list[int | None] = [None]
        self._axes: list[tuple[Axis, int]] = []
        self._follow(encoder)
        self.group_of = {axis: self._root(group) for axis, group in self._axes}
        """axis -> its group"""

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys(group for group in self.group_of.values() if group != FIXED))

    def axes(self, group: int) -> list[Axis]:
        return [axis for axis, own in self.group_of.items() if own == group]

    def size(self, group: int) -> int:
        size = self._size[group]
        assert size is not None
        return size

    def of_tensor(self, name: str) -> dict[int, int]:
        """axis -> group, of the axes that hold channels"""
        return {axis.axis: group for axis, group in self.group_of.items() if axis.tensor == name}

    def _root(self, group: int) -> int:
        while self._parent[group] != group:
            group = self._parent[group]
        return group

    def _new(self, size: int) -> int:
        self._parent.append(len(self._parent))
        self._size.append(size)
        return len(self._parent) - 1

    def _join(self, groups: list[int]) -> int:
        first, *others = sorted(self._root(group) for group in groups)
        for other in others:
            self._parent[other] = first
        return first

    def _follow(self, encoder: nn.Module) -> None:
        try:
            graph = fx.Tracer().trace(encoder)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"fusion otfusion cannot read this encoder's graph ({reason}); use average") from None
        modules = dict(encoder.named_modules())
        groups: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                groups[node] = FIXED
            elif node.op == "output":
                features = groups[node.args[0]]
                self._axes.append((Axis(PROTOTYPES, 1), features))
            else:
                groups[node] = self._step(node, modules, groups)

    def _step(self, node: fx.Node, modules: dict[str, nn.Module], groups: dict[fx.Node, int]) -> int:
        inputs = [groups[argument] for argument in node.all_input_nodes]
        if node.op == "call_module":
            return self._module(str(node.target), modules[str(node.target)], inputs[0])
        known: tuple[tuple[Any, ...], tuple[Any, ...]] = (
            (PASSING_FUNCTIONS, JOINING) if node.op == "call_function" else (PASSING_METHODS, JOINING_METHODS)
        )
        if node.op in ("call_function", "call_method") and inputs:
            if node.target in known[0]:
                return inputs[0]
            if node.target in known[1]:
                return self._join(inputs)
        raise self._lost(str(node.target))

    def _module(self, name: str, module: nn.Module, group: int) -> int:
        if isinstance(module, PASSING_MODULES):
            return group
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            for key in ("weight", "bias", "running_mean", "running_var"):
                if getattr(module, key) is not None:
                    self._axes.append((Axis(f"{name}.{key}", 0), group))
            return group
        if isinstance(module, nn.Conv2d):
            depthwise = module.groups == module.in_channels == module.out_channels
            if module.groups == 1 or depthwise:
                return self._layer(name, module, group, module.in_channels, same=depthwise and module.groups > 1)
        if isinstance(module, nn.Linear):
            return self._layer(name, module, group, module.in_features, same=False)
        raise self._lost(f"{name} ({type(module).__name__})")

    def _layer(self, name: str, module: nn.Conv2d | nn.Linear, group: int, inputs: int, *, same: bool) -> int:
        known = self._size[self._root(group)]
        if known is not None and known != inputs:
            raise self._lost(f"{name}, which reads {inputs} inputs from {known} channels")
        output = group if same else self._new(module.weight.shape[0])
        self._axes.append((Axis(f"{name}.weight", 0), output))
        if not same:
            self._axes.append((Axis(f"{name}.weight", 1), group))
        if module.bias is not None:
            self._axes.append((Axis(f"{name}.bias", 0), output))
        return output

    @staticmethod
    def _lost(what: str) -> ConfigError:
        return ConfigError(f"fusion otfusion cannot follow channels through {what}; use average for this encoder")
