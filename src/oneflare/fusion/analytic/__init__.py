"""Fusions of summed statistics and of mixtures, solved in closed form or by a head that is trained on samples."""

from oneflare.fusion.analytic import gaussian, mixtures, published_linear, sums  # noqa: F401  (registers)
