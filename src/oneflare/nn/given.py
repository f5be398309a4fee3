"""Encoders and backbones that a Python caller hands over as modules, which the settings name by a digest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from oneflare.core.files import digest_of, tensor_digest
from oneflare.errors import ConfigError

CUSTOM = "custom"
"""the name in the settings of what a Python caller gave as a module"""
GIVEN: dict[str, nn.Module] = {}
"""the modules of this process by digest; worker processes are given the same"""


def give(module: nn.Module) -> dict[str, Any]:
    """The spec that stands for a module in the settings; its digest covers the module's structure and weights."""
    state = {name: tensor_digest(tensor.cpu()) for name, tensor in module.state_dict().items()}
    digest = digest_of([str(module), state])
    GIVEN[digest] = module
    return {"name": CUSTOM, "kind": type(module).__qualname__, "digest": digest}


def take_over(modules: Mapping[str, nn.Module]) -> None:
    """Let this process know what was given to the one that started it."""
    GIVEN.update(modules)


def given(part: str, digest: str | None) -> nn.Module:
    """The module with this digest, itself and not a copy; part: `encoder` or `backbone`, for the error."""
    if digest is None or digest not in GIVEN:
        raise ConfigError(
            f"the {part} was a module of a Python session; give it again as {part}=module, or register it in a plugin "
            "so that it has a name"
        )
    return GIVEN[digest]
