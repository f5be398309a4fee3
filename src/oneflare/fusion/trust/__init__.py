"""Fusions for members that cannot all be trusted, and the search for uploads that do not fit."""

from oneflare.fusion.trust import robust, suspects  # noqa: F401  (registers)
