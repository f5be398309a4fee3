"""Studies: several runs, the statistics over them, declared claims, attacks and benchmarks."""

from oneflare.study.compare import Comparison, compare_methods

__all__ = ["Comparison", "compare_methods"]
