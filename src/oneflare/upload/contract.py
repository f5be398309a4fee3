"""What the server expects of every upload of a federation, and the names and limits that both sides share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from oneflare.core.files import digest_of
from oneflare.data import ImageSpec
from oneflare.errors import ConfigError
from oneflare.nn import PrototypeNetwork
from oneflare.nn.blocks import block_sizes
from oneflare.upload.blocks import block_name
from oneflare.upload.class_statistics import class_layout
from oneflare.upload.coding import BITS, SCATTER, planned_bits
from oneflare.upload.evidence import layout
from oneflare.upload.masking.fixed_point import FIXED, FixedPoint, vector_size
from oneflare.upload.mixtures import mixture_layout
from oneflare.upload.statistics import CLASS_COVARIANCES, COVARIANCE, MIXTURES, Plan
from oneflare.upload.symmetric import triangle_size
from oneflare.upload.twelve_bits import twelve_bit_size

SCHEMA = 1
MANIFEST = "oneflare"
HEADER_LIMIT = 4 << 20
SIZE_LIMIT = 1 << 30
ENCODER = "encoder."
PROTOTYPES = "prototypes"
COUNTS = "counts"
STATISTICS = "statistics."
EVIDENCE = "evidence."
MASKED = "masked"
"""name of the tensor with masked sums, beside `FIXED` for plain ones"""
KNOWN = 20
"""images of a class from which on a client's network may have a say on it"""

