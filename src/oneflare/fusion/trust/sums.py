"""Finds false statistics by comparing every member's class means with those of the other members.

The features are the same fixed function of an image for everybody, so honest members that hold a class have nearly the
same mean of it, and by averaging over images the mean is far more certain than any image. A member whose images of
class c have the mean that the others' images of class k have, has mixed the two up, or wants others to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.fusion.base import UploadSet
from oneflare.upload.evidence import FISHER, GRADIENTS, INPUTS
from oneflare.upload.statistics import G_B_N, Statistics
from oneflare.upload.symmetric import packed_diagonal

SKETCH = 32
"""dimensions in which class means are compared"""
IMAGES_PER_DIMENSION = 10
"""of all members together, so that the covariance within classes is known well enough to be inverted"""
LEAST_IMAGES = 10
"""of a class, below which a member's mean of it is not judged"""
LEAST_HOLDERS = 3
"""members with a class; of two that differ nobody knows which is right"""
RIDGE = 1e-3
"""of the mean variance, added to the covariance within classes"""
CERTAINTY = 6.0
"""standard errors that a class mean must be off"""
PART = 0.75
"""of the way to another class's mean that a class mean must be off: images of one member resemble each other (a writer,
a scanner), so an honest mean is further off than its standard error says. In 826 federations whose members held the
digits of few writers each, the furthest was 0.61 of the way"""

FAR_TOO_LARGE = 100.0
"""second moments of a layer's inputs may be so many times the median member's"""
FAR_TOO_STEEP = 1e6
"""squared gradients may be so many times the largest other member's. They differ far more than inputs: a member with
images of one class hardly has any, and in honest federations of digits one had 200,000 times less than the median"""
LOUD = {
    INPUTS: ("gram", FAR_TOO_LARGE, "what enters its layers is"),
    GRADIENTS: ("kronecker", FAR_TOO_STEEP, "the squared gradients of its layers are"),
    FISHER: ("fisher", FAR_TOO_STEEP, "the Fisher information of its weights is"),
}
"""how names of evidence begin -> the evidence, how many times the others' it may be, and what it is called"""


@dataclass(frozen=True)
class Sketch:
    """A member's statistics in few dimensions."""

    counts: Tensor
    """`(C,)`"""
    means: Tensor
    """`(C, k)` of its classes, 0 where it has no image"""
    within: Tensor
    """`(k, k)` covariance within classes"""

    @classmethod
    def of(cls, statistics: Statistics) -> Sketch:
        axes = _axes(len(statistics.gram))
        counts = statistics.counts
        means = (statistics.sums @ axes) / counts.clamp(min=1)[:, None]
        within = axes.T @ statistics.gram @ axes - means.T @ (counts[:, None] * means)
        freedom = max(float(counts.sum()) - int((counts > 0).sum()), 1.0)
        return cls(counts, means, within / freedom)


@lru_cache(maxsize=4)
def _axes(dim: int) -> Tensor:
    """`(D, k)` orthonormal columns in random directions, the same for everybody."""
    drawn = torch.randn(dim, min(SKETCH, dim), dtype=torch.float64, generator=torch_generator(0, "sketch", dim))
    axes: Tensor = torch.linalg.qr(drawn).Q
    return axes


