"""Which feature maps can be as large as an upload allows, and how large that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from oneflare.nn import multi_scale_maps, paired_maps

SIZED_MAPS = {"multi_scale": multi_scale_maps.fitted, "paired": paired_maps.fitted}


def fitted(spec: Mapping[str, Any], channels: int, size: int, fits: Callable[[int], bool]) -> dict[str, Any]:
    """The complete spec of such a map with its size decided: the largest whose features fit.

    fits: whether so many features do. A size that is given must fit; a budget is kept as well.
    """
    return SIZED_MAPS[spec["name"]](spec, channels, size, fits)
