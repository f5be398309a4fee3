"""Fusions that ask every member's encoder and combine the features or the votes."""

from oneflare.fusion.features import moments, sums, trainable, votes  # noqa: F401  (registers)
