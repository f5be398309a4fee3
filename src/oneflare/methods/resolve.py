"""Makes a complete experiment of what a user wrote, and checks every name and option before any work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from oneflare.core.config import CodeConfig, Experiment, TrainConfig, UploadConfig, named_or_none
from oneflare.core.layers import Layer, expand, merge, validate
from oneflare.core.plugins import load_plugins
from oneflare.core.registry import Registry, sources_used
from oneflare.core.schedules import SCHEDULES, build_schedule
from oneflare.data import PARTITIONS, SOURCES
from oneflare.data.sources import check_reading
from oneflare.errors import ConfigError, did_you_mean
from oneflare.fusion import FUSIONS, build_fusion, check_needs, offered_fields
from oneflare.methods.additions import check_additions, complete_objective
from oneflare.methods.recipes import find_method
from oneflare.nn import ANCHORS, BACKBONES, ENCODERS, FEATURE_MAPS
from oneflare.nn.backbones import never_negative, pinned
from oneflare.nn.encoders import BUILT_IN, ON_FEATURES, complete_encoder
from oneflare.nn.filter_banks import FILTER_OUTPUTS
from oneflare.nn.given import CUSTOM
from oneflare.nn.optimisers import DEFAULT, OPTIMISERS, StepSettings
from oneflare.nn.paired_maps import MOST_BLOCKS
from oneflare.nn.sized_maps import SIZED_MAPS
from oneflare.objective import BANKS, CONTROLLERS, TERMS, ClientFacts, build_controller
from oneflare.upload.coding import CODED, PRODUCT_BITS, WHOLE
from oneflare.upload.evidence import EVIDENCE, LABELLED
from oneflare.upload.statistics import CLASS_COVARIANCES, DEFAULT_PARTS, G_B_N, MIXTURES, PARTS, parts_for
from oneflare.upload.statistics import FIELDS as STATISTICS_FIELDS

ARRAYS = "arrays"
SIZED_MAP = "paired"
"""the map that is taken where upload.limit or analytic.budget decides its size and none is named"""
PRODUCTS_OF_ONE_BLOCK = 1e6
"""where a limit allows N products, features are in sqrt(N / this) blocks (docs/analytic.md)"""
BLOCKS_OF_BOTH = 6
"""from which on one half of them has small patches and the other half large ones, unless patches are given"""
SOLVING_CODED = ("analytic", "flare_analytic")
"""the fusions that solve coded sums"""
NAMED_DEFAULTS = {
    **{part: Experiment.model_fields[part].default for part in ("encoder", "anchors", "controller", "analytic")},
    "train": {"schedule": TrainConfig.model_fields["schedule"].default},
}
"""so that an option can be set without naming the part it belongs to"""
TRAINING_PARTS: tuple[Registry[Any], ...] = (
    SOURCES, PARTITIONS, BACKBONES, ENCODERS, ANCHORS, CONTROLLERS, FEATURE_MAPS, TERMS, SCHEDULES, BANKS, OPTIMISERS,
)  # fmt: skip
"""whatever uploads depend on"""


def given_in_python(experiment: Experiment) -> bool:
    """Whether its images or its encoder were objects of a Python session, which nobody can make again from names."""
    own = experiment.backbone is not None and experiment.backbone["name"] == CUSTOM
    return experiment.data.name == ARRAYS or experiment.encoder["name"] == CUSTOM or own


def resolve(*layers: Layer) -> Experiment:
    """Defaults, then the method's recipe, then the layers, later ones winning."""
    load_plugins()
    wanted = merge(*layers)
    name = wanted.get("method", Experiment.model_fields["method"].default)
    if not isinstance(name, str):
        raise ConfigError(f"method: must be a name (got {name!r})")
    method = find_method(name)
    recipe = expand(method.recipe)
    content = merge(
        NAMED_DEFAULTS, recipe, _on_features(wanted, recipe), _sized(wanted, recipe), wanted, {"method": method.name}
    )
    content.pop("code", None)  # of whoever wrote the file
    return complete(validate(content))


