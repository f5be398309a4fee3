"""Several runs and the statistics over them."""

from oneflare.study.compare import Comparison, compare_methods

__all__ = ["Comparison", "compare_methods"]
