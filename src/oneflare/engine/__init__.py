"""Where clients run."""

from oneflare.engine.local import default_workers, map_tasks

__all__ = ["default_workers", "map_tasks"]
