"""Who lies in statistics: every member's class means are compared with those of the other members.

The features are the same fixed function of an image for everybody, so honest members that hold a class have nearly the
same mean of it, and by averaging over images the mean is far more certain than any image. A member whose images of
class c have the mean that the others' images of class k have, has mixed the two up, or wants others to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.evidence import INPUTS, unpack_symmetric
from oneflare.fusion.base import UploadSet
from oneflare.seeds import torch_generator
from oneflare.statistics import Statistics

SKETCH = 128
"""dimensions in which class means are compared"""
LEAST_IMAGES = 10
"""of a class, below which a member's mean of it is not judged"""
LEAST_HOLDERS = 3
"""members with a class; of two that differ nobody knows which is right"""
HALF_WAY = 0.5
"""from the mean of its own class to that of another one"""
CERTAINTY = 6.0
"""standard errors that a class mean must be off"""

LOUD = 100.0
"""second moments of a layer's inputs may be so many times the median member's"""


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


def _axes(dim: int) -> Tensor:
    """`(D, k)` orthonormal columns in random directions, the same for everybody."""
    drawn = torch.randn(dim, min(SKETCH, dim), dtype=torch.float64, generator=torch_generator(0, "sketch", dim))
    axes: Tensor = torch.linalg.qr(drawn).Q
    return axes


def mixed_up(sketches: Sequence[Sketch]) -> dict[int, list[tuple[int, int]]]:
    """Member -> the classes (c, k) where its images of c have the mean that is usual for k.

    What is usual for a class is the median over the members that hold it, coordinate by coordinate, so that neither a
    minority nor a claim to many images moves it. A member whose classes are all displaced alike (another scanner) is
    measured from there. With d from the usual mean of c to that of k, S the covariance within classes, and m how far
    the member's mean is from the usual one, it has gone the part

        t = m^T S^-1 d / d^T S^-1 d,    standard error 1/sqrt(n_c d^T S^-1 d),

    of the way to k.
    """
    counts = torch.stack([sketch.counts for sketch in sketches])
    means = torch.stack([sketch.means for sketch in sketches])
    holds = counts >= LEAST_IMAGES
    judged = holds.sum(0) >= LEAST_HOLDERS
    if int(judged.sum()) < 2:
        return {}
    labels = judged.nonzero().flatten().tolist()
    usual = torch.stack([means[holds[:, label], label].median(0).values for label in labels])
    shared = torch.stack([sketch.within for sketch in sketches]).mean(0)
    ridge = 1e-6 * shared.diagonal().mean().clamp(min=1e-30)
    inverse = torch.linalg.pinv(shared + ridge * torch.eye(len(shared), dtype=shared.dtype), hermitian=True)
    way = usual[None] - usual[:, None]  # (from, to, k)
    solved = way @ inverse
    length = (solved * way).sum(2)
    found: dict[int, list[tuple[int, int]]] = {}
    for member in range(len(sketches)):
        own = [row for row, label in enumerate(labels) if bool(holds[member, label])]
        if not own:
            continue
        offsets = means[member][[labels[row] for row in own]] - usual[own]
        if len(own) >= LEAST_HOLDERS:
            offsets = offsets - offsets.median(0).values
        for offset, row in zip(offsets, own, strict=True):
            part = (solved[row] @ offset) / length[row].clamp(min=1e-30)
            certain = part * (float(counts[member, labels[row]]) * length[row].clamp(min=0)).sqrt()
            part[row] = 0
            worst = int(part.argmax())
            if float(part[worst]) > HALF_WAY and float(certain[worst]) > CERTAINTY:
                found.setdefault(member, []).append((labels[row], labels[worst]))
    return found


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


def doubtful_sums(uploads: UploadSet) -> dict[int, str]:
    """Client -> why its statistics do not fit the others'; noised statistics are too uncertain to be judged."""
    if uploads.contract.statistics is None or uploads.plan.privacy is not None or len(uploads) < LEAST_HOLDERS:
        return {}
    found = reasons([Sketch.of(upload.statistics()) for upload in uploads], uploads.contract.classes)
    return {uploads.uploads[member].client: reason for member, reason in found.items()}


def loud_evidence(uploads: UploadSet) -> dict[int, str]:
    """Client -> why its second moments of layers' inputs do not fit the others'.

    All networks began alike and see images of one kind, so the inputs of a layer are of similar size everywhere;
    whoever claims far larger ones outweighs everybody in fusions by second moments.
    """
    if "gram" not in uploads.offered or len(uploads) < LEAST_HOLDERS:
        return {}
    sizes = []
    for upload in uploads:
        factors = upload.evidence(INPUTS)
        sizes.append([float(unpack_symmetric(factor).trace()) for _, factor in sorted(factors.items())])
    size = torch.tensor(sizes, dtype=torch.float64)
    times = (size / size.median(0).values.clamp(min=1e-30)).amax(1)
    return {
        upload.client: f"what enters its layers is {float(times[row]):.2g} times as large as usual"
        for row, upload in enumerate(uploads)
        if float(times[row]) > LOUD
    }
