"""Fusions of summed statistics, solved in closed form."""

from oneflare.fusion.analytic import sums  # noqa: F401  (registers)