def recorded(content: Layer) -> Experiment:
    """The experiment of a run's file, which was complete for the version that wrote it.

    An option that the file does not know is absent, whatever its method's recipe says today.
    """
    load_plugins()
    find_method(str(content.get("method", Experiment.model_fields["method"].default)))
    known = {key: value for key, value in content.items() if key != "code"}
    return complete(validate(merge(NAMED_DEFAULTS, known)))


def _on_features(wanted: Layer, recipe: Layer) -> Layer:
    """What changes by default where a backbone is named: networks and statistics are fed its features."""
    backbone = named_or_none(wanted.get("backbone"))
    if backbone is None:
        return {}
    layer: dict[str, Any] = {"encoder": {"name": "mlp"}, "augment": {"kind": "none"}}
    statistics = recipe.get("analytic", {"name": "none"})
    if "of" in statistics:
        layer["analytic"] = {**statistics, "of": {"name": "identity"}}
    elif statistics != {"name": "none"}:
        own = "analytic" in recipe["fusions"]  # published methods get features as they are
        layer["analytic"] = {"name": "root" if own and never_negative(backbone) else "identity"}
    return layer


def _check_backbone(experiment: Experiment) -> None:
    """Parts that are fed features need a backbone, and parts that are fed pixels have no use for one."""
    encoder, analytic = experiment.encoder["name"], experiment.analytic["name"]
    if experiment.backbone is None:
        if encoder in ON_FEATURES and experiment.trains:
            raise ConfigError(f"encoder={encoder} takes the features of a backbone; set backbone=efficientnet_lite0")
        if analytic in ("identity", "root"):
            raise ConfigError(f"analytic={analytic} takes the features of a backbone; set backbone=efficientnet_lite0")
        return
    if encoder in BUILT_IN and encoder not in ON_FEATURES and experiment.trains:
        raise ConfigError(f"encoder={encoder} takes images, but a backbone gives features; set encoder=mlp")
    if analytic == "random_conv":
        raise ConfigError("analytic=random_conv takes images, but a backbone gives features; set analytic=identity")
    if experiment.augment.kind not in ("none", "auto"):
        raise ConfigError(f"augment.kind={experiment.augment.kind} changes images, but a backbone gives features")
    if experiment.backbone.get("tune") is None:
        return
    if not experiment.trains:
        raise ConfigError(f"backbone.tune: method {experiment.method} trains no network; leave it out")
    if analytic != "none":
        raise ConfigError("backbone.tune: statistics are sums over features of a frozen backbone; set analytic=none")


