"""Measures: how well a model classifies, how far clients disagree, how collapsed their features are."""

from oneflare.metrics.classification import Bin, Scores, score
from oneflare.metrics.diagnostics import Diagnostics, diagnose
from oneflare.metrics.evaluating import Evaluation, TimedFusion, evaluate, fuse_timed, score_all
from oneflare.metrics.figures import AgainstAlone, ClassFigures, ModelFigures, RuleFigures, compared, figures_of
from oneflare.metrics.intervals import Measured
from oneflare.metrics.retention import Retention, retention

__all__ = [
    "AgainstAlone",
    "Bin",
    "ClassFigures",
    "Diagnostics",
    "Evaluation",
    "Measured",
    "ModelFigures",
    "Retention",
    "RuleFigures",
    "Scores",
    "TimedFusion",
    "compared",
    "diagnose",
    "evaluate",
    "figures_of",
    "fuse_timed",
    "retention",
    "score",
    "score_all",
]
