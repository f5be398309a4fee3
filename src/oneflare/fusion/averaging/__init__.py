"""Fusions that make one network of many sets of weights."""

from oneflare.fusion.averaging import average, fisher, laplace, matching, regmean, task_vectors  # noqa: F401  (registers)
