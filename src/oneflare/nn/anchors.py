"""Anchors A `(C, d)`: targets for prototypes, the same on all clients, a function of (kind, C, d, seed)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from oneflare.core.registry import Registry
from oneflare.core.seeds import torch_generator
from oneflare.errors import ConfigError
from oneflare.nn.packing import sphere_packing


@dataclass(frozen=True)
class Anchors:
    """What a registered kind of anchors returns.

    Such a part is a function `(classes, dim, *, options) -> Anchors`, or `-> None` for no anchors at all. It must be
    deterministic: all clients compute A by themselves, and prototypes are only comparable if every A is the same.
    """

    matrix: Tensor
    """A `(C, d)`, float32"""
    progressive: bool = False
    """whether the target moves from the prototypes' start P_0 to A as training goes on; otherwise it is A throughout"""

    def target_from(self, start: Tensor) -> Target:
        """What the prototypes of one client are pulled toward; start: P_0 `(C, d)`, where they begin."""
        return Target(self.matrix, start.detach().clone() if self.progressive else None)

    @property
    def worst_cosine(self) -> float | None:
        """The largest cosine between two rows: how close the two closest classes are. None without directions."""
        return worst_cosine(self.matrix)


class Target:
    """What prototypes are pulled toward, as a function of progress: A, or (1-p) P_0 + p A."""

    def __init__(self, anchors: Tensor, start: Tensor | None = None) -> None:
        self.anchors = anchors
        self.start = start

    def to(self, device: torch.device) -> Target:
        return Target(self.anchors.to(device), None if self.start is None else self.start.to(device))

    def at(self, progress: float) -> Tensor:
        """The target `(C, d)` when the part `progress` of training, in [0, 1], is done."""
        return self.anchors if self.start is None else self.start.lerp(self.anchors, progress)


ANCHORS: Registry[Anchors | None] = Registry("anchors")


def _checked(scale: Any) -> Any:
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale != "sqrt_d" and not (number and 0 < scale < float("inf")):
        raise ValueError("must be a number greater than 0, or sqrt_d")
    return scale


Scale = Annotated[float | Literal["sqrt_d"], BeforeValidator(_checked)]
"""the length of every row of A; `sqrt_d` is that of prototypes drawn from N(0, 1)"""


def length(scale: Scale, dim: int) -> float:
    """The number that `anchors.scale` stands for at `dim` features."""
    return float(dim**0.5) if isinstance(scale, str) else scale


def build_anchors(spec: Mapping[str, Any], classes: int, dim: int) -> Tensor | None:
    """The matrix A `(C, d)` of the anchors that `spec` names; None for anchors=none."""
    anchors = ANCHORS.build(spec, classes, dim)
    return None if anchors is None else anchors.matrix


def build_target(spec: Mapping[str, Any], start: Tensor) -> Target | None:
    """What prototypes that begin at `start` `(C, d)` are pulled toward."""
    anchors = ANCHORS.build(spec, *start.shape)
    return None if anchors is None else anchors.target_from(start)


@ANCHORS.register("none")
def none(classes: int, dim: int) -> None:
    """no anchors"""
    del classes, dim


@ANCHORS.register("random")
def random(classes: int, dim: int, *, scale: Scale = 1.0, seed: int = 0) -> Anchors:
    """rows drawn uniformly from the sphere of radius `scale` (DRCL)"""
    rows = torch.randn(classes, dim, dtype=torch.float64, generator=torch_generator(seed, "anchors", "random"))
    unit: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return Anchors((length(scale, dim) * unit).float())


@ANCHORS.register("etf")
def etf(classes: int, dim: int, *, scale: Scale = 1.0, seed: int = 0) -> Anchors:
    """simplex equiangular tight frame: rows of norm `scale`, pairwise cosine exactly -1/(C-1)"""
    return Anchors((length(scale, dim) * simplex_etf(classes, dim, seed)).float())


@ANCHORS.register("packing")
def packing(classes: int, dim: int, *, scale: Scale = 1.0, seed: int = 0) -> Anchors:
    """rows of norm `scale` as far apart as we can place them, for any d; the ETF where d >= C-1

    d >= C-1: the simplex, worst cosine -1/(C-1).  C <= 2d: part of a cross-polytope, worst cosine 0, which nothing
    beats (Rankin 1955).  Otherwise optimised numerically on the sphere: good, deterministic, not proven best.
    """
    return Anchors((length(scale, dim) * _packing(classes, dim, seed)).float())


@ANCHORS.register("progressive")
def progressive(
    classes: int,
    dim: int,
    *,
    toward: Literal["etf", "random", "packing"] = "etf",
    scale: Scale = 1.0,
    seed: int = 0,
) -> Anchors:
    """a target that starts at the prototypes: (1-p) P_0 + p A, with A of kind `toward`"""
    goal = ANCHORS.build({"name": toward, "scale": scale, "seed": seed}, classes, dim)
    assert goal is not None
    return Anchors(goal.matrix, progressive=True)


@ANCHORS.register("shrink")
def shrink(classes: int, dim: int) -> Anchors:
    """no direction at all: the target is 0, so that alignment is weight decay on the prototypes alone"""
    return Anchors(torch.zeros(classes, dim))


def worst_cosine(rows: Tensor) -> float | None:
    """The largest cosine between two different rows of `(C, d)`."""
    norms = rows.double().norm(dim=1, keepdim=True)
    if len(rows) < 2 or not bool((norms > 0).all()):
        return None
    unit = rows.double() / norms
    return float((unit @ unit.T).fill_diagonal_(-1.0).max())


def simplex_etf(classes: int, dim: int, seed: int) -> Tensor:
    """`(C, d)` float64: the simplex's vertices in R^(C-1), turned into R^d by a seeded rotation."""
    if dim < classes - 1:
        raise ConfigError(
            f"anchors=etf needs d >= C-1: {classes} equiangular directions do not fit into {dim} dimensions; "
            f"set encoder.dim={classes - 1} or more, or anchors=packing for the best that fits"
        )
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    vertices = (classes / (classes - 1)) ** 0.5 * (centred @ _helmert(classes))
    turned: Tensor = vertices @ _turn(dim, classes - 1, seed, "etf").T
    return turned


@lru_cache(maxsize=8)
def _packing(classes: int, dim: int, seed: int) -> Tensor:
    """`(C, d)` float64; remembered, because every client of a process asks for the same one."""
    if dim >= classes - 1:
        return simplex_etf(classes, dim, seed)
    if classes <= 2 * dim:
        axes = torch.eye(dim, dtype=torch.float64)
        corners: Tensor = torch.cat([axes, -axes])[:classes] @ _turn(dim, dim, seed, "packing").T
        return corners
    return sphere_packing(classes, dim, torch_generator(seed, "anchors", "packing"))


def _turn(rows: int, columns: int, seed: int, purpose: str) -> Tensor:
    """`(rows, columns)` seeded orthonormal columns."""
    draw = torch.randn(rows, columns, dtype=torch.float64, generator=torch_generator(seed, "anchors", purpose))
    rotation, triangle = torch.linalg.qr(draw)
    turned: Tensor = rotation * triangle.diagonal().sign()
    return turned


def _helmert(classes: int) -> Tensor:
    """`(C, C-1)` orthonormal columns, each orthogonal to the vector of ones."""
    columns = torch.zeros(classes, classes - 1, dtype=torch.float64)
    for k in range(1, classes):
        columns[:k, k - 1] = 1.0
        columns[k, k - 1] = -k
        columns[:, k - 1] /= (k * (k + 1)) ** 0.5
    return columns
