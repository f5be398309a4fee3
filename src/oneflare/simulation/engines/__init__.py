"""Engines: where the clients of a simulation run."""

from oneflare.simulation.engines.local import default_workers, map_tasks

__all__ = ["default_workers", "map_tasks"]