def complete(experiment: Experiment) -> Experiment:
    """Check every named part and write out its options."""
    if experiment.data.name != ARRAYS:
        SOURCES[experiment.data.name]
    check_reading(experiment.data)
    if not experiment.partition.kind.startswith("flwr:") and experiment.partition.kind != "given":
        PARTITIONS[experiment.partition.kind]
    for term in experiment.objective.terms:
        TERMS[term]
    if not experiment.trains and experiment.analytic["name"] == "none":
        raise ConfigError("objective.terms: give at least one term a weight other than 0")
    update: dict[str, Any] = {
        "backbone": None if experiment.backbone is None else pinned(experiment.backbone),
        "encoder": complete_encoder(experiment.encoder),
        "anchors": ANCHORS.complete(experiment.anchors, "anchors"),
        "controller": CONTROLLERS.complete(experiment.controller, "controller"),
        "analytic": FEATURE_MAPS.complete(experiment.analytic, "analytic"),
        "objective": complete_objective(experiment.objective),
        "fusions": tuple(FUSIONS.complete(spec, f"fusion {spec['name']}") for spec in experiment.fusions),
        "train": complete_train(experiment.train),
    }
    resolved = with_statistics(with_density(experiment.model_copy(update=update)))
    build_controller(resolved.controller, ClientFacts((1, 1)))  # refuses options that contradict each other
    if resolved.controller["name"] != "none" and resolved.anchors["name"] == "none":
        raise ConfigError(
            f"controller={resolved.controller['name']} pulls prototypes toward anchors, but anchors=none; "
            "set anchors=etf or anchors=random"
        )
    if resolved.train.momentum_reset and not getattr(build_schedule(resolved.train.schedule), "restarts", ()):
        raise ConfigError("train.momentum_reset needs a schedule with restarts; set train.schedule=cosine_restarts")
    _check_backbone(resolved)
    _check_statistics(resolved)
    _check_evidence(resolved)
    check_additions(resolved)
    offered = offered_fields(
        resolved.upload,
        deep=resolved.trains,
        statistics=resolved.analytic["name"] != "none",
        holdout=resolved.train.holdout,
        public=resolved.data.public,
    )
    remedy = "; change fusions, or what uploads hold (upload, analytic, train.holdout)"
    check_needs(resolved.fusions, offered, remedy, before_training=True)
    names = [spec["name"] for spec in resolved.fusions]
    if len(set(names)) != len(names):
        raise ConfigError(f"fusions: {max(names, key=names.count)} is named twice")
    used = sources_used(TRAINING_PARTS, resolved.model_dump(mode="json", exclude={"fusions", "code"}))
    return resolved.model_copy(update={"code": CodeConfig(plugins=used)})


def complete_train(train: TrainConfig) -> TrainConfig:
    """With the options of its schedule and its optimiser written out; plain sgd is what None stands for."""
    optimiser = None if train.optimiser is None else OPTIMISERS.complete(train.optimiser, "train.optimiser")
    if optimiser == {"name": DEFAULT}:
        optimiser = None
    if optimiser is not None:
        for key, value in (("thermostat", train.thermostat), ("check_lr", train.check_lr)):
            if value:
                raise ConfigError(f"train.{key} is about sgd, not {optimiser['name']}; leave one of the two out")
        try:
            OPTIMISERS.build(optimiser, [], StepSettings())
        except ValueError as error:
            raise ConfigError(f"train.optimiser: {error}") from None
    schedule = SCHEDULES.complete(train.schedule, "train.schedule")
    return train.model_copy(update={"schedule": schedule, "optimiser": optimiser})


def with_density(experiment: Experiment) -> Experiment:
    """With `density` among what clients measure where a named fusion needs it.

    An `upload.evidence` that is given and empty stays empty: then the fusion is refused.
    """
    upload = experiment.upload
    wanted = [spec["name"] for spec in experiment.fusions if "density" in build_fusion(spec).needs]
    withheld = "evidence" in upload.model_fields_set and not upload.evidence
    if not wanted or not experiment.trains or withheld:
        return experiment
    if upload.counts != "exact" and upload.masked is not None:
        raise ConfigError(
            f"upload.masked: beside masked sums, fusion {wanted[0]} needs every member's class counts and averages as "
            "they are; set upload.counts=exact to send these plain, or choose another fusion"
        )
    if upload.counts != "exact":
        other = "count_prototypes" if upload.counts == "noised" else "feature_mean"
        raise ConfigError(
            f"upload.counts={upload.counts}: fusion {wanted[0]} needs exact averages over a client's images, which "
            f"give the class counts away; choose another fusion, for example fusions={other}"
        )
    measured = UploadConfig.model_validate(upload.model_dump() | {"evidence": (*upload.evidence, "density")})
    return experiment.model_copy(update={"upload": measured})


def with_statistics(experiment: Experiment) -> Experiment:
    """With what the named fusions need among the statistics, and no more, unless `upload.statistics` says it."""
    upload = experiment.upload
    if upload.statistics is not None or upload.masked is not None or experiment.analytic["name"] == "none":
        return experiment
    needs = {need for spec in experiment.fusions for need in build_fusion(spec).needs & STATISTICS_FIELDS}
    parts = parts_for(needs)
    if not needs or parts == DEFAULT_PARTS:
        return experiment
    chosen = UploadConfig.model_validate(upload.model_dump(exclude_unset=True) | {"statistics": parts})
    return experiment.model_copy(update={"upload": chosen})


