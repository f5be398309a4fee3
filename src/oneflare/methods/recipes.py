"""The methods by name and by version number; the first fusion in a recipe is the method's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oneflare.core.plugins import load_plugins
from oneflare.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Method:
    """A recipe: what it changes from the defaults, and where it comes from."""

    name: str
    summary: str
    version: str
    """the log's number, or where else it is from"""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""
    """where to read about it"""
    aliases: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """the log's numbers that find it"""
        return tuple(number for number in (self.version, *self.aliases) if number[:1] == "V")


LOG = "research log"
ALL_TERMS = {"cls": 1.0, "supcon": 1.0, "proto_feature": 1.0, "proto_separation": 1.0}
CLASSIFY = {"terms": {"cls": 1.0}}
FAFI = {"terms": ALL_TERMS}
PULLED = {**FAFI, "align_reduction": "per_prototype"}
"""FAFI's terms, and a lambda that means the same at every number of classes and features (docs/concepts/anchors.md)"""
REUSED = {
    "V5": "the log also calls the memory bank and the public feature bank V5: here V5-memory and V5-public",
    "V6": "the log also calls two-stage training V6: here V6-two-stage",
    "V5-memory": "the log calls it V5, like the public bank and like random anchors",
    "V5-public": "the log calls it V5, like the memory bank and like random anchors",
    "V6-two-stage": "the log calls it V6, like random anchors with annealing",
    "V12": "file 000 of the log designs a V12 that was never run as such: here `decoupled`",
    "V13": "the log's formula for V12 is headed v13",
    "V13.1": "the log uses this number for the floor as well as for the ceiling",
}
STATISTICS = {"name": "random_conv"}
GH_OFL = "Turazza, Picone and Mamei, ICLR 2026"
PUBLIC = {"public": 100}
"""images of the public split, unless data.public says otherwise"""
SERVERS = ["count_prototypes", "feature_mean", "iffi", "ensemble", "average"]


def _first(name: str) -> list[str]:
    """All servers of the bench, the method's own first: the same uploads feed them all."""
    return [name, *(other for other in SERVERS if other != name)]


def _aligned(
    controller: Mapping[str, Any],
    *,
    anchors: str = "etf",
    fusion: str = "feature_mean",
    objective: Mapping[str, Any] = PULLED,
) -> dict[str, Any]:
    """The recipe of FAFI with prototypes pulled toward anchors."""
    return {
        "objective": objective,
        "anchors": {"name": anchors},
        "controller": controller,
        "fusions": _first(fusion),
    }


def _published(
    name: str,
    summary: str,
    reference: str,
    *,
    features: Mapping[str, Any] = STATISTICS,
    fusion: Mapping[str, Any] | None = None,
) -> Method:
    """A method that only sums features of fixed maps; its fusion has its name unless another is given."""
    recipe = {"objective": {"terms": {}}, "analytic": features, "fusions": [fusion or {"name": name}]}
    return Method(name, f"no training: {summary}", "published", recipe, f"{reference}; docs/analytic.md")


BASELINES = (
    Method(
        "fedavg",
        "plain local training, weights averaged once: the lower bound",
        "baseline",
        {"objective": CLASSIFY, "fusions": _first("average")},
        "McMahan et al. 2017, one round",
    ),
    Method(
        "ensemble",
        "plain local training, probabilities averaged",
        "baseline",
        {"objective": CLASSIFY, "fusions": _first("ensemble")},
        "Guha et al. 2019",
    ),
    Method(
        "fafi",
        "FAFI: contrastive local objective with learnable prototypes, features fused",
        "V4",
        {"objective": FAFI, "fusions": _first("feature_mean")},
        LOG,
    ),
)

BY_HAND = (
    Method(
        "drcl",
        "FAFI with prototypes pulled toward random anchors, lambda fixed",
        "V5",
        _aligned({"name": "fixed", "lambda_0": 5.0}, anchors="random"),
        LOG,
    ),
    Method(
        "random_annealed",
        "FAFI pulled toward random anchors, lambda falling linearly from 5",
        "V6",
        _aligned({"name": "annealed", "lambda_0": 5.0, "schedule": "linear"}, anchors="random"),
        LOG,
    ),
    Method(
        "etf_annealed",
        "FAFI pulled toward a simplex ETF, lambda falling linearly from 20",
        "V7",
        _aligned({"name": "annealed", "lambda_0": 20.0, "schedule": "linear"}),
        LOG,
    ),
    Method(
        "progressive",
        "the target moves from the initial prototypes to the ETF while lambda falls",
        "V8",
        _aligned({"name": "annealed", "lambda_0": 20.0, "schedule": "linear"}, anchors="progressive"),
        LOG,
    ),
    Method(
        "entropy",
        "lambda from the entropy of each client's classes, falling linearly",
        "V9",
        _aligned({"name": "entropy"}),
        LOG,
    ),
    Method(
        "shrink",
        "etf_annealed without anchors: weight decay on the prototypes alone, as strong and as annealed",
        "ours",
        _aligned({"name": "annealed", "lambda_0": 20.0, "schedule": "linear"}, anchors="shrink"),
        "ablation: how much of alignment is only shorter prototypes",
    ),
    Method(
        "pcgrad",
        "etf_annealed, and where alignment opposes the local gradient the conflict is projected out",
        "plan C",
        _aligned({"name": "annealed", "lambda_0": 20.0, "schedule": "linear"}, objective={**PULLED, "pcgrad": True}),
        "Yu et al. 2020",
    ),
)

