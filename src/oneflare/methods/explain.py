"""Explains a method in words and equations: what it minimises, what decides lambda, how the server fuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from oneflare.core.config import Experiment
from oneflare.fusion import FUSIONS
from oneflare.methods.additions import describe_additions
from oneflare.methods.recipes import REUSED, Method, find_method
from oneflare.methods.resolve import resolve
from oneflare.nn import ANCHORS, FEATURE_MAPS
from oneflare.nn.encoders import encoder_spec
from oneflare.objective import CONTROLLERS, TERMS

CLASSES = 10
"""for which the spread of the anchors is stated"""


@dataclass(frozen=True)
class Explanation:
    method: Method
    experiment: Experiment
    terms: dict[str, tuple[float, str]]
    """weight and equation of every term"""
    controller: str
    anchors: str
    worst_cosine: float | None
    """of the two closest anchors, for ten classes"""
    additions: dict[str, str]
    """what a client holds beside its terms"""
    feature_map: str | None
    """whose statistics uploads hold; None without statistics"""
    fusions: dict[str, str]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method.name,
            "summary": self.method.summary,
            "log": list(self.method.numbers) or self.method.version,
            "reference": self.method.reference,
            "notes": self.notes,
            "terms": {name: {"weight": weight, "equation": text} for name, (weight, text) in self.terms.items()},
            "controller": self.controller,
            "anchors": self.anchors,
            "worst_cosine": self.worst_cosine,
            "additions": self.additions,
            "feature_map": self.feature_map,
            "fusions": self.fusions,
            "defaults": self.defaults,
        }

    @property
    def defaults(self) -> dict[str, Any]:
        content = self.experiment.model_dump(mode="json")
        return {key: content[key] for key in ("objective", "anchors", "controller", "analytic", "train")}

    def defaults_yaml(self) -> str:
        return yaml.safe_dump(self.defaults, sort_keys=False, default_flow_style=None, width=100)


def explain(name: str) -> Explanation:
    """By name or by version number; a number that once meant several methods comes with a note."""
    method = find_method(name)
    experiment = resolve({"method": method.name})
    anchors = ANCHORS[experiment.anchors["name"]]
    encoder = encoder_spec(experiment.encoder, CLASSES)
    built = ANCHORS.build(experiment.anchors, CLASSES, int(encoder["dim"]))
    return Explanation(
        method,
        experiment,
        {term: (weight, TERMS[term].document) for term, weight in experiment.objective.terms.items() if weight},
        CONTROLLERS[experiment.controller["name"]].document,
        anchors.document,
        None if built is None else built.worst_cosine,
        describe_additions(experiment.objective),
        None if experiment.analytic["name"] == "none" else FEATURE_MAPS[experiment.analytic["name"]].document,
        {spec["name"]: FUSIONS[spec["name"]].summary for spec in experiment.fusions},
        [note for number, note in REUSED.items() if number.lower() == name.lower()],
    )
