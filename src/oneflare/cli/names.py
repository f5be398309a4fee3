"""Names that the shell completes, read from the source text because importing the parts would import torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import click

PACKAGE = Path(__file__).parent.parent
ROOMS = {
    "FUSIONS": "fusion/**/*.py",
    "SOURCES": "data/*.py",
    "BACKBONES": "nn/backbone_kinds.py",
    "ENCODERS": "nn/encoders.py",
    "CONTROLLERS": "objective/controllers/*.py",
    "FEATURE_MAPS": "nn/*_maps.py",
    "ANCHORS": "nn/anchors.py",
    "PARTITIONS": "data/partition.py",
    "SCHEDULES": "core/schedules.py",
    "OPTIMISERS": "nn/optimisers.py",
}
KEYS = (
    "method",
    "data",
    "backbone",
    "encoder",
    "controller",
    "anchors",
    "partition.kind",
    "analytic",
    "fusions",
    "engine",
    "train.optimiser",
)
SHORT = ("alpha", "clients", "epochs", "seed", "workers", "train.lr", "train.batch_size")


@cache
def registered(registry: str) -> tuple[str, ...]:
    """The names that `@REGISTRY.register("name")` gives in our own source."""
    pattern = re.compile(rf'^@{registry}\.register\("([^"]+)"\)', re.MULTILINE)
    files = sorted(PACKAGE.glob(ROOMS[registry]))
    return tuple(sorted(name for file in files for name in pattern.findall(file.read_text(encoding="utf-8"))))


def method_names() -> list[str]:
    from oneflare.methods.recipes import METHODS

    return sorted(METHODS)


def _values(key: str) -> Iterable[str]:
    registries = {
        "data": "SOURCES",
        "backbone": "BACKBONES",
        "encoder": "ENCODERS",
        "controller": "CONTROLLERS",
        "anchors": "ANCHORS",
        "partition.kind": "PARTITIONS",
        "analytic": "FEATURE_MAPS",
        "fusions": "FUSIONS",
        "train.optimiser": "OPTIMISERS",
    }
    if key == "method":
        return method_names()
    if key == "engine":
        return ("local", "flower")
    return registered(registries[key]) if key in registries else ()


def complete_settings(ctx: click.Context, incomplete: str) -> list[str]:
    """KEY= and, after it, the values; bash cuts words at '=', other shells do not."""
    key, separator, begun = incomplete.partition("=")
    if separator and key:
        return [f"{key}={value}" for value in _values(key) if value.startswith(begun)]
    before = [word for words in ctx.params.values() if isinstance(words, list | tuple) for word in words]
    if incomplete in ("", "=") and before and before[-1] in KEYS:
        return list(_values(str(before[-1])))
    if len(before) > 1 and before[-1] == "=":
        return [value for value in _values(str(before[-2])) if value.startswith(incomplete)]
    return [f"{name}=" for name in (*KEYS, *SHORT) if name.startswith(incomplete)]


def complete_methods(incomplete: str) -> list[str]:
    return _begin(method_names(), incomplete)


def complete_explained(incomplete: str) -> list[str]:
    parts = [name for registry in ("FUSIONS", "CONTROLLERS", "ANCHORS") for name in registered(registry)]
    return _begin(dict.fromkeys([*method_names(), *parts]), incomplete)


def complete_comparison(ctx: click.Context, incomplete: str) -> list[str]:
    return [*complete_methods(incomplete), *complete_settings(ctx, incomplete)]


def complete_fusions(incomplete: str) -> list[str]:
    return _begin(registered("FUSIONS"), incomplete)


def complete_schedules(incomplete: str) -> list[str]:
    return _begin(registered("SCHEDULES"), incomplete)


def complete_studies(incomplete: str) -> list[str]:
    declared = [path.stem for path in (PACKAGE / "study" / "declared").glob("*.yaml")]
    return _begin(sorted([*declared, "all"]), incomplete)


def complete_scales(incomplete: str) -> list[str]:
    return _begin(("smoke", "small", "paper"), incomplete)


def _begin(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
