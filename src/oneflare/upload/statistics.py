"""The statistics in an upload: sums over a client's images that add up over clients.

With features phi `(D,)` and classes c a client sends

    G = sum phi phi^T,    b_c = sum of phi over class c,    n_c = images of class c.

The sum over clients is the same whoever holds which image, so what the server solves from it does not depend on the
split; a client joins by adding its statistics and leaves by subtracting them.

b_c and n_c are always sent. What else is, the members agree on (`Plan.parts`): `covariance`, which is G;
`class_covariances` (`oneflare.upload.class_statistics`), from which G follows; `mixtures`
(`oneflare.upload.mixtures`), which do not add up and are kept side by side. Where features are in blocks, of G only
the products within each block are sent (`oneflare.upload.blocks`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from oneflare.core.privacy import Privacy
from oneflare.errors import ConfigError
from oneflare.nn import build_feature_map, check_size
from oneflare.nn.blocks import block_sizes
from oneflare.upload.blocks import checked_blocks
from oneflare.upload.coding import CODED, WHOLE
from oneflare.upload.factors import factor_complaint, scatter_of
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.symmetric import (
    ROUNDING,
    SLACK,
    around_mean,
    positive,
    products_complaint,
    triangle_size,
    unpack_symmetric,
    upper_values,
)
from oneflare.upload.twelve_bits import from_twelve_bits, to_twelve_bits

SCATTER = "scatter"
SCALE = "scatter#scale"
SUMS = "sums"
COUNTS = "counts"
COVARIANCE = "covariance"
CLASS_COVARIANCES = "class_covariances"
MIXTURES = "mixtures"
PARTS = (COVARIANCE, CLASS_COVARIANCES, MIXTURES)
DEFAULT_PARTS = (COVARIANCE,)
COMPONENTS = 10
"""of a mixture, unless the members agree on another number"""
CLASS_MEANS = "class_means"
G_B_N = "statistics"
FIELDS = frozenset({CLASS_MEANS, G_B_N, CLASS_COVARIANCES, MIXTURES})
"""what fusions may need of statistics"""
INT16_STEPS = 32767
INT12_STEPS = 2047
STEPS = {"int16": INT16_STEPS, "int12": INT12_STEPS}
"""into which a correlation of 1 is divided"""
FEWEST_IN_12_BITS = 4
"""features, below which words of 12-bit numbers could be mistaken for 16-bit numbers: there are equally many"""
VANISHING = 1e-12
"""a feature whose variance is below this part of its square is constant"""


def offers(parts: Collection[str]) -> frozenset[str]:
    """What fusions can have of statistics with these parts; G follows from the covariances of all classes."""
    both = {G_B_N} if {COVARIANCE, CLASS_COVARIANCES} & set(parts) else set()
    return frozenset({CLASS_MEANS, *both, *({CLASS_COVARIANCES, MIXTURES} & set(parts))})


def parts_for(needs: Collection[str]) -> tuple[str, ...]:
    """The parts with which uploads offer these fields, and no more than that."""
    wanted = {CLASS_COVARIANCES, MIXTURES} & set(needs)
    if G_B_N in needs and CLASS_COVARIANCES not in needs:
        wanted.add(COVARIANCE)
    return tuple(part for part in PARTS if part in wanted)


@dataclass(frozen=True)
class Plan:
    """What all members agreed on: which features, which sums of them, how precise, how private."""

    feature_map: dict[str, Any]
    fingerprint: str
    dim: int
    dtype: str = "float32"
    privacy: Privacy | None = None
    parts: tuple[str, ...] = DEFAULT_PARTS
    components: int = COMPONENTS
    """K of the mixtures"""
    factors: bool = False
    """whether a client with few images sends a factor of its products"""

    @classmethod
    def of(
        cls,
        feature_map: dict[str, Any],
        channels: int,
        size: int,
        dtype: str = "float32",
        privacy: Privacy | None = None,
        parts: tuple[str, ...] = DEFAULT_PARTS,
        components: int = COMPONENTS,
    ) -> Plan:
        features = build_feature_map(feature_map, channels, size, None if privacy is None else privacy.clip)
        sizes = checked_blocks(features, plain=privacy is None and set(parts) <= {COVARIANCE})
        if COVARIANCE in parts:
            numbers = sum(map(triangle_size, sizes))
            check_size(f"statistics of {features.dim} features", numbers, "choose fewer analytic.filters")
        if dtype in CODED and size == 1:
            raise ConfigError(
                f"upload.statistics_dtype={dtype}: is for maps of images; features of a backbone are sent in float32, "
                "int16 or int12"
            )
        if dtype == "int12" and features.dim < FEWEST_IN_12_BITS:
            raise ConfigError(
                f"upload.statistics_dtype=int12: sums of {features.dim} features are sent in float32 or int16"
            )
        return cls(feature_map, features.fingerprint(), features.dim, dtype, privacy, parts, components)

    @property
    def coded(self) -> bool:
        """Whether sums of products are sent in code."""
        return self.dtype in CODED and COVARIANCE in self.parts

    @property
    def whole(self) -> bool:
        """Whether they are sums of whole numbers, of features that were rounded for each image."""
        return self.dtype == WHOLE and COVARIANCE in self.parts

    @property
    def blocks(self) -> tuple[int, ...]:
        """The sizes of the blocks of features within which products are summed."""
        return block_sizes(self.dim, self.feature_map.get("blocks"))

    @property
    def bound(self) -> float | None:
        """The largest norm of an image's features."""
        return None if self.privacy is None else self.privacy.clip

    def to_dict(self) -> dict[str, Any]:
        """For manifests. Parts that every plan once had are left out, so that uploads of then are still read."""
        content = asdict(self) | {"parts": list(self.parts)}
        if MIXTURES not in self.parts:
            del content["components"]
        if self.parts == DEFAULT_PARTS:
            del content["parts"]
        if not self.factors:
            del content["factors"]
        return content


