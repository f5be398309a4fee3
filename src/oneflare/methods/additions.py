"""Additions to the loss terms (banks, the proximal term, frozen prototypes): their checks and descriptions."""

from __future__ import annotations

import inspect

from oneflare.core.config import Experiment, ObjectiveConfig
from oneflare.errors import ConfigError
from oneflare.objective import BANKS, Proximal

FIXED = ("etf", "random", "packing")
"""anchors that a classifier can be frozen to: directions that do not move"""


def complete_objective(objective: ObjectiveConfig) -> ObjectiveConfig:
    """With every option of the bank checked and written out."""
    if objective.bank is None:
        return objective
    return objective.model_copy(update={"bank": BANKS.complete(objective.bank, "objective.bank")})


def check_additions(experiment: Experiment) -> None:
    objective = experiment.objective
    if "unknown" in experiment.upload.evidence and not objective.open_set:
        raise ConfigError(
            "upload.evidence=unknown: no class unknown is trained; give objective.terms.open_set a weight, or leave it "
            "out"
        )
    if objective.open_set and objective.public_bank:
        raise ConfigError(
            "objective.terms.open_set does not go with objective.bank=public, whose teacher has no class unknown; "
            "leave one of the two out"
        )
    if objective.open_set and experiment.train.check_lr:
        raise ConfigError(
            "train.check_lr: the largest stable rate is not estimated with objective.terms.open_set; leave it out"
        )
    if objective.has_additions and not experiment.trains:
        raise ConfigError("objective: bank, proximal and frozen prototypes belong to a network; give a term a weight")
    if objective.bank is not None and objective.bank["name"] == "memory" and not objective.terms.get("supcon"):
        raise ConfigError("objective.bank=memory gives supcon more pairs; give objective.terms.supcon a weight")
    if objective.public_bank and experiment.data.public is None:
        raise ConfigError("objective.bank=public needs images that nobody owns; set data.public=NUMBER")
    if objective.alignment_epochs is not None:
        if not objective.public_bank:
            raise ConfigError("objective.alignment_epochs contrasts with the public bank; set objective.bank=public")
        if objective.alignment_epochs > experiment.train.epochs:
            raise ConfigError(
                f"objective.alignment_epochs={objective.alignment_epochs} is more than the {experiment.train.epochs} "
                "epochs there are; lower it or raise train.epochs"
            )
    if objective.freeze_prototypes:
        if experiment.anchors["name"] not in FIXED:
            raise ConfigError(
                f"objective.freeze_prototypes needs directions to stay at, not anchors={experiment.anchors['name']}; "
                f"set anchors={FIXED[0]}"
            )
        if experiment.controller["name"] != "none":
            raise ConfigError(
                f"objective.freeze_prototypes leaves controller={experiment.controller['name']} nothing to pull; "
                "set controller=none"
            )


def describe_additions(objective: ObjectiveConfig) -> dict[str, str]:
    """Name and equation of everything a client holds beside its terms."""
    found: dict[str, str] = {}
    if objective.bank is not None:
        found[f"bank {objective.bank['name']}"] = BANKS[objective.bank["name"]].document
    if objective.alignment_epochs is not None:
        found["two stages"] = (
            f"the first {objective.alignment_epochs} epoch(s) minimise L_bank alone, without anchors; the others the "
            "local loss, without the bank"
        )
    if objective.proximal is not None:
        found[f"proximal {objective.proximal:g}"] = inspect.getdoc(Proximal) or ""
    if objective.align_classes == "seen":
        found["pull of seen classes"] = "L_align is the mean over the classes of the current batch, not over all"
    if objective.align_reduction == "per_prototype":
        found["pull per prototype"] = (
            "lambda is multiplied by C d/5120: the pull on one prototype is 2 lambda (P_c - A_c)/5120 for any number "
            "of classes C and features d"
        )
    if objective.freeze_prototypes:
        found["frozen prototypes"] = "P = A from the start to the end: nobody trains the classifier"
    return found
