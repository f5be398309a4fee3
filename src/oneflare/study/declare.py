"""The declaration of a study: its cells, its rows and its claims.

One YAML file each, in `declared/`; a path to your own file works as well. The grid is
`places` (data x alpha x clients, by scale) x `arms` (a method with settings) x seeds; `fusions` are read off the same
uploads. An arm under the first fusion is called by its name, under another `arm:fusion`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, model_validator

from oneflare.core.config import Section
from oneflare.core.layers import merge, read_yaml
from oneflare.core.registry import one_line
from oneflare.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).parent / "declared"
LOG_FUSION = "feature_mean"
"""what the log calls "simple": the server of nearly all its figures"""

Quantity = Literal["largest_raw", "last_raw", "rise", "end_over_peak", "accuracy_lost"]
Measure = Literal["accuracy", "g_protos_std", "inter_client_proto_std"]


def _several(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else (value,)


Names = Annotated[tuple[str, ...], BeforeValidator(_several)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_several)]
Counts = Annotated[tuple[int, ...], BeforeValidator(_several)]


class Arm(Section):
    """A method with settings; one row per fusion."""

    method: str
    label: str | None = None
    fusions: Names | None = Field(None, description="default: the study's")
    settings: dict[str, Any] = Field(default_factory=dict)
    scales: dict[str, dict[str, Any]] = Field(default_factory=dict, description="settings at one scale only")


class Grid(Section):
    """data x alpha x clients."""

    data: Names
    alpha: Numbers = (0.05,)
    clients: Counts = (5,)
    settings: dict[str, Any] = Field(default_factory=dict, description="for every arm at these places")
    additional: bool = Field(
        False, validation_alias=AliasChoices("additional", "more"), description="run only with --full"
    )


class Statement(Section):
    """One statement that figures can bear out.

    `difference`: arm - than, paired by seed, on the claimed side of a threshold (points of accuracy; per cent of
    the other measures). `trend`: that difference at the first alpha minus the one at the last. `quantity`: a quantity
    of one arm, taken over the clients of each seed, whose mean over seeds is on the claimed side of a threshold.
    """

    kind: Literal["difference", "trend", "quantity"] = "difference"
    arm: str
    than: str | None = None
    measure: Measure = "accuracy"
    quantity: Quantity | None = None
    over: Literal["max", "min"] = "max"
    above: float | None = None
    below: float | None = None
    data: str | None = Field(None, description="only at places with these data")
    alpha: float | None = Field(None, description="only at places with this alpha")
    text: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> Statement:
        if (self.above is None) == (self.below is None):
            raise ValueError("set one of above and below")
        if (self.kind == "quantity") != (self.than is None) or (self.kind == "quantity") != (self.quantity is not None):
            raise ValueError("a difference and a trend need than, a statement of kind quantity needs quantity")
        return self


class Claim(Section):
    id: str
    text: str
    log: str = Field("", description="what the log reports, with its settings; never mixed with our figures")
    exploratory: bool = Field(
        False, description="asked after figures had been seen: shown apart, not counted, and no seeds are added for it"
    )
    tests: tuple[Statement, ...]


class Reference(Section):
    """Figures of the log, which stand beside ours."""

    settings: str
    values: dict[str, float | str]


class Figure(Section):
    kind: Literal["accuracy", "history", "lambda", "sensitivity", "clients"]
    title: str
    arms: Names | None = None
    data: str | None = None
    alpha: float | None = None


class Declaration(Section):
    name: str
    title: str
    question: str
    fusions: Names = (LOG_FUSION,)
    baseline: str = Field(description="arm to which differences are taken")
    arms: dict[str, Arm]
    places: dict[str, tuple[Grid, ...]] = Field(description="by scale; smoke is digits at alpha 0.05 if absent")
    claims: tuple[Claim, ...] = ()
    log: tuple[Reference, ...] = ()
    figures: tuple[Figure, ...] = ()
    headline: Names = Field((), description="rows that README shows; all if absent")
    note: str = ""

    @model_validator(mode="after")
    def _names_exist(self) -> Declaration:
        rows = {row.id for row in self.rows()}
        wanted = [self.baseline, *self.headline]
        wanted += [name for figure in self.figures for name in figure.arms or ()]
        wanted += [name for claim in self.claims for test in claim.tests for name in (test.arm, test.than) if name]
        for name in wanted:
            if name not in rows:
                raise ValueError(f"'{name}' is no arm{did_you_mean(name, rows)}")
        return self

    def rows(self) -> Iterator[ArmRow]:
        """Arms under their fusions, in the order of the table."""
        for name, arm in self.arms.items():
            for number, fusion in enumerate(arm.fusions or self.fusions):
                label = arm.label or name
                if number:
                    yield ArmRow(f"{name}:{fusion}", name, fusion, f"{label}, {fusion}")
                else:
                    yield ArmRow(name, name, fusion, label)

    def grids(self, scale: str) -> tuple[Grid, ...]:
        if scale == "smoke" and scale not in self.places:
            return (Grid(data=("digits",)),)
        return self.places.get(scale, ())


@dataclass(frozen=True)
class ArmRow:
    """An arm under one fusion."""

    id: str
    arm: str
    fusion: str
    label: str


PAPER = ("table1", "figure1", "table2", "figure2", "table3", "figure3", "lambda_sensitivity", "clients")


QUESTIONS = (
    "regime",
    "servers",
    "sensitivity",
    "pretrained",
    "many_classes",
    "natural",
    "label_noise",
    "peers",
)
"""what reviewers of this line of work ask"""


LABORATORY = ("lambda", "lambda_short")
"""what controllers do to lambda, on the digits"""


def declared() -> dict[str, Path]:
    """Studies that come with OneFlare: the paper's, reviewers' questions, lambda, the log's claims."""
    paths = {path.stem: path for path in FOLDER.glob("*.yaml")}
    named = (*PAPER, *QUESTIONS, *LABORATORY)
    claims = sorted((name for name in paths if name not in named), key=lambda name: int(name[1:]))
    return {name: paths[name] for name in (*named, *claims)}


def find_declaration(name: str) -> Declaration:
    """By name (c4 or C4), or the path of a YAML file."""
    known = declared()
    if name.endswith((".yaml", ".yml")):
        return read_declaration(Path(name))
    if name.lower() not in known:
        raise ConfigError(f"unknown study '{name}'{did_you_mean(name.lower(), known)}")
    return read_declaration(known[name.lower()])


def read_declaration(path: Path) -> Declaration:
    content = _content(path)
    try:
        return Declaration.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        raise ConfigError(f"{path}: {one_line(error, Declaration)}") from None


def _content(path: Path) -> dict[str, Any]:
    """`extends: other` starts from another declaration; its claims, figures and references are not inherited."""
    content = read_yaml(path, "a declaration with title, question, arms, places and baseline")
    parent = content.pop("extends", None)
    if parent is None:
        return content
    inherited = _content(FOLDER / f"{parent}.yaml")
    kept: dict[str, Any] = {
        key: inherited[key] for key in ("fusions", "baseline", "arms", "places") if key in inherited
    }
    return merge(kept, content)