def _check_evidence(experiment: Experiment) -> None:
    upload = experiment.upload
    for name in upload.evidence:
        if name not in EVIDENCE:
            raise ConfigError(f"upload.evidence: unknown evidence '{name}'{did_you_mean(name, EVIDENCE)}")
    if upload.evidence and not experiment.trains:
        raise ConfigError("upload.evidence: there is no network to measure; leave it out, or train one")
    if upload.evidence and upload.counts == "noised":
        raise ConfigError(
            "upload.counts=noised: exact averages over a client's images give their number away; set "
            "upload.counts=exact or leave upload.evidence out"
        )
    for name in LABELLED if upload.counts == "withheld" else ():
        if name in upload.evidence:
            raise ConfigError(
                f"upload.counts=withheld: {name} reveals which classes a client has; set upload.counts=exact "
                f"or leave {name} out of upload.evidence"
            )
    if experiment.train.holdout > 0 and upload.counts != "exact":
        raise ConfigError(
            f"upload.counts={upload.counts}: the trust that train.holdout measures follows from the exact class "
            "counts; set upload.counts=exact or train.holdout=0"
        )


def _sized(wanted: Layer, recipe: Layer) -> Layer:
    """Where a size or a time is given and no map, the map is one whose size can follow from it."""
    upload, statistics = wanted.get("upload"), wanted.get("analytic")
    limited = isinstance(upload, Mapping) and upload.get("limit") is not None
    timed = isinstance(statistics, Mapping) and statistics.get("budget") is not None
    named = isinstance(statistics, str) or (isinstance(statistics, Mapping) and "name" in statistics)
    if named or not (limited or timed) or recipe.get("analytic") != {"name": "random_conv"}:
        return {}
    blocks = _blocks_for_limit(wanted, recipe) if limited and not timed else 1
    if blocks == 1:
        return {"analytic": {"name": SIZED_MAP}}
    both = {"patches": "both"} if blocks >= BLOCKS_OF_BOTH else {}
    return {"analytic": {"name": SIZED_MAP, "blocks": blocks, "kept": FILTER_OUTPUTS, **both}}


def _blocks_for_limit(wanted: Layer, recipe: Layer) -> int:
    """In how many blocks features are by default where a limit decides their number; one where blocks are refused."""
    upload, statistics = wanted["upload"], wanted.get("analytic")
    refused = [upload.get(name) for name in ("masked", "statistics", "statistics_epsilon")]
    decided = isinstance(statistics, Mapping) and {"blocks", "features"} & set(statistics)
    fusions = wanted.get("fusions", recipe.get("fusions"))
    several = fusions if isinstance(fusions, list | tuple) else [fusions]
    alone = all((own.get("name") if isinstance(own, Mapping) else own) == "analytic" for own in several)
    if decided or not alone or any(value is not None for value in refused):
        return 1
    try:
        limit = UploadConfig.model_validate({"limit": upload["limit"]}).limit
    except ValidationError:  # is said, with its place, when everything is validated
        return 1
    bits = PRODUCT_BITS.get(str(upload.get("statistics_dtype", "float32")), PRODUCT_BITS["float32"])
    return min(MOST_BLOCKS, max(1, round(math.sqrt(8 * (limit or 0) / bits / PRODUCTS_OF_ONE_BLOCK))))


