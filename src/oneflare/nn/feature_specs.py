"""Completes the spec of a feature map, as manifests and models name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oneflare.nn.feature_maps import FEATURE_MAPS

LATER = frozenset({"blocks", "copies", "moved", "patches"})
"""options of maps that manifests name only where they are given"""


def feature_map_spec(spec: Mapping[str, Any], flip: bool) -> dict[str, Any]:
    """The spec with `mirror` decided, also of a map below: mirrored images count where they keep their label.

    Options of `LATER` that are absent are left out, so that uploads from before there were any are still read.
    """
    complete = FEATURE_MAPS.complete(spec, "analytic")
    complete = {name: value for name, value in complete.items() if name not in LATER or value is not None}
    if complete.get("blocks") == 1:  # asked for by number: the same as none
        del complete["blocks"]
    if "mirror" in complete and complete["mirror"] is None:
        complete["mirror"] = flip
    if "of" in complete:
        complete["of"] = feature_map_spec(complete["of"], flip)
    return complete
