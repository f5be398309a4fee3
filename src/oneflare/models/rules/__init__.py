"""How the features of all members become one answer: one file for each family of rules."""

from oneflare.models.rules import density, moments, redistribution, sums, votes  # noqa: F401  (registers)
