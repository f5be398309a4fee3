"""Fusions that ask every member only about images that it knows something of."""

from oneflare.fusion.density import gates, ratio  # noqa: F401  (registers)
