"""A device for tests: its tensors are apart from the processor's, and what goes in and out of it is counted.

It computes with the processor's own arithmetic, so results are the same bit for bit. An operation on tensors of both
devices is an error, as it is on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "counted"


class Held(torch.Tensor):
    """A tensor on the device, which holds one of the processor."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Held:
        held = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=f"{NAME}:0"
        )
        held.raw = raw
        return held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called outside of `counted_device`")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        return memo.setdefault(id(self), copied)

    def tolist(self) -> list[Any]:
        return self.cpu().tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError(f"a tensor on {self.device} has no NumPy form; copy it to the processor first")


@dataclass
class Transfers(TorchDispatchMode):
    """Carries out operations, and counts them."""

    into: int = 0
    """tensors that were copied to the device"""
    back: int = 0
    """tensors and numbers that were copied from it"""
    operations: int = 0
    """that it has carried out"""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held = any(isinstance(tensor, Held) for tensor in tensors)
        device = kwargs.get("device")
        there = held if device is None else torch.device(device).type == NAME
        if not held and not there:
            return func(*args, **kwargs)
        name = func._schema.name
        if name in ("aten::_to_copy", "aten::copy_"):
            self._count(args, there, name)
        elif held and any(not isinstance(tensor, Held) and tensor.ndim for tensor in tensors):
            raise RuntimeError(f"{name}: tensors of two devices")
        elif name in ("aten::_local_scalar_dense", "aten::equal"):
            self.back += 1
        self.operations += 1
        options = {key: "cpu" if key == "device" else value for key, value in kwargs.items()}
        result = func(*tree_map(_raw, args), **tree_map(_raw, options))
        if name == "aten::copy_":
            return args[0]
        return tree_map(lambda leaf: Held(leaf) if there and isinstance(leaf, torch.Tensor) else leaf, result)

    def _count(self, args: tuple[Any, ...], there: bool, name: str) -> None:
        source, goal = (args[1], isinstance(args[0], Held)) if name == "aten::copy_" else (args[0], there)
        self.into += goal and not isinstance(source, Held)
        self.back += isinstance(source, Held) and not goal


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Held) else value


class _Module(_DummyBackendModule):
    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]


@functools.cache
def register() -> None:
    """Make the device known to torch; once per process, and before its first gradient."""
    _setup_privateuseone_for_python_backend(NAME, _Module())


@contextlib.contextmanager
def counted_device(monkeypatch) -> Iterator[Transfers]:
    """Everything that asks for the device of an experiment gets this one."""
    register()
    with monkeypatch.context() as patch, Transfers() as transfers:
        for name, module in list(sys.modules.items()):
            if name.startswith("oneflare.") and hasattr(module, "choose_device"):
                patch.setattr(module, "choose_device", lambda *wanted: torch.device(NAME))
        yield transfers
