"""The methods by name. The research log's version numbers are aliases (it reused some; names are unambiguous)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oneflare.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Method:
    """A recipe: what it changes from the defaults, and where it comes from."""

    name: str
    summary: str
    version: str
    """the log's number, or where else it is from"""
    recipe: Mapping[str, Any] = field(default_factory=dict)


ALL_TERMS = {"cls": 1.0, "supcon": 1.0, "proto_feature": 1.0, "proto_separation": 1.0}
CLASSIFY = {"terms": {"cls": 1.0}}
FAFI = {"terms": ALL_TERMS}
STATISTICS = {"name": "random_conv"}
SERVERS = ["count_prototypes", "feature_mean", "iffi", "ensemble", "average"]


def _first(name: str) -> list[str]:
    """All servers of the bench, the method's own first: the same uploads feed them all."""
    return [name, *(other for other in SERVERS if other != name)]


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "fedavg",
            "plain local training, weights averaged once: the lower bound",
            "baseline",
            {"objective": CLASSIFY, "fusions": _first("average")},
        ),
        Method(
            "ensemble",
            "plain local training, probabilities averaged",
            "baseline",
            {"objective": CLASSIFY, "fusions": _first("ensemble")},
        ),
        Method(
            "fafi",
            "FAFI: contrastive local objective with learnable prototypes, features fused",
            "V4",
            {"objective": FAFI, "fusions": _first("feature_mean")},
        ),
        Method(
            "drcl",
            "FAFI with prototypes pulled toward random anchors, lambda fixed",
            "V5",
            {
                "objective": FAFI,
                "anchors": {"name": "random"},
                "controller": {"name": "fixed", "lambda_0": 5.0},
                "fusions": _first("feature_mean"),
            },
        ),
        Method(
            "etf_annealed",
            "FAFI pulled toward a simplex ETF, lambda falling linearly from 20",
            "V7",
            {
                "objective": FAFI,
                "anchors": {"name": "etf"},
                "controller": {"name": "annealed", "lambda_0": 20.0, "schedule": "linear"},
                "fusions": _first("feature_mean"),
            },
        ),
        Method(
            "flare",
            "FLARE: lambda learned from task uncertainty, annealed, held by a valve; counted prototypes",
            "V14",
            {
                "objective": FAFI,
                "anchors": {"name": "etf"},
                "controller": {"name": "meta_annealed", "floor": 1e-3, "lambda_max": 50.0},
                "fusions": _first("count_prototypes"),
            },
        ),
        Method(
            "analytic",
            "no training: statistics of fixed random features added up and solved, the same for every split",
            "ours",
            {"objective": {"terms": {}}, "analytic": STATISTICS, "fusions": ["analytic"]},
        ),
        Method(
            "flare_analytic",
            "FLARE and statistics in one upload: the analytic posterior, corrected by what each client knows",
            "ours",
            {
                "objective": FAFI,
                "anchors": {"name": "etf"},
                "controller": {"name": "meta_annealed", "floor": 1e-3, "lambda_max": 50.0},
                "analytic": STATISTICS,
                "train": {"holdout": 0.1, "snapshots": 0},
                "fusions": ["flare_analytic", "analytic", *SERVERS],
            },
        ),
    )
}


def find_method(name: str) -> Method:
    """By name or by the log's version number."""
    versions = {method.version.lower(): method for method in METHODS.values() if method.version[:1] == "V"}
    found = METHODS.get(name) or versions.get(name.lower())
    if found is None:
        raise ConfigError(f"method: unknown method '{name}'{did_you_mean(name, METHODS)}")
    return found
