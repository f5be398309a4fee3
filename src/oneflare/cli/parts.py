"""`oneflare methods`: lists the methods, and with --parts every other part that has a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from oneflare.cli.options import Json

HOME = "oneflare."


def methods(
    parts: Annotated[
        bool,
        typer.Option(
            "--parts",
            help="Also list fusions, controllers, backbones, encoders, feature maps, data sets and all other parts.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """List the methods with the research log's version numbers.

    Parts of your own modules (--plugin) are listed in any case, with the module they come from.

    [bold]Examples[/bold]

      oneflare methods

      oneflare methods --parts

      oneflare methods --json
    """
    from oneflare.cli import show
    from oneflare.core.plugins import load_plugins, loaded_plugins
    from oneflare.methods import METHODS

    load_plugins()
    own = bool(loaded_plugins())
    rows = [row for row in named_parts() if parts or not row["module"].startswith(HOME)] if parts or own else []
    if json:
        listed = [{"name": m.name, "version": m.version, "summary": m.summary} for m in METHODS.values()]
        show.as_json([*listed, *rows])
        return
    show.methods(METHODS.values())
    if rows:
        show.parts(rows)


def named_parts() -> Iterator[dict[str, Any]]:
    """Everything in every registry: kind, name, the module that registered it, and its docstring's first line."""
    for registry in _registries():
        for name in sorted(registry):
            entry = registry[name]
            module = getattr(entry.factory, "__module__", "")
            yield {"kind": registry.kind, "name": name, "module": module, "summary": entry.summary}


def find_parts(name: str) -> list[dict[str, Any]]:
    """Parts of this name (or KIND:NAME) in any registry, each with its whole docstring and its options' defaults."""
    kind, separator, plain_name = name.rpartition(":")
    found = []
    for registry in _registries():
        if plain_name in registry and (not separator or registry.kind.replace(" ", "_") == kind.replace(" ", "_")):
            entry = registry[plain_name]
            options = {
                key: "required" if field.is_required() else field.default
                for key, field in entry.schema.model_fields.items()
            }
            found.append({"kind": registry.kind, "name": plain_name, "document": entry.document, "options": options})
    return found


def _registries() -> tuple[Any, ...]:
    from oneflare.core.schedules import SCHEDULES
    from oneflare.data.partition import PARTITIONS
    from oneflare.data.sources import SOURCES
    from oneflare.fusion import FUSIONS
    from oneflare.nn import BACKBONES
    from oneflare.nn.anchors import ANCHORS
    from oneflare.nn.encoders import ENCODERS
    from oneflare.nn.feature_maps import FEATURE_MAPS
    from oneflare.nn.optimisers import OPTIMISERS
    from oneflare.objective import CONTROLLERS
    from oneflare.objective.banks import BANKS
    from oneflare.objective.terms import TERMS

    return (
        FUSIONS, CONTROLLERS, BACKBONES, ENCODERS, FEATURE_MAPS, SOURCES, PARTITIONS, ANCHORS, TERMS, BANKS, SCHEDULES,
        OPTIMISERS,
    )  # fmt: skip