LEARNED = (
    Method(
        "uncertainty",
        "lambda from task uncertainty, weights and sigmas in one loss: slows its own learning",
        "V10",
        _aligned({"name": "uncertainty"}),
        LOG,
    ),
    Method(
        "uncertainty_rescaled",
        "lambda from task uncertainty, the learning rate left alone; settles, never anneals",
        "V10-Rescaled",
        _aligned({"name": "uncertainty_rescaled"}),
        LOG,
    ),
    Method(
        "uncertainty_coupled",
        "uncertainty_rescaled with annealing inside its loss: lambda climbs as fast as annealing falls",
        "V11",
        _aligned({"name": "uncertainty_coupled", "schedule": "linear"}),
        LOG,
        aliases=("V11-Linear",),
    ),
    Method(
        "uncertainty_coupled_cosine",
        "uncertainty_coupled with a cosine schedule",
        "V11-Cosine",
        _aligned({"name": "uncertainty_coupled", "schedule": "cosine"}),
        LOG,
    ),
    Method(
        "decoupled",
        "annealing acts on the weights only, and the sigmas see the losses as they are",
        "V12-designed",
        _aligned({"name": "decoupled"}),
        LOG,
    ),
    Method(
        "meta_annealed",
        "annealing acts on the weights and on the sigmas' data term; raw lambda can explode",
        "V12",
        _aligned({"name": "meta_annealed"}),
        LOG,
    ),
    Method(
        "floor",
        "meta_annealed with a floor under sigma_align",
        "V13",
        _aligned({"name": "meta_annealed", "floor": 1e-3}),
        LOG,
    ),
    Method(
        "ceiling",
        "floor, and a ceiling on sigma_local",
        "V13.1",
        _aligned({"name": "meta_annealed", "floor": 1e-3, "ceiling": 1e-2}),
        LOG,
    ),
    Method(
        "flare",
        "FLARE: lambda learned from task uncertainty, annealed, held by a valve; members speak of what they know",
        "V14",
        _aligned({"name": "meta_annealed", "floor": 1e-3, "lambda_max": 50.0}, fusion="density_ratio"),
        LOG,
    ),
    Method(
        "autonomous",
        "lambda anneals to zero of its own accord: the schedule on the sigmas' log term",
        "ours",
        _aligned({"name": "autonomous", "floor": 1e-3, "lambda_max": 50.0}, fusion="count_prototypes"),
        "docs/concepts/lambda.md",
    ),
    Method(
        "balanced",
        "the equilibrium of `autonomous` in closed form; nothing to optimise",
        "ours",
        _aligned({"name": "balanced"}, fusion="count_prototypes"),
        "docs/concepts/lambda.md",
    ),
)

ANALYTIC = (
    Method(
        "analytic",
        "no training: statistics of fixed random features added up and solved, the same for every split",
        "ours",
        {"objective": {"terms": {}}, "analytic": STATISTICS, "fusions": ["analytic"]},
        "docs/analytic.md",
    ),
    Method(
        "flare_analytic",
        "FLARE and statistics in one upload: the analytic posterior, corroborated by what each client knows",
        "ours",
        {
            "objective": PULLED,
            "anchors": {"name": "etf"},
            "controller": {"name": "meta_annealed", "floor": 1e-3, "lambda_max": 50.0},
            "analytic": STATISTICS,
            "train": {"snapshots": 0},
            "fusions": ["flare_analytic", "analytic", "density_ratio", *SERVERS],
        },
        "docs/analytic.md",
    ),
)

