"""A small fused federation of three classes, to which tests add members' scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hospitals import digits, make, tiny_charter, write_pngs
from oneflare.federation.charter import Charter
from oneflare.federation.coordinator import FusedFederation, fuse_federation
from score_parts import CLASSES, example_scores

NAMES = ("east", "north", "south")


def small_federation(root: Path, classes: tuple[str, ...] = CLASSES, **fields) -> FusedFederation:
    """Three members with forty images each of three digits, under the names of three classes; method analytic."""
    charter: Charter = tiny_charter(classes=list(classes), settings={"method": "analytic"}, **fields)
    charter.write(root / "federation" / "federation.yaml")
    train, _ = digits()
    rows = [row for row in range(len(train.labels)) if int(train.labels[row]) < len(classes)]
    for index, name in enumerate(NAMES):
        write_pngs(root / name, train, rows[40 * index : 40 * (index + 1)])
        for label, word in enumerate(classes):
            (root / name / str(label)).rename(root / name / word)
        make(charter, root / name, root / "inbox" / f"{name}.safetensors", name)
    return fuse_federation(root / "federation", uploads=root / "inbox")


def scored(fused: FusedFederation, scores) -> FusedFederation:
    """The federation with scores of its own model."""
    own = fused.content.own.sha256
    return replace(fused, content=replace(fused.content, scores=tuple(replace(one, model=own) for one in scores)))


def good_scores(**fields) -> list:
    """Scores of all members that speak for the model; fields: of `example_scores`"""
    standard = {"supports": (200, 150, 180), "right": 0.97, "alone": 0.8, "patients": False}
    return [example_scores(name, seed=seed, **(standard | fields)) for seed, name in enumerate(NAMES)]
