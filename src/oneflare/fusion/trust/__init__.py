"""Fusions for members that cannot all be trusted, and how the ones that do not fit are found."""

from oneflare.fusion.trust import robust, suspects  # noqa: F401  (registers)
