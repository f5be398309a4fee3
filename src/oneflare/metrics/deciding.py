"""What a model's decision rule makes of test images: thresholds of classes, and "none of the known classes"."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from oneflare.metrics.figures import ModelFigures, RuleFigures, RuleRates, Truth


def with_rule(
    figures: ModelFigures,
    decided: Tensor,
    labels: Tensor,
    patients: Tensor | None = None,
    *,
    rule: str,
    smallest_group: int = 1,
) -> ModelFigures:
    """The figures of the most likely classes, and with them those of the answers `decided` `(n,)` of a rule.

    decided: the number of a class, or a negative number for none of the known classes. rule: digest of the rule.

    Nothing is told of a class that `figures` withholds. Like a specificity, the share of undecided images is one over
    all images of the test; the accuracy is one over the decided images, and is told if these are no small group.
    """
    test, answered = Truth.of(labels, patients), decided.numpy()
    everything = np.ones(len(answered), dtype=bool)
    some, number = answered >= 0, test.number(answered >= 0)
    classes = []
    for label, one in enumerate(figures.classes):
        own, hit = test.labels == label, answered == label
        sensitivity = test.share(hit, own) if not one.withheld and own.any() else None
        specificity = test.share(~hit, ~own) if not one.withheld and not own.all() else None
        classes.append(RuleRates(sensitivity, specificity))
    told = RuleFigures(
        rule=rule,
        images=len(answered),
        decided=int(some.sum()),
        decided_patients=None if patients is None else number,
        undecided=test.share(~some, everything),
        accuracy=test.share(answered == test.labels, some) if number >= max(smallest_group, 1) else None,
        classes=tuple(classes),
    )
    return replace(figures, by_rule=told)
