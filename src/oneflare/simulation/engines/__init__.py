"""Engines: where the clients of a simulation run."""

from oneflare.simulation.engines.local import call, default_workers, map_tasks

__all__ = ["call", "default_workers", "map_tasks"]
