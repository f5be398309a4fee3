"""The rules by which the features of all members become one prediction, one file for each family."""

from oneflare.models.rules import density, gates, moments, redistribution, sums, votes  # noqa: F401  (registers)
