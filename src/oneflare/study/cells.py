"""The trainings (cells) that a study asks for, each in a folder named by what it depends on.

Two studies that need the same training share its folder, and cells that differ only in fusion are one training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneflare.client.lending import networks_digest, snapshots_of
from oneflare.core.config import Experiment
from oneflare.core.layers import Layer, merge
from oneflare.errors import ConfigError
from oneflare.methods.recipes import find_method
from oneflare.methods.resolve import resolve
from oneflare.study.declare import Declaration, Grid
from oneflare.study.scales import Scale

CELLS = "cells"


def cell_name(experiment: Experiment) -> str:
    """Readable, and unique to what the uploads depend on: `fafi-cifar10-a0.05-s0-0123456789`."""
    return (
        f"{experiment.method}-{experiment.data.name}-a{experiment.partition.alpha:g}-s{experiment.seed}-"
        f"{experiment.training_digest()[:10]}"
    )


@dataclass(frozen=True)
class Place:
    """Where methods meet: data, skew, number of clients."""

    data: str
    alpha: float
    clients: int

    @property
    def id(self) -> str:
        return f"{self.data}-a{self.alpha:g}-c{self.clients}"

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "data": self.data, "alpha": self.alpha, "clients": self.clients}


@dataclass(frozen=True)
class Cell:
    """One training, and every fusion that some row reads off it."""

    layer: dict[str, Any]
    """what a user would write: no defaults"""
    experiment: Experiment

    @property
    def name(self) -> str:
        return cell_name(self.experiment)

    def folder(self, runs: Path) -> Path:
        return runs / CELLS / self.name

    @property
    def fusions(self) -> tuple[str, ...]:
        return tuple(spec["name"] for spec in self.experiment.fusions)


@dataclass(frozen=True)
class StudyPlan:
    """All cells of one study at one scale."""

    declaration: Declaration
    scale: Scale
    looks: tuple[int, ...]
    """numbers of seeds at which verdicts are looked for; the first is always run"""
    places: tuple[Place, ...]
    cells: dict[tuple[str, str, int], Cell]
    """by place, arm and seed"""
    overrides: dict[str, Any] = field(default_factory=dict)
    """what the command line has changed in every cell"""
    first_seed: int = 0

    @property
    def seeds(self) -> tuple[int, ...]:
        """All that may be needed, in the order in which they are run."""
        return tuple(range(self.first_seed, self.first_seed + self.looks[-1]))

    @property
    def first_seeds(self) -> tuple[int, ...]:
        """What every cell needs before the first look."""
        return self.seeds[: self.looks[0]]

    @property
    def first_cells(self) -> list[Cell]:
        """What is run before the first look."""
        return [cell for (_, _, seed), cell in self.cells.items() if seed in self.first_seeds]

    @property
    def summary(self) -> str:
        """What the scale means in these cells, and where the study and the command line depart from it."""
        trained = [cell.experiment for cell in self.cells.values() if cell.experiment.epochs]
        span = _span(experiment.epochs for experiment in trained)
        batch = _span(experiment.train.batch_size for experiment in trained)
        epochs = f"{span} epoch{'' if span == '1' else 's'}"
        text = self.scale.summary.format(epochs=epochs, batch=batch) + self._accuracies
        own = merge(*(grid.settings for grid in self.declaration.grids(self.scale.name)))
        departures = {"in this study": own, "changed for these runs": self.overrides}
        for what, settings in departures.items():
            if settings:
                text += f"; {what}: " + ", ".join(f"{key}={value}" for key, value in dotted(settings))
        return text

    @property
    def _accuracies(self) -> str:
        """Over which checkpoints accuracies are taken, where not at the end alone."""
        tails = {cell.experiment.train.tail for cell in self.cells.values() if cell.experiment.trains}
        longest = max((tail for tail in tails if tail is not None), default=0)
        return f"; accuracies are means over the ends of the last {longest + 1} epochs" if longest else ""

    def cell(self, place: Place, arm: str, seed: int) -> Cell:
        return self.cells[place.id, arm, seed]


def _span(numbers: Iterable[int]) -> str:
    """`25`, or `5 to 25`"""
    known = sorted(set(numbers))
    return " to ".join(str(number) for number in dict.fromkeys((known[0], known[-1]))) if known else "no"


def places_of(grids: Iterable[Grid], full: bool) -> Iterator[tuple[Place, Layer]]:
    for grid in grids:
        if full or not grid.additional:
            for data in grid.data:
                for alpha in grid.alpha:
                    for clients in grid.clients:
                        yield Place(data, alpha, clients), grid.settings


def make_plan(
    declaration: Declaration,
    scale: Scale,
    *,
    seeds: int | None = None,
    first_seed: int = 0,
    full: bool = False,
    overrides: Layer | None = None,
) -> StudyPlan:
    """Resolve every cell: a misspelt option ends here, before any work. Overrides change every cell alike."""
    grids = declaration.grids(scale.name)
    if not grids:
        raise ConfigError(f"study {declaration.name} declares no places for --scale {scale.name}")
    looks = scale.looks_until(seeds)
    overrides = merge(overrides or {})
    for key in ("method", "seed", "fusions"):
        if key in overrides:
            raise ConfigError(f"{key}= is what a study varies; write a declaration of your own instead")
    places: dict[str, Place] = {}
    cells: dict[tuple[str, str, int], Cell] = {}
    for place, settings in places_of(grids, full):
        for name, arm in declaration.arms.items():
            own = merge(arm.settings, arm.scales.get(scale.name, {}))
            layer = merge(scale.layer(place.data, place.alpha, place.clients), settings, own, overrides)
            wanted = _fusions(arm.method, arm.fusions or declaration.fusions)
            for seed in range(first_seed, first_seed + looks[-1]):
                cell_layer = merge(layer, {"method": arm.method, "seed": seed})
                experiment = resolve(cell_layer, {"fusions": wanted})
                split = experiment.partition
                actual = Place(experiment.data.name, split.alpha, split.clients)
                places[actual.id] = actual
                cells[actual.id, name, seed] = Cell(cell_layer, experiment)
    return StudyPlan(declaration, scale, looks, tuple(places.values()), cells, overrides, first_seed)


def dotted(layer: Layer, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as a user would write them."""
    for key, value in layer.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _fusions(method: str, wanted: Sequence[str]) -> list[Any]:
    """The method's own first, with its settings, then what the table asks for."""
    own = {_name_of(spec): spec for spec in find_method(method).recipe.get("fusions", ())}
    return list((own | {name: name for name in wanted if name not in own}).values())


def _name_of(spec: Any) -> str:
    return str(spec["name"] if isinstance(spec, Mapping) else spec)


def unique_cells(plans: Iterable[StudyPlan]) -> list[Cell]:
    """What the plans need before their first look."""
    return merged(cell for plan in plans for cell in plan.first_cells)


def merged(cells: Iterable[Cell]) -> list[Cell]:
    """Each training once, in the order in which studies ask for it, with all fusions that any of them reads."""
    found: dict[str, Cell] = {}
    for cell in cells:
        name = cell.name
        found[name] = _joined(found[name], cell) if name in found else cell
    return list(found.values())


def families(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that train the same networks, which one of them can lend the others: it comes first in its family."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        key = networks_digest(cell.experiment) if cell.experiment.trains else cell.name
        found.setdefault(key, []).append(cell)
    return [sorted(family, key=lambda cell: -len(snapshots_of(cell.experiment))) for family in found.values()]


def _joined(first: Cell, second: Cell) -> Cell:
    specs = {spec["name"]: spec for spec in (*first.experiment.fusions, *second.experiment.fusions)}
    return Cell(first.layer, first.experiment.model_copy(update={"fusions": tuple(specs.values())}))