@dataclass(frozen=True)
class ClassMeans:
    """Sums and counts of each class, float64: the part of statistics that is always sent."""

    sums: Tensor
    """`(C, D)` rows b_c"""
    counts: Tensor
    """`(C,)` n_c"""

    def __add__(self, other: ClassMeans) -> ClassMeans:
        return ClassMeans(self.sums + other.sums, self.counts + other.counts)

    @property
    def means(self) -> Tensor:
        """`(C, D)` m_c, 0 for a class without images"""
        return self.sums / self.counts.clamp(min=1)[:, None]

    @classmethod
    def of(cls, packed: Mapping[str, Tensor]) -> ClassMeans:
        return cls(packed[SUMS].double(), packed[COUNTS].double())


@dataclass(frozen=True)
class Statistics:
    """Additive sums, float64."""

    gram: Tensor
    """`(D, D)` G"""
    sums: Tensor
    """`(C, D)` rows b_c"""
    counts: Tensor
    """`(C,)` n_c"""

    @classmethod
    def zeros(cls, dim: int, classes: int) -> Statistics:
        shapes = (dim, dim), (classes, dim), (classes,)
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(self.gram + other.gram, self.sums + other.sums, self.counts + other.counts)

    def __sub__(self, other: Statistics) -> Statistics:
        return Statistics(self.gram - other.gram, self.sums - other.sums, self.counts - other.counts)

    @property
    def samples(self) -> float:
        return float(self.counts.sum())


def pack(statistics: Statistics, dtype: str = "float32") -> dict[str, Tensor]:
    """The tensors of an upload: S = G - n m m^T (upper triangle), class sums, counts.

    Around the mean m, because the mean's outer product would swamp everything else when rounded.
    float32: S itself. int16: S_ij = s_i s_j q_ij / 32767 with s_i = sqrt(S_ii): a correlation loses at most 2^-16.
    int12: the same with 2047 steps, four numbers in 48 bits; a correlation loses at most 1/4094.
    What is sent in code is packed in float32 first (`oneflare.upload.coding`).
    """
    scatter = scatter_around_mean(statistics)
    diagonal = scatter.diagonal()
    packed = {SUMS: statistics.sums.float(), COUNTS: statistics.counts.long()}
    if dtype in STEPS:
        steps = STEPS[dtype]
        scale = diagonal.clamp(min=0).sqrt().float()
        inverse = torch.where(scale > 0, 1 / scale.double(), torch.zeros(()))
        scatter.mul_(inverse[:, None]).mul_(inverse * steps).round_().clamp_(-steps, steps)
        packed[SCALE] = scale
    values = upper_values(scatter)
    if dtype == "int12":
        packed[SCATTER] = to_twelve_bits(values)
    else:
        packed[SCATTER] = values.to(torch.int16 if dtype == "int16" else torch.float32)
    return packed