def mixed_up(sketches: Sequence[Sketch]) -> dict[int, list[tuple[int, int]]]:
    """Member -> the classes (c, k) where its images of c have the mean that is usual for k.

    What is usual for a class is the median over all members that have an image of it, coordinate by coordinate, so that
    neither a minority nor a claim to many images moves it: members with few images are not judged, but they outvote
    liars who claim many. A member whose classes are all displaced alike (another scanner) is
    measured from there. With S the covariance within classes, k is the class to whose usual mean the member's is
    nearest in x^T S^-1 x; with d the way from c to k and m how far the member's mean of c is from the usual one, it
    has gone the part

        t = m^T S^-1 d / d^T S^-1 d > 3/4,    standard error 1/sqrt(n d^T S^-1 d),    1/n = 1/n_c + 1/n_others,

    of the way to k.
    """
    counts = torch.stack([sketch.counts for sketch in sketches])
    holds = counts >= LEAST_IMAGES
    labels = (holds.sum(0) >= LEAST_HOLDERS).nonzero().flatten().tolist()
    dims = min(sketches[0].means.shape[1], int(counts.sum()) // IMAGES_PER_DIMENSION)
    if len(labels) < 2 or not dims:
        return {}
    means = torch.stack([sketch.means[:, :dims] for sketch in sketches])
    usual = torch.stack([means[counts[:, label] > 0, label].quantile(0.5, dim=0) for label in labels])
    shared = torch.stack([sketch.within[:dims, :dims] for sketch in sketches]).mean(0)
    ridge = RIDGE * shared.diagonal().mean().clamp(min=1e-30)
    inverse = torch.linalg.pinv(shared + ridge * torch.eye(dims, dtype=shared.dtype), hermitian=True)
    found: dict[int, list[tuple[int, int]]] = {}
    for member in range(len(sketches)):
        rows = [row for row, label in enumerate(labels) if bool(holds[member, label])]
        if not rows:
            continue
        offsets = means[member][[labels[row] for row in rows]] - usual[rows]
        if len(rows) >= LEAST_HOLDERS:
            offsets = offsets - offsets.quantile(0.5, dim=0)
        for row, offset in zip(rows, offsets, strict=True):
            apart = usual - usual[row] - offset
            nearest = int(((apart @ inverse) * apart).sum(1).argmin())
            label, way = labels[row], usual[nearest] - usual[row]
            gone, whole = float(offset @ inverse @ way), float((way @ inverse @ way).clamp(min=0))
            certain = gone * _images(counts[holds[:, label], label], counts[member, label])
            if nearest != row and gone > PART * whole and certain > CERTAINTY * math.sqrt(whole):
                found.setdefault(member, []).append((label, labels[nearest]))
    return found


def _images(held: Tensor, own: Tensor) -> float:
    """sqrt(n): what the comparison of one member's class mean with the usual one rests on"""
    others = float(held.median()) * (len(held) - 1)
    return math.sqrt(1 / (1 / float(own) + 1 / others))


def reasons(sketches: Sequence[Sketch], classes: Sequence[str]) -> dict[int, str]:
    """Position of each member that mixes classes up -> in words which."""
    found = mixed_up(sketches)
    if 2 * len(found) >= len(sketches):  # a minority is judged by the majority, never the other way round
        return {}
    return {
        member: " and ".join(
            f"its images of '{classes[own]}' look like the others' '{classes[other]}'" for own, other in pairs
        )
        for member, pairs in found.items()
    }


def block_sketches(uploads: UploadSet) -> list[list[Sketch]]:
    """For every block of features the sketches of all uploads in their order; each upload is read once."""
    several = len(uploads.plan.blocks) > 1
    found = [
        [Sketch.of(part) for part in (upload.solved_statistics() if several else [upload.statistics()])]
        for upload in uploads
    ]
    return [list(block) for block in zip(*found, strict=True)]


def doubtful_sums(uploads: UploadSet, sketches: Sequence[Sequence[Sketch]] = ()) -> dict[int, str]:
    """Client -> why its statistics do not fit the others', in whichever block of features.

    Noised statistics are too uncertain to be judged, and masked ones cannot be seen.
    sketches: as `block_sketches` gives them, where they are known already
    """
    if uploads.contract.masked or uploads.contract.statistics is None:
        return {}
    if uploads.plan.privacy is not None or len(uploads) < LEAST_HOLDERS:
        return {}
    if G_B_N not in uploads.offered:  # without covariances nobody knows how far a mean may be off
        return {}
    found: dict[int, str] = {}
    for block in sketches or block_sketches(uploads):
        for member, reason in reasons(block, uploads.contract.classes).items():
            found.setdefault(uploads.uploads[member].client, reason)
    return found


def loud_evidence(uploads: UploadSet) -> dict[int, str]:
    """Client -> why its second moments, of layers' inputs or of gradients, do not fit the others'.

    All networks began alike and see images of one kind, so the inputs of a layer are of similar size everywhere, and
    gradients differ by how far training came. Whoever claims far larger ones outweighs everybody in fusions by second
    moments. A layer that means nothing to the others is not compared.
    """
    found: dict[int, str] = {}
    for prefix, (kind, most, what) in LOUD.items():
        if kind not in uploads.offered or len(uploads) < LEAST_HOLDERS:
            continue
        size = torch.tensor([_sizes(upload.evidence(prefix)) for upload in uploads], dtype=torch.float64)
        usual = size.median(0).values if prefix == INPUTS else _largest_other(size)
        times = torch.where(usual > 0, size / usual, 0.0).amax(1)
        for upload, factor in zip(uploads, times.tolist(), strict=True):
            if factor > most:
                found.setdefault(upload.client, f"{what} {factor:.2g} times as large as usual")
    return found


def _largest_other(size: Tensor) -> Tensor:
    """`(N, layers)`: of every member and layer, the largest value of another member"""
    largest, second = size.topk(2, dim=0).values
    return torch.where(size == largest, second, largest)


def _sizes(evidence: Mapping[str, Tensor]) -> list[float]:
    """Of every layer, in the order of their names: the sum of the diagonal of a matrix, or of all numbers."""
    ordered = sorted(evidence.items())
    return [float((t if name.startswith(FISHER) else packed_diagonal(t)).double().sum()) for name, t in ordered]