def _check_limit(experiment: Experiment) -> None:
    """A limit on uploads decides the size of the map, so it is refused where something else decides it."""
    upload = experiment.upload
    if upload.limit is None:
        return
    if experiment.analytic["name"] not in SIZED_MAPS:
        raise ConfigError(
            f"upload.limit: analytic={experiment.analytic['name']} has a fixed size; set analytic={SIZED_MAP}"
        )
    if experiment.trains or upload.masked is not None or upload.statistics not in (None, DEFAULT_PARTS):
        raise ConfigError(
            "upload.limit: counts sums of products alone, not networks, masked sums or covariances of classes; "
            "leave it out, or use method=analytic"
        )


def _check_coded(experiment: Experiment) -> None:
    """Coded sums are solved in the features in which they were rounded, and sums of blocks for each block.

    The published rules do neither.
    """
    dtype, blocks = experiment.upload.statistics_dtype, experiment.analytic.get("blocks")
    others = [spec["name"] for spec in experiment.fusions if spec["name"] not in SOLVING_CODED]
    rules = [name for name in others if G_B_N in build_fusion({"name": name}).needs]
    if blocks is not None and blocks > 1 and rules:
        raise ConfigError(f"analytic.blocks: fusion {rules[0]} needs products of all features; set fusions=analytic")
    if blocks is not None and blocks > 1 and experiment.upload.masked is not None:
        raise ConfigError("analytic.blocks: masked sums hold the products of all features; leave it out")
    if blocks is not None and blocks > 1 and experiment.upload.statistics_epsilon is not None:
        raise ConfigError("analytic.blocks: noised sums hold the products of all features; leave it out")
    if dtype in CODED and rules:
        raise ConfigError(
            f"upload.statistics_dtype={dtype}: fusion {rules[0]} takes no account of how sums were rounded; send "
            "them in float32 or int16, or set fusions=analytic"
        )


def _check_statistics(experiment: Experiment) -> None:
    """Statistics contain the class counts, and their privacy is worth nothing beside what is not private."""
    _check_limit(experiment)
    upload = experiment.upload
    for name in upload.statistics or ():
        if name not in PARTS:
            raise ConfigError(f"upload.statistics: unknown statistics '{name}'{did_you_mean(name, PARTS)}")
    if experiment.analytic["name"] == "none":
        return
    _check_coded(experiment)
    if upload.statistics_dtype not in ("float32", "int16") and CLASS_COVARIANCES in (upload.statistics or ()):
        raise ConfigError(
            f"upload.statistics_dtype={upload.statistics_dtype}: covariances of classes are sent in float32 or int16"
        )
    if upload.factors and (
        upload.statistics_dtype in ("int16", "int12", WHOLE)
        or upload.masked is not None
        or upload.statistics_epsilon is not None
        or upload.statistics not in (None, DEFAULT_PARTS)
    ):
        raise ConfigError(
            "upload.factors: is for sums of products in float32, fine or coarse, without masks, noise or covariances "
            "of classes; leave it out"
        )
    if upload.masked is not None and upload.statistics not in (None, DEFAULT_PARTS):
        raise ConfigError("upload.masked: masked sums are G, b and n; leave upload.statistics out, or set covariance")
    if upload.statistics_epsilon is None:
        if upload.counts != "exact" and upload.masked is None:
            raise ConfigError(
                f"upload.counts={upload.counts}: exact statistics reveal the class counts; set "
                "upload.statistics_epsilon or analytic=none"
            )
    elif experiment.trains:
        raise ConfigError(
            "upload.statistics_epsilon: the trained network in the same upload is not private; use method=analytic"
        )
    elif upload.counts != "withheld":
        raise ConfigError("upload.statistics_epsilon: counts are part of the statistics; set upload.counts=withheld")
    elif {CLASS_COVARIANCES, MIXTURES} & set(upload.statistics or ()):
        raise ConfigError(
            "upload.statistics_epsilon: class_covariances and mixtures cannot be noised; choose fusions that need "
            "neither, for example fusions=analytic"
        )
    elif upload.statistics_dtype != "float32":
        raise ConfigError("upload.statistics_epsilon: noised statistics are sent in float32; leave statistics_dtype")