def scatter_around_mean(statistics: Statistics, dtype: torch.dtype = torch.float64) -> Tensor:
    """S = G - n m m^T `(D, D)`, without what rounding leaves of features that are constant (`around_mean`)."""
    total = statistics.sums.double().sum(0)
    return around_mean(statistics.gram, total, max(statistics.samples, 1.0), VANISHING, dtype)


def unpack(packed: Mapping[str, Tensor]) -> Statistics:
    """The statistics of an upload; add them up over clients."""
    counts, sums = packed[COUNTS].double(), packed[SUMS].double()
    return Statistics(_scatter(packed) + _mean_part(sums, counts), sums, counts)


def _mean_part(sums: Tensor, counts: Tensor) -> Tensor:
    """n m m^T"""
    total = sums.double().sum(0)
    return torch.outer(total, total / max(float(counts.sum()), 1.0))


def _steps(packed: Mapping[str, Tensor]) -> int:
    """Into how many steps correlations are divided in an upload of whole numbers."""
    whole = packed[SCATTER].shape[0] == triangle_size(packed[SUMS].shape[1])
    return INT16_STEPS if whole else INT12_STEPS


def _scatter(packed: Mapping[str, Tensor]) -> Tensor:
    values = packed[SCATTER]
    if SCALE not in packed:
        return scatter_of(packed)
    steps, scale = _steps(packed), packed[SCALE].double()
    whole = values if steps == INT16_STEPS else from_twelve_bits(values, triangle_size(len(scale)))
    return unpack_symmetric(whole).mul_(scale[:, None]).mul_(scale / steps)


# ---- what statistics of images must satisfy, whoever sends them

NOISE_TAIL = 8.0
"""standard deviations that no honest noise exceeds: once in 10^15 numbers"""
MOST_IMAGES = 10**9
"""of a class at one member"""


@lru_cache(maxsize=8)
def _limits(spec: str, channels: int, size: int, bound: float | None) -> FeatureLimits:
    return FeatureLimits.of(build_feature_map(json.loads(spec), channels, size, bound))


def limits_of(plan: Plan, channels: int, size: int) -> FeatureLimits:
    """The limits of the features that the members agreed on."""
    return _limits(json.dumps(plan.feature_map, sort_keys=True), channels, size, plan.bound)


def complaint(
    packed: Mapping[str, Tensor], samples: int, limits: FeatureLimits, privacy: Privacy | None = None
) -> str | None:
    """What no images could give, in statistics whose names, shapes and types are right; None if nothing is.

    samples: of the manifest; privacy: the agreed noise, which widens every limit.
    """
    counts = [int(count) for count in packed[COUNTS].tolist()]  # whole numbers of Python, which do not overflow
    if min(counts) < 0:
        return "counts has a negative number"
    if max(counts) > MOST_IMAGES:
        return f"counts has a class of {max(counts)} images, more than the plausible {MOST_IMAGES}"
    if SCALE in packed and bool((packed[SCALE] < 0).any()):
        return "scatter#scale has a negative deviation"
    if privacy is not None:
        return _noised_complaint(packed, counts, samples, privacy)
    if sum(counts) != samples:
        return f"counts add up to {sum(counts)} images, the manifest says {samples}"
    return _sums_complaint(packed, limits) or (_scatter_complaint(packed, limits) if SCATTER in packed else None)


def _sums_complaint(packed: Mapping[str, Tensor], limits: FeatureLimits) -> str | None:
    counts, sums = packed[COUNTS].double(), packed[SUMS].double()
    if bool((sums[counts == 0] != 0).any()):
        return "sums has features of a class without images"
    means = sums / counts.clamp(min=1)[:, None]
    slack = SLACK * torch.maximum(limits.low.abs(), limits.high.abs()).clamp(min=SLACK)
    outside = ((means < limits.low - slack) | (means > limits.high + slack)) & (counts > 0)[:, None]
    if bool(outside.any()):
        label, feature = outside.nonzero()[0].tolist()
        return (
            f"sums has a class mean of {float(means[label, feature]):.3g} in a feature that lies between "
            f"{float(limits.low[feature]):.3g} and {float(limits.high[feature]):.3g} for every image"
        )
    return None


