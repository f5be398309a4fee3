"""Lets torchvision and timm be imported beside a torch for processors, whose compiled part they do not have.

Only the names of the missing operators are defined; networks and transforms do not use them.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

LIBRARIES: list[torch.library.Library] = []


def require(*packages: str) -> None:
    """Skip where a package is not installed; else make it importable."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or LIBRARIES:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
        names = {*re.findall(r'register_meta\("(\w+)"', text), "nms", "qnms"}
        LIBRARIES.append(torch.library.Library("torchvision", "DEF"))
        for name in sorted(names):
            LIBRARIES[0].define(f"{name}(Tensor x) -> Tensor")
