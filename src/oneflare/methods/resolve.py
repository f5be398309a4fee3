"""From what a user wrote to a complete experiment, every name and option checked before any work."""

from __future__ import annotations

from typing import Any

from oneflare.config import Experiment, Layer, TrainConfig, expand, merge, validate
from oneflare.data import PARTITIONS, SOURCES
from oneflare.errors import ConfigError
from oneflare.fusion import FUSIONS, check_needs, offered_fields
from oneflare.methods.recipes import find_method
from oneflare.nn import ANCHORS, ENCODERS
from oneflare.nn.encoders import CUSTOM
from oneflare.objective import CONTROLLERS, TERMS, ClientFacts, build_controller
from oneflare.schedules import SCHEDULES, build_schedule

ARRAYS = "arrays"
NAMED_DEFAULTS = {
    **{part: Experiment.model_fields[part].default for part in ("encoder", "anchors", "controller")},
    "train": {"schedule": TrainConfig.model_fields["schedule"].default},
}
"""so that an option can be set without naming the part it belongs to"""


def resolve(*layers: Layer) -> Experiment:
    """Defaults, then the method's recipe, then the layers, later ones winning."""
    wanted = merge(*layers)
    name = wanted.get("method", Experiment.model_fields["method"].default)
    if not isinstance(name, str):
        raise ConfigError(f"method: must be a name (got {name!r})")
    method = find_method(name)
    content = merge(NAMED_DEFAULTS, expand(method.recipe), wanted, {"method": method.name})
    return complete(validate(content))


def complete(experiment: Experiment) -> Experiment:
    """Check every named part and write out its options."""
    if experiment.data.name != ARRAYS:
        SOURCES[experiment.data.name]
    if not experiment.partition.kind.startswith("flwr:") and experiment.partition.kind != "given":
        PARTITIONS[experiment.partition.kind]
    for term in experiment.objective.terms:
        TERMS[term]
    if not any(weight for weight in experiment.objective.terms.values()):
        raise ConfigError("objective.terms: give at least one term a weight other than 0")
    encoder = experiment.encoder
    if encoder["name"] != CUSTOM:
        encoder = ENCODERS.complete(encoder, "encoder")
    update: dict[str, Any] = {
        "encoder": encoder,
        "anchors": ANCHORS.complete(experiment.anchors, "anchors"),
        "controller": CONTROLLERS.complete(experiment.controller, "controller"),
        "fusions": tuple(FUSIONS.complete(spec, f"fusion {spec['name']}") for spec in experiment.fusions),
        "train": experiment.train.model_copy(
            update={"schedule": SCHEDULES.complete(experiment.train.schedule, "train.schedule")}
        ),
    }
    resolved = experiment.model_copy(update=update)
    build_controller(resolved.controller, ClientFacts((1, 1)))  # refuses options that contradict each other
    if resolved.controller["name"] != "none" and resolved.anchors["name"] == "none":
        raise ConfigError(
            f"controller={resolved.controller['name']} pulls prototypes toward anchors, but anchors=none; "
            "set anchors=etf or anchors=random"
        )
    if resolved.train.momentum_reset and not getattr(build_schedule(resolved.train.schedule), "restarts", ()):
        raise ConfigError("train.momentum_reset needs a schedule with restarts; set train.schedule=cosine_restarts")
    check_needs(resolved.fusions, offered_fields(resolved.upload), "; change upload.counts or fusions")
    names = [spec["name"] for spec in resolved.fusions]
    if len(set(names)) != len(names):
        raise ConfigError(f"fusions: {max(names, key=names.count)} is named twice")
    return resolved
