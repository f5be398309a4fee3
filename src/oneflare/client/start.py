"""From the terms of a federation to its contract, and from the contract to the network that everybody begins with.

Simulations, charters and Flower all come here, so a client trains and sends the same wherever it runs.
"""

from __future__ import annotations

import math
from dataclasses import replace

from oneflare.core.config import Experiment
from oneflare.core.privacy import Privacy
from oneflare.data import ImageSpec
from oneflare.errors import ConfigError
from oneflare.nn import (
    PrototypeNetwork,
    build_anchors,
    encoder_spec,
    feature_map_spec,
    freeze_prototypes,
    initial_network,
)
from oneflare.nn.sized_maps import fitted
from oneflare.upload import Agreement, Contract
from oneflare.upload.contract import statistics_bytes, statistics_room
from oneflare.upload.masking.fixed_point import FixedPoint
from oneflare.upload.statistics import COMPONENTS, DEFAULT_PARTS, Plan, limits_of

LIMIT_OF_BUDGET = 100_000_000
"""bytes of an upload where a time is given and no size: small images take so little time that the largest map, which a
minute allows for them, would need hundreds of megabytes from every member"""


def make_contract(
    terms: Experiment, image: ImageSpec, classes: tuple[str, ...], *, mirror: bool, federation: str
) -> Contract:
    """What every upload under these terms must look like.

    mirror: whether a mirrored image keeps its label
    federation: the digest that uploads carry, so that one made under other terms is refused
    """
    spec = encoder_spec(terms.encoder, len(classes))
    network = initial_network(spec, image, len(classes), terms.seed, weights=_backbone_file(terms))
    plan = statistics_plan(terms, image, len(classes), mirror=mirror)
    return Contract.of(
        network,
        Agreement(
            federation=federation,
            method=terms.method,
            encoder=spec,
            anchors=terms.anchors,
            image=image,
            classes=classes,
            statistics=plan,
            deep=terms.trains,
            evidence=terms.upload.evidence,
            fixed=fixed_point(terms, plan, image),
        ),
    )


def shared_start(experiment: Experiment, contract: Contract) -> PrototypeNetwork:
    """The network that every client of a federation begins with."""
    image, classes, file = contract.image, len(contract.classes), _backbone_file(experiment)
    network = initial_network(contract.encoder, image, classes, experiment.seed, contract.dim, file)
    if experiment.objective.freeze_prototypes:
        anchors = build_anchors(contract.anchors, classes, contract.dim)
        assert anchors is not None
        freeze_prototypes(network, anchors)
    return network


def _backbone_file(experiment: Experiment) -> str | None:
    """The file of the backbone's weights that this experiment names, where it names one."""
    return None if experiment.backbone is None else experiment.backbone.get("weights")


def statistics_plan(experiment: Experiment, image: ImageSpec, classes: int, *, mirror: bool) -> Plan | None:
    """What the statistics of this federation are; mirror: whether a mirrored image keeps its label."""
    if experiment.analytic["name"] == "none":
        return None
    flip = mirror if experiment.augment.flip is None else experiment.augment.flip
    spec = feature_map_spec(experiment.analytic, flip)
    upload = experiment.upload
    privacy = None
    if upload.statistics_epsilon is not None:
        privacy = Privacy(upload.statistics_epsilon, upload.statistics_delta, upload.statistics_clip)
    parts = DEFAULT_PARTS if upload.statistics is None else upload.statistics
    components = COMPONENTS if upload.statistics_components is None else upload.statistics_components
    limit = LIMIT_OF_BUDGET if upload.limit is None and spec.get("budget") is not None else upload.limit
    if limit is not None:
        room, dtype, blocks = statistics_room(limit, classes), upload.statistics_dtype, spec.get("blocks")
        spec = fitted(
            spec, image.channels, image.size, lambda dim: statistics_bytes(dim, classes, dtype, blocks) <= room
        )
    plan = Plan.of(spec, image.channels, image.size, upload.statistics_dtype, privacy, parts, components)
    return replace(plan, factors=bool(upload.factors))


def fixed_point(experiment: Experiment, plan: Plan | None, image: ImageSpec) -> FixedPoint | None:
    """How sums are rounded where only their total may be read; None where they are not.

    The default for the largest feature is a power of two, on which machines that round differently agree.
    """
    masked = experiment.upload.masked
    if masked is None:
        return None
    if plan is None or masked.clip is not None:
        return FixedPoint(masked.bits, masked.clip or 1.0)
    largest = limits_of(plan, image.channels, image.size).size
    if not math.isfinite(largest):
        raise ConfigError("upload.masked.clip: the feature map does not say how large a feature is; set the largest")
    return FixedPoint(masked.bits, 2.0 ** math.ceil(math.log2(max(largest, 1.0))))
