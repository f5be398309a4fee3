"""What a feature map gives for any image whatever, by which uploads are checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.nn import FeatureMap, feature_range


@dataclass(frozen=True)
class FeatureLimits:
    """What a feature map gives for any image whatever."""

    low: Tensor
    """`(D,)` float64: the least value of each feature"""
    high: Tensor
    """`(D,)` float64: the largest"""

    @classmethod
    def of(cls, features: FeatureMap) -> FeatureLimits:
        return cls(*feature_range(features))

    @property
    def size(self) -> float:
        """The largest absolute value of any feature."""
        return float(torch.maximum(self.low.abs(), self.high.abs()).max())

    def rounded(self, clip: float, step: float) -> FeatureLimits:
        """The limits of features that are cut at `clip` and rounded to multiples of `step`."""
        return FeatureLimits(self.low.clamp(-clip, clip) - step, self.high.clamp(-clip, clip) + step)
