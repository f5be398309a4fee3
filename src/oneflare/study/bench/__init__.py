"""Benchmarks: ratios that are measured side by side, so that a noisy machine matters less."""

from oneflare.study.bench.growth import client_growth, fusion_growth, start_up
from oneflare.study.bench.steps import busy_machine, cohort_gain, controller_costs, machine, step_overhead
from oneflare.study.bench.wire import communication

__all__ = [
    "busy_machine",
    "client_growth",
    "cohort_gain",
    "communication",
    "controller_costs",
    "fusion_growth",
    "machine",
    "start_up",
    "step_overhead",
]
