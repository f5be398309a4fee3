"""Measures: how well a model classifies, how far clients disagree, how collapsed their features are."""

from oneflare.metrics.classification import Scores, score
from oneflare.metrics.diagnostics import Diagnostics, diagnose
from oneflare.metrics.retention import Retention, retention

__all__ = ["Diagnostics", "Retention", "Scores", "diagnose", "retention", "score"]
