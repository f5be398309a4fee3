"""What the fusions of statistics that follow a publication share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.errors import ConfigError, UploadError
from oneflare.fusion.analytic.calibration import inverse_temperature, simulated_scores
from oneflare.fusion.analytic.solver import CAUTION, NEVER
from oneflare.fusion.base import Fused, Fusion, Suspect, UploadSet
from oneflare.fusion.trust.sums import doubtful_sums
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.analytic import AnalyticModel
from oneflare.models.base import GlobalModel
from oneflare.nn.optimisers import minimise
from oneflare.upload.statistics import G_B_N, Statistics

NOTHING = 1e-7
"""of the largest eigenvalue: what sums that were sent as float32 do not determine"""


class FamilyFusion(Fusion):
    """A fusion of statistics alone; members whose class means are others' are named and kept."""

    needs = frozenset({"statistics"})

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        if G_B_N in self.needs and uploads.plan.coded:
            raise UploadError(
                f"the sums of products in these uploads are rounded (upload.statistics_dtype={uploads.plan.dtype}); "
                f"only the fusions analytic and flare_analytic take account of that, not {type(self).__name__}; fuse "
                "with analytic, or let the clients send float32 or int16"
            )
        suspects = tuple(Suspect(client, reason, "kept") for client, reason in doubtful_sums(uploads).items())
        return Fused(self.solved(uploads), suspects=suspects)

    @abstractmethod
    def solved(self, uploads: UploadSet) -> GlobalModel:
        """The model that the uploads give."""


def check_range(fusion: str, options: Mapping[str, float | None], low: float, high: float, open_low: bool) -> None:
    """Refuse options outside their range; None stands for a default that is computed."""
    for name, value in options.items():
        if value is not None and not ((value > low or (value == low and not open_low)) and value <= high):
            least = "greater than" if open_low else "at least"
            most = "" if high == float("inf") else f" and at most {high:g}"
            raise ConfigError(f"fusion {fusion}.{name}: must be {least} {low:g}{most} (got {value})")


def present_classes(counts: Tensor) -> Tensor:
    """`(C,)` which classes have an image."""
    present = counts > 0
    if not bool(present.any()):
        raise UploadError("the statistics hold no images; collect more uploads or use a larger epsilon")
    return present


def within_scatter(statistics: Statistics) -> Tensor:
    """sum_c S_c = G - sum_c n_c m_c m_c^T `(D, D)`: the scatter within classes"""
    present = present_classes(statistics.counts)
    sums, counts = statistics.sums[present], statistics.counts[present]
    return statistics.gram - sums.T @ (sums / counts[:, None])


def solve_symmetric(matrix: Tensor, right: Tensor, ridge: float = 0.0) -> Tensor:
    """(A + r I)^-1 B, or the solution of least norm where A + r I is singular to rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    shifted = values + ridge
    cut = NOTHING * float(values[-1].clamp(min=0)) + max(0.0, -2 * float(values[0]))
    inverse = torch.where((shifted > cut) | ((shifted > 0) & (ridge > cut)), 1 / shifted, torch.zeros(()))
    solution: Tensor = vectors @ (inverse[:, None] * (vectors.T @ right))
    return solution


def oas_shrinkage(trace: float, square_trace: float, dim: int, images: float) -> float:
    """The part rho of the identity in (1 - rho) S + rho tr(S)/p I, by the oracle approximating shrinkage.

    rho = ((1 - 2/p) tr(S^2) + tr(S)^2) / ((n + 1 - 2/p) (tr(S^2) - tr(S)^2 / p)), at most 1 (Chen et al. 2010)
    """
    spread = square_trace - trace**2 / dim
    if spread <= 0 or images <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / dim) * square_trace + trace**2) / ((images + 1 - 2 / dim) * spread))


def linear_model(uploads: UploadSet, weight: Tensor, bias: Tensor, counts: Tensor) -> AnalyticModel:
    """The model phi W + bias. weight `(D, k)`, bias `(k,)` of the classes with images, which alone can be predicted."""
    present = counts > 0
    full_weight = torch.zeros(len(weight), len(present))
    full_bias = torch.full((len(present),), NEVER)
    full_weight[:, present], full_bias[present] = weight.float(), bias.float()
    plan = uploads.plan
    return AnalyticModel(uploads.task, plan.feature_map, plan.bound, full_weight, full_bias)


def calibrated(weight: Tensor, bias: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor]:
    """beta W, beta bias: the same predictions, with probabilities that fit pseudo images.

    The scores of pseudo images have the class means and the covariance within classes that the statistics say; the
    images themselves made the weights, so beta is reduced as `oneflare.fusion.analytic.solver` does.
    """
    present = present_classes(statistics.counts)
    counts = statistics.counts[present]
    means = statistics.sums[present] / counts[:, None] @ weight + bias
    within = weight.T @ within_scatter(statistics) @ weight / statistics.samples
    scores, labels = simulated_scores(means, within, counts / counts.sum())
    size = float(scores.std().clamp(min=1e-30))  # the search for beta expects scores of about unit size
    beta = CAUTION * inverse_temperature(scores / size, labels) / size
    return beta * weight, beta * bias


def softmax_head(samples: Tensor, labels: Tensor, classes: int, decay: float, steps: int) -> tuple[Tensor, Tensor]:
    """W `(d, C)` and bias `(C,)` that minimise cross-entropy + decay |W|^2 / 2 on samples `(n, d)`, by L-BFGS.

    Samples are standardised for it, and the weights brought back; the problem is convex, so no seed is involved.
    """
    mean = samples.mean(0)
    deviation = samples.std(0, correction=0).clamp(min=1e-6 * float(samples.std().clamp(min=1e-30)))
    x = (samples - mean) / deviation
    weight = torch.zeros(samples.shape[1], classes, dtype=samples.dtype, requires_grad=True)
    bias = torch.zeros(classes, dtype=samples.dtype, requires_grad=True)

    def loss() -> Tensor:
        return F.cross_entropy(x @ weight + bias, labels) + decay / 2 * weight.square().sum()

    minimise(loss, [weight, bias], steps, history_size=10)
    scaled = weight.detach() / deviation[:, None]
    return scaled, bias.detach() - mean @ scaled
