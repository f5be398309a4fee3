"""Measurements, never tests: run one with `python -m benchmarks.NAME`."""