FAMILY = (
    _published("afl", "least squares on summed statistics", "He et al., CVPR 2025"),
    _published("fedcgs", "Gaussians that share the covariance of all images", "Guan, Zhou and Gu, AAAI 2025"),
    _published("gh_lda", "linear discriminant analysis with a shrunk covariance", GH_OFL),
    _published("gh_qda", "quadratic discriminant analysis with shrunk covariances of classes", GH_OFL),
    _published("fisher_mix", "a head trained on Gaussian samples in the Fisher subspace", GH_OFL),
    _published("fedncm", "the nearest class mean; the smallest upload", "Legate et al., NeurIPS 2023"),
    _published(
        "fed3r",
        "ridge regression on random Fourier features of the map below (Fed3R-RF)",
        "Fani et al., ICML 2024",
        features={"name": "random_features", "of": STATISTICS},
    ),
    _published("fedpft", "a head trained on samples of Gaussian mixtures", "Beitollahi et al. 2024"),
    _published(
        "safle",
        "ridge regression on one-hot groups of bucketed features of the map below",
        "Bacellar et al., CVPR 2026",
        features={"name": "buckets", "of": STATISTICS},
        fusion={"name": "afl", "ridge": 1000.0},
    ),
)

WITH_ADDITIONS = (
    Method(
        "memory_bank",
        "FAFI whose contrastive term also sees a queue of 4096 past features",
        "V5-memory",
        {"objective": {**FAFI, "bank": {"name": "memory", "size": 4096}}, "fusions": _first("feature_mean")},
        "research log; its runs, with and without the bank, have objective.supcon_temperature=0.5",
    ),
    Method(
        "public_bank",
        "FAFI that pushes features away from those a teacher gives to public images",
        "V5-public",
        {"data": PUBLIC, "objective": {**FAFI, "bank": {"name": "public"}}, "fusions": _first("feature_mean")},
        "research log; compare it with method=fafi at the same data.public",
    ),
    Method(
        "two_stage",
        "the public bank alone first, then FAFI without it",
        "V6-two-stage",
        {
            "data": PUBLIC,
            "objective": {**FAFI, "bank": {"name": "public"}, "alignment_epochs": 1},
            "fusions": _first("feature_mean"),
        },
        "research log, with 1 of 5 epochs; compare it with method=fafi at the same data.public",
    ),
    Method(
        "fedprox",
        "plain local training held near the shared start, weights averaged once",
        "baseline",
        {"objective": {**CLASSIFY, "proximal": 0.01}, "fusions": _first("average")},
        "Li et al. 2020, one round",
    ),
    Method(
        "fedetf",
        "plain local training toward a classifier that is a simplex ETF and stays one",
        "baseline",
        {
            "objective": {**CLASSIFY, "freeze_prototypes": True},
            "anchors": {"name": "etf", "scale": 10.0},
            "fusions": _first("average"),
        },
        "Li et al. 2023, one round, without its balanced loss; at length 10 cross-entropy can come near 0",
    ),
)

FEDSRA = {"terms": {"cls": 1.0, "supcon": 0.5, "proto_cosine": 0.5}, "supcon_temperature": 0.1}

OTHERS = (
    Method(
        "fedsra",
        "features anchored to a simplex ETF that nobody trains; the server standardises and sums them",
        "baseline",
        {
            "objective": {**FEDSRA, "freeze_prototypes": True},
            "anchors": {"name": "etf", "scale": 10.0},
            "upload": {"evidence": ["raw_moments"]},
            "fusions": ["standardised_raw", "standardised_batch", *SERVERS],
        },
        "FedSRA's released code: CE(z A^T/0.1) + 0.5 supcon + 0.5 (1 - cos). Different here: SGD instead of Adam, two "
        "views per image, and clients with one class train as the others do",
    ),
    Method(
        "fedov",
        "a class for images unlike the client's own, trained on destroyed images; the surest members vote",
        "baseline",
        {
            "objective": {"terms": {"open_set": 1.0}},
            "upload": {"evidence": ["unknown"]},
            "fusions": ["open_set_votes", *SERVERS],
        },
        "Diao, Li and He 2023, and its released code. Different here: SGD instead of Adam, features are mixed after "
        "the encoder, and erased parts are grey",
    ),
)

METHODS: dict[str, Method] = {
    method.name: method for method in (*BASELINES, *BY_HAND, *LEARNED, *ANALYTIC, *FAMILY, *WITH_ADDITIONS, *OTHERS)
}


def register(method: Method) -> Method:
    """Add a method of your own; see `oneflare.core.plugins`."""
    if method.name in METHODS:
        raise ValueError(f"method '{method.name}' is registered twice")
    METHODS[method.name] = method
    return method


def find_method(name: str) -> Method:
    """By name or by the log's version number."""
    load_plugins()
    numbers = {number.lower(): method for method in METHODS.values() for number in method.numbers}
    found = METHODS.get(name) or numbers.get(name.lower())
    if found is None:
        raise ConfigError(f"method: unknown method '{name}'{did_you_mean(name, METHODS)}")
    return found