def _scatter_complaint(packed: Mapping[str, Tensor], limits: FeatureLimits) -> str | None:
    counts, sums = packed[COUNTS].double(), packed[SUMS].double()
    if SCALE not in packed and factor_complaint(packed) is not None:
        return factor_complaint(packed)
    scatter = _scatter(packed)
    impossible = products_complaint(scatter)
    if impossible is not None:
        return f"scatter has {impossible}"
    diagonal = scatter.diagonal()
    n = float(counts.sum())
    mean = sums.sum(0) / n
    most = n * ((limits.high - mean).clamp(min=0) * (mean - limits.low).clamp(min=0))  # Bhatia and Davis 2000
    excess = diagonal > (1 + SLACK) * most + SLACK * n * (limits.high - limits.low).square()
    if bool(excess.any()):
        worst = int((diagonal / n).where(excess, torch.zeros(())).argmax())
        return f"scatter has a variance of {float(diagonal[worst]) / n:.3g}, more than its feature can have"
    if not _within_is_possible(scatter, sums, counts, entry=1 / _steps(packed) if SCALE in packed else ROUNDING):
        return "scatter and sums contradict each other: no images have these class means and these covariances"
    return None


def _within_is_possible(scatter: Tensor, sums: Tensor, counts: Tensor, entry: float) -> bool:
    """Whether S - sum_c n_c (m_c - m)(m_c - m)^T, the scatter within classes, is positive semidefinite to rounding.

    Then S is as well, and by Cauchy and Schwarz no class mean is further out than the covariances let it be. In units
    of the deviations, rounding moves an entry of S by at most `entry`, and a class mean of size m in deviations s by
    ROUNDING m/s; features that hardly vary (m/s beyond a thousand) are left to the limits on their variance.
    """
    n, present = float(counts.sum()), counts > 0
    mean = sums.sum(0) / n
    deviation = scatter.diagonal().sqrt()
    size = (sums[present] / counts[present, None]).abs().amax(0)
    apart = (counts[present, None] * (sums[present] / counts[present, None] - mean).square()).sum(0)
    if bool((apart > (1 + SLACK) * scatter.diagonal() + 10 * VANISHING * n * size.square()).any()):
        return False
    alive = deviation > SLACK * size * math.sqrt(n)
    if not bool(alive.any()):
        return True
    scale = 1 / deviation[alive]
    dim = len(scale)
    offsets = (sums[present][:, alive] / counts[present, None] - mean[alive]) * scale
    between = offsets.T @ (counts[present, None] * offsets)
    within = scatter[alive][:, alive] * scale[:, None] * scale - between
    moved = math.sqrt(n) * float((2 * ROUNDING * size[alive] * scale).norm())
    slack = 2 * (SLACK + dim * entry + 2 * math.sqrt(dim) * moved + moved**2)
    return positive(within, slack)


def _noised_complaint(packed: Mapping[str, Tensor], counts: list[int], samples: int, privacy: Privacy) -> str | None:
    """The same of statistics with Gaussian noise: every limit is moved by what no honest noise exceeds.

    Covariances that are stored relative to deviations (int16) lose negative variances, so of their eigenvalues nothing
    is known.
    """
    sigma, bound = privacy.noise, privacy.clip
    dim, missing = packed[SUMS].shape[1], 2 * NOISE_TAIL * sigma + 1  # images that noise may have taken off a count
    if sum(counts) > 2 * samples + len(counts) * missing:
        return f"counts add up to {sum(counts)} images, more than the manifest's {samples} and the noise explain"
    lengths = packed[SUMS].double().norm(dim=1)
    allowed = bound * (torch.tensor(counts).double() + missing + sigma * (math.sqrt(dim) + NOISE_TAIL))
    if bool((lengths > (1 + SLACK) * allowed).any()):
        label = int((lengths / allowed).argmax())
        return f"sums has a class of length {float(lengths[label]):.3g}, more than {float(allowed[label]):.3g}"
    if SCATTER not in packed:
        return None
    gram = unpack(packed).gram / bound**2
    images = sum(counts) + len(counts) * missing
    cut = dim if SCALE in packed else math.sqrt(dim)
    if float(gram.trace()) > (1 + SLACK) * images + NOISE_TAIL * sigma * cut:
        return f"scatter has squares that add up to {float(gram.trace()):.3g}, more than {images:.0f} images can have"
    spread = sigma * (math.sqrt(2 * dim) + NOISE_TAIL) + SLACK * (1 + sum(counts))
    if SCALE not in packed and not positive(gram, spread):
        return "scatter is further from positive semidefinite than the noise explains"
    return None
