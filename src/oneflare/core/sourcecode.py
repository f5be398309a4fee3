"""Finds the source files behind a user's part, and computes a digest that changes when they do.

A module counts with every module that it imports from its own folder or its own package; a package counts with all
Python files below it. What other distributions install counts by name only, as any library does.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

INSTALLED = {"site-packages", "dist-packages"}
STANDARD = Path(sysconfig.get_path("stdlib")).resolve()


def text_digest(part: Any) -> str | None:
    """SHA-256 of the text of one class or function; None where it was typed into an interpreter."""
    try:
        return hashlib.sha256(inspect.getsource(part).encode()).hexdigest()
    except (OSError, TypeError):
        return None


@lru_cache
def module_digest(name: str) -> str | None:
    """SHA-256 over the files of an imported module, by their place below its folder; read once per process."""
    module = sys.modules.get(name)
    root = None if module is None else _root(name)
    if module is None or root is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(_files(module, root)):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def is_installed(name: str) -> bool:
    """Whether a module comes from an installed distribution."""
    root = _root(name)
    return root is None or _is_library(root)


def _is_library(root: Path) -> bool:
    return root.name in INSTALLED or root.is_relative_to(STANDARD)


def _root(name: str) -> Path | None:
    """The folder in which the module, or the package that it belongs to, was found."""
    top = sys.modules.get(name.split(".")[0])
    places = [] if top is None else [*getattr(top, "__path__", ()), getattr(top, "__file__", None)]
    return next((Path(place).resolve().parent for place in places if place), None)


def _files(module: ModuleType, root: Path) -> set[Path]:
    """Its own files, and those of the modules they import that lie in the same root."""
    found: set[Path] = set()
    waiting = [module]
    seen = {module.__name__}
    while waiting:
        current = waiting.pop()
        own = set(_own_files(current, whole=current is module))
        found |= own
        for name in sorted({name for path in own for name in _imports(path, current)} - seen):
            seen.add(name)
            other = sys.modules.get(name)
            if other is not None and _belongs(name, module.__name__, root):
                waiting.append(other)
    return {path for path in found if path.is_relative_to(root)}


def _own_files(module: ModuleType, *, whole: bool) -> Iterator[Path]:
    file = getattr(module, "__file__", None)
    if file is not None and file.endswith(".py"):
        yield Path(file).resolve()
    if whole:
        for folder in getattr(module, "__path__", ()):
            yield from Path(folder).resolve().rglob("*.py")


def _belongs(name: str, user: str, root: Path) -> bool:
    """Whether an imported module is part of the user's own code and not a library."""
    top = name.split(".")[0]
    if top == user.split(".")[0]:
        return True
    return top != "oneflare" and not _is_library(root) and _root(name) == root


def _imports(path: Path, module: ModuleType) -> Iterator[str]:
    """Names of modules that a file may import; `from a import b` may mean the module a.b."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    package = module.__name__ if hasattr(module, "__path__") else module.__name__.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield start
            yield from (f"{start}.{alias.name}" for alias in node.names)