HEADER_ROOM = 256
"""bytes of an upload's header for each class, whose names are in it, and sixteen times that for the rest"""
CODE_WORDS = 2
"""64-bit words of coded sums beside at most one for each number and one for each row"""
SCALE = "#scale"
"""ends the name of the scales that belong to an int8 or int16 tensor"""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the members of one federation have agreed on: the part of a contract that no network is needed for."""

    federation: str
    """digest of the settings all members share"""
    method: str
    encoder: dict[str, Any]
    anchors: dict[str, Any]
    image: ImageSpec
    classes: tuple[str, ...]
    statistics: Plan | None = None
    deep: bool = True
    """whether uploads hold a trained network"""
    evidence: tuple[str, ...] = ()
    """what clients measure of their networks, see `oneflare.client.evidence`"""
    fixed: FixedPoint | None = None
    """how sums are rounded where only their total may be read; they are plain in simulations, masked in federations"""


@dataclass(frozen=True, kw_only=True)
class Contract(Agreement):
    """What the server expects of every upload of one federation: what was agreed, and the shapes of every tensor."""

    dim: int
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """encoder tensors: name -> shape, dtype"""
    evidence_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    masked: int = 0
    """members of the roster for whom sums are masked; 0: they are plain"""

    @classmethod
    def of(cls, network: PrototypeNetwork, agreed: Agreement) -> Contract:
        """The contract of a federation whose clients train networks like this one."""
        if agreed.statistics is not None:
            statistics_layout(agreed.statistics, len(agreed.classes))  # refuses what does not fit into an upload
            if agreed.fixed is not None and len(agreed.statistics.blocks) > 1:
                raise ConfigError("analytic.blocks: masked sums hold the products of all features; leave it out")
        return cls(
            **{item.name: getattr(agreed, item.name) for item in fields(Agreement)},
            dim=network.prototypes.shape[1],
            shapes={name: (tuple(t.shape), t.dtype) for name, t in network.encoder.state_dict().items()},
            evidence_shapes=layout(network, agreed.evidence),
        )

    def encoder_hash(self) -> str:
        shapes = {name: [list(shape), str(dtype)] for name, (shape, dtype) in self.shapes.items()}
        return digest_of([present(self.encoder), shapes])

    def header_limit(self) -> int:
        """Bytes that the header of an honest upload never exceeds."""
        tensors = [*self.shapes, *self.evidence_shapes]
        words = [*tensors, *self.classes, json.dumps([self.encoder, self.anchors, plan_of(self)])]
        most = (64 << 10) + (1 << 10) * (len(tensors) + self.masked) + 24 * sum(map(len, words))
        return min(HEADER_LIMIT, most)

    def size_limit(self) -> int:
        """Bytes that an honest upload never exceeds, whatever its number format."""
        kinds = {ENCODER + name: "I8" for name in self.shapes}
        body = max(
            sum(8 * math.prod(shape) for shape, _ in wanted.values())
            for wanted in (expected_tensors(self, {}), expected_tensors(self, kinds))
        )
        return body + 8 * len(self.classes) + self.header_limit() + 8


def expected_tensors(contract: Contract, kinds: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """name -> shape, whether floating; a tensor that came as whole numbers (int8, int16) needs its scales beside it."""
    expected: dict[str, tuple[tuple[int, ...], bool]] = {}
    classes = len(contract.classes)
    if contract.deep:
        expected = {
            ENCODER + name: (shape, dtype.is_floating_point) for name, (shape, dtype) in contract.shapes.items()
        }
        for name, (shape, floating) in list(expected.items()):
            if kinds.get(name) == "I8" and floating and len(shape) >= 2:
                expected |= {name: (shape, False), name + SCALE: (shape[:1], True)}
        expected[PROTOTYPES] = ((classes, contract.dim), True)
        expected |= {EVIDENCE + name: (shape, True) for name, shape in contract.evidence_shapes.items()}
    if contract.fixed is not None:
        dim = 0 if contract.statistics is None else contract.statistics.dim
        expected[STATISTICS + (MASKED if contract.masked else FIXED)] = ((vector_size(classes, dim),), False)
    elif contract.statistics is not None:
        layout = statistics_layout(contract.statistics, classes)
        expected |= {STATISTICS + name: wanted for name, wanted in layout.items()}
    return expected


def statistics_layout(plan: Plan, classes: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """name -> shape, whether floating, of what a plan sends; refused where no upload could hold it"""
    layout: dict[str, tuple[tuple[int, ...], bool]] = {
        "sums": ((classes, plan.dim), True),
        "counts": ((classes,), False),
    }
    if COVARIANCE in plan.parts and len(plan.blocks) == 1:
        layout |= _products_layout(plan.dim, plan.dtype)
    elif COVARIANCE in plan.parts:
        for block, size in enumerate(plan.blocks):
            own = _products_layout(size, plan.dtype)
            layout |= {block_name(name, block): wanted for name, wanted in own.items()}
    if CLASS_COVARIANCES in plan.parts:
        layout |= class_layout(plan, classes)
    if MIXTURES in plan.parts:
        layout |= mixture_layout(plan, classes)
    return layout


def _products_layout(dim: int, dtype: str) -> dict[str, tuple[tuple[int, ...], bool]]:
    """name -> shape, whether floating, of the sums of products of so many features"""
    numbers = triangle_size(dim)
    if dtype in BITS:
        return {SCATTER: ((numbers + dim + CODE_WORDS,), False)}
    layout: dict[str, tuple[tuple[int, ...], bool]] = {
        SCATTER: ((twelve_bit_size(numbers) if dtype == "int12" else numbers,), dtype == "float32")
    }
    return layout | ({SCATTER + SCALE: ((dim,), True)} if dtype in ("int16", "int12") else {})


def at_most(contract: Contract) -> frozenset[str]:
    """Names of tensors whose expected shape is the largest that they may have: code and factors are of any length."""
    plan = contract.statistics
    if plan is None or not (plan.dtype in BITS or plan.factors):
        return frozenset()
    if len(plan.blocks) == 1:
        return frozenset({STATISTICS + SCATTER})
    return frozenset(STATISTICS + block_name(SCATTER, block) for block in range(len(plan.blocks)))


def statistics_bytes(dim: int, classes: int, dtype: str, blocks: int | None = None) -> int:
    """Bytes of the packed statistics G, b and n of so many features; of coded ones, as many as are planned for."""
    sizes = block_sizes(dim, blocks)
    numbers, sums = sum(map(triangle_size, sizes)), 4 * classes * dim + 8 * classes
    if dtype in BITS:
        return math.ceil(sum(planned_bits(dtype, size) * triangle_size(size) for size in sizes) / 8) + sums
    scatter = {"float32": 4 * numbers, "int16": 2 * numbers + 4 * dim, "int12": 2 * twelve_bit_size(numbers) + 4 * dim}
    return scatter[dtype] + sums


def scatter_room(limit: int, dim: int, classes: int) -> int:
    """Bytes for sums of products in an upload of so many bytes, beside its header, class sums and counts"""
    return statistics_room(limit, classes) - 4 * classes * dim - 8 * classes


def statistics_room(limit: int, classes: int) -> int:
    """Bytes that are left for statistics in an upload of so many bytes, beside its header"""
    return limit - HEADER_ROOM * (16 + classes)


def present(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are absent do not count, so a new one leaves old uploads readable."""
    return {key: value for key, value in spec.items() if value is not None}


def plan_of(contract: Contract) -> dict[str, Any] | None:
    return None if contract.statistics is None else contract.statistics.to_dict()
