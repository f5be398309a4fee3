"""Feature maps over another feature map: random Fourier features, and one-hot groups of bucketed features.

Both are fixed functions of one image, drawn from a seed, so statistics of them add up over clients like those of the
map that they are built on. Neither knows how large that map's features are, so both begin with

    z = unit(phi - mean(phi)),

an image's features without their own mean, brought to length 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.errors import ConfigError
from oneflare.nn.feature_maps import FEATURE_MAPS, build_feature_map

GRID = 4096.0
"""drawn numbers are rounded to multiples of 1/4096, so that machines agree on them"""
LARGEST = 1 << 14
"""features that a map may have: their products alone fill an upload"""
FEATURE_LIMIT = 4096
"""random features at most; the options of a map in a model file are refused beyond it"""
OVER = "of"
"""the option that names the map below"""


def _below(value: Any) -> Any:
    """The complete spec of the map below; a composed map is never below another, so specs stay shallow."""
    spec = {"name": value} if isinstance(value, str) else value
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise ValueError("must name a feature map, for example analytic.of=random_conv")
    if spec["name"] == "none" or OVER in spec or OVER in FEATURE_MAPS[spec["name"]].schema.model_fields:
        raise ConfigError(f"analytic.of={spec['name']}: must be a map of images, for example analytic.of=random_conv")
    return FEATURE_MAPS.complete(spec, "analytic.of")


Below = Annotated[dict[str, Any], BeforeValidator(_below)]


def centred_unit(phi: Tensor) -> Tensor:
    """z = unit(phi - mean(phi)): `(n, d)` -> `(n, d)`, float32; features that are all alike give 0."""
    z = phi - phi.mean(1, keepdim=True)
    unit: Tensor = z / z.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return unit


@FEATURE_MAPS.register("random_features")
class RandomFeatures:
    """random Fourier features of another map's features, which stand for a Gaussian kernel (Fed3R-RF)

    psi(z) = sqrt(2/M) cos(W z + u),  W_ij ~ N(0, 1/s^2),  u_i uniform in [0, 2 pi),  M = `dim`, s = `bandwidth`,

    so that psi(z).psi(z') is exp(-|z - z'|^2 / (2 s^2)) on average (Rahimi and Recht 2007). Ridge regression on them
    is kernel ridge regression in the limit of large M (Fani et al. 2024, ICML, who tune s on data; here z has length
    1 for any map, and the default bandwidth was chosen on held-out training images).
    """

    def __init__(
        self,
        channels: int,
        size: int,
        *,
        of: Below = {"name": "random_conv"},  # noqa: B006  (completed and copied by the registry)
        dim: int = 2048,
        bandwidth: float = 2.0,
        seed: int = 0,
    ) -> None:
        if not 1 <= dim <= FEATURE_LIMIT or not bandwidth > 0:
            raise ConfigError(
                f"analytic: dim must lie between 1 and {FEATURE_LIMIT} and bandwidth be greater than 0 "
                f"(got {dim}, {bandwidth})"
            )
        self.features = build_feature_map(of, channels, size)
        self.dim, self.bandwidth = dim, bandwidth
        generator = torch_generator(seed, "random features")
        drawn = torch.randn(dim, self.features.dim, dtype=torch.float64, generator=generator)
        phases = torch.rand(dim, dtype=torch.float64, generator=generator) * 2 * math.pi
        self.rows = ((drawn * GRID).round() / GRID).float() / bandwidth
        self.phases = ((phases * GRID).round() / GRID).float()
        self.parameters = self.features.parameters + self.rows.numel() + dim

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        z = centred_unit(self.features(images))
        # one product per image: in a product of several, rounding depends on the neighbours
        turned = [torch.mv(self.rows, row.clone()) for row in z]
        return self._wave(torch.stack(turned) if turned else torch.empty(0, self.dim))

    def traced(self, images: Tensor) -> Tensor:
        """The same features in one piece, for exporters; rounding may differ."""
        return self._wave(centred_unit(self.features.traced(images)) @ self.rows.T)  # type: ignore[attr-defined]

    def _wave(self, turned: Tensor) -> Tensor:
        return math.sqrt(2 / self.dim) * (turned + self.phases).cos()

    def range(self) -> tuple[Tensor, Tensor]:
        limit = torch.full((self.dim,), math.sqrt(2 / self.dim))
        return -limit, limit

    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.features.fingerprint()}/{self.dim}/{self.bandwidth}".encode())
        for drawn in (self.rows * self.bandwidth, self.phases):
            digest.update((drawn.double() * GRID).round().to(torch.int32).numpy().tobytes())
        return digest.hexdigest()


@FEATURE_MAPS.register("buckets")
class Buckets:
    """one-hot groups of thresholded features: a wide linear model that is a table look-up per group (SAFLe)

    L = `levels` thresholds turn each of the d features into L bits, B_l(z_j) = [sqrt(d) z_j > t_l]. All d L bits are
    shuffled and cut into groups of g = `group`; the g bits of a group are a number from 0 to 2^g - 1, and phi is the
    one-hot code of it, group after group: D = 2^g ceil(d L / g). A linear classifier on phi adds one learned row per
    group, which is SAFLe's sum of sparse grouped embeddings (Bacellar et al. 2026, CVPR, its "binary overlapping"
    buckets); ridge regression on phi is its single-round solution.

    Inferred, since the paper's thresholds depend on data that nobody here may see: t_l is the l/(L+1) quantile of a
    standard normal, and bits that fill up the last group are 0.
    """

    def __init__(
        self,
        channels: int,
        size: int,
        *,
        of: Below = {"name": "random_conv"},  # noqa: B006  (completed and copied by the registry)
        levels: int = 1,
        group: int = 2,
        seed: int = 0,
    ) -> None:
        if not 1 <= levels <= 16 or not 1 <= group <= 8:
            raise ConfigError(
                f"analytic: levels must lie between 1 and 16 and group between 1 and 8 (got {levels}, {group})"
            )
        self.features = build_feature_map(of, channels, size)
        bits = self.features.dim * levels
        self.groups = -(-bits // group)
        self.codes = 1 << group
        self.dim = self.groups * self.codes
        if self.dim > LARGEST:
            raise ConfigError(
                f"analytic=buckets would have {self.dim:,} features, more than {LARGEST:,}; choose a smaller "
                "analytic.levels, analytic.group or map below"
            )
        normal = NormalDist()
        self.thresholds = [normal.inv_cdf(level / (levels + 1)) for level in range(1, levels + 1)]
        self.order = torch.randperm(bits, generator=torch_generator(seed, "buckets"))
        self.powers = 2 ** torch.arange(group)
        self.parameters = self.features.parameters

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        return self._one_hot(self.features(images))

    def traced(self, images: Tensor) -> Tensor:
        """The same features, for exporters."""
        return self._one_hot(self.features.traced(images))  # type: ignore[attr-defined]

    def _one_hot(self, phi: Tensor) -> Tensor:
        z = centred_unit(phi) * math.sqrt(self.features.dim)
        bits = torch.cat([z > threshold for threshold in self.thresholds], 1)[:, self.order].long()
        bits = torch.nn.functional.pad(bits, (0, self.groups * len(self.powers) - bits.shape[1]))
        codes = (bits.view(-1, self.groups, len(self.powers)) * self.powers).sum(2)
        return (codes[:, :, None] == torch.arange(self.codes)).float().flatten(1)

    def range(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(self.dim), torch.ones(self.dim)

    def fingerprint(self) -> str:
        settings = f"{self.features.fingerprint()}/{self.thresholds}/{len(self.powers)}/"
        return hashlib.sha256(settings.encode() + self.order.numpy().tobytes()).hexdigest()
