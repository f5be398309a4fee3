"""Anchors A `(C, d)`: fixed targets for prototypes, the same on all clients, a function of (kind, C, d, seed)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.registry import Registry
from oneflare.seeds import torch_generator

ANCHORS: Registry[Tensor | None] = Registry("anchors")


def build_anchors(spec: Mapping[str, Any], classes: int, dim: int) -> Tensor | None:
    return ANCHORS.build(spec, classes, dim)


@ANCHORS.register("none")
def none(classes: int, dim: int) -> None:
    """no anchors"""
    del classes, dim


@ANCHORS.register("random")
def random(classes: int, dim: int, *, scale: float = 1.0, seed: int = 0) -> Tensor:
    """rows drawn uniformly from the sphere of radius `scale` (DRCL)"""
    rows = torch.randn(classes, dim, dtype=torch.float64, generator=torch_generator(seed, "anchors", "random"))
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return (scale * unit).float()


@ANCHORS.register("etf")
def etf(classes: int, dim: int, *, scale: float = 1.0, seed: int = 0) -> Tensor:
    """simplex equiangular tight frame: rows of norm `scale`, pairwise cosine exactly -1/(C-1)"""
    return (scale * simplex_etf(classes, dim, seed)).float()


def simplex_etf(classes: int, dim: int, seed: int) -> Tensor:
    """`(C, d)` float64: the simplex's vertices in R^(C-1), turned into R^d by a seeded rotation."""
    if dim < classes - 1:
        raise ConfigError(
            f"anchors=etf needs d >= C-1: {classes} equiangular directions do not fit into {dim} dimensions; "
            f"set encoder.dim={classes - 1} or more"
        )
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    vertices = (classes / (classes - 1)) ** 0.5 * (centred @ _helmert(classes))
    draw = torch.randn(dim, classes - 1, dtype=torch.float64, generator=torch_generator(seed, "anchors", "etf"))
    rotation, triangle = torch.linalg.qr(draw)
    rotation = rotation * triangle.diagonal().sign()
    turned: Tensor = vertices @ rotation.T
    return turned


def _helmert(classes: int) -> Tensor:
    """`(C, C-1)` orthonormal columns, each orthogonal to the vector of ones."""
    columns = torch.zeros(classes, classes - 1, dtype=torch.float64)
    for k in range(1, classes):
        columns[:k, k - 1] = 1.0
        columns[k, k - 1] = -k
        columns[:, k - 1] /= (k * (k + 1)) ** 0.5
    return columns
