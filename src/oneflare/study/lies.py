"""Changes finished uploads so that they give false statistics, evidence or numbers of images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from oneflare.core.files import digest_of, tensor_digest, write_bytes
from oneflare.upload import COUNTS, EVIDENCE, MANIFEST, STATISTICS, Upload, read_tensors
from oneflare.upload.evidence import BACKGROUND, BACKGROUND_MEAN, DENSITY, DENSITY_MEANS, HEAD, INPUTS, WITHIN
from oneflare.upload.symmetric import triangle, unpack_symmetric

REPEATED = 7
"""how often whoever claims more says to have every image"""
AWAY = 20.0
"""how far a background is moved, in every coordinate of the features' roots, which are mostly below 3"""
WIDE = 1e4
"""times what a covariance is"""

Lie = Callable[[dict[str, Tensor]], None]
"""changes what a finished upload says, in place"""


def negated_sums(tensors: dict[str, Tensor]) -> None:
    """statistics whose sums are multiplied by -100,000, so that every class means its opposite"""
    tensors[STATISTICS + "sums"].mul_(-1e5)


def exchanged_sums(tensors: dict[str, Tensor]) -> None:
    """statistics in which every class has another class's mean"""
    counts, sums = tensors[STATISTICS + "counts"], tensors[STATISTICS + "sums"]
    held = (counts > 0).nonzero().flatten()
    means = sums[held] / counts[held, None]
    sums[held] = means.roll(1, 0) * counts[held, None]


def indefinite_evidence(tensors: dict[str, Tensor]) -> None:
    """second moments of which every pair is possible and all together are not"""
    for name, tensor in tensors.items():
        if name.startswith(EVIDENCE + INPUTS):
            diagonal = unpack_symmetric(tensor).diagonal()
            root = diagonal.sqrt()
            matrix = -0.9 * root[:, None] * root + torch.diag(1.9 * diagonal)
            tensor.copy_(matrix.masked_select(triangle(len(matrix))))


def loud_evidence(tensors: dict[str, Tensor]) -> None:
    """second moments a million times too large, to win every weighted average"""
    for name, tensor in tensors.items():
        if name.startswith(EVIDENCE + INPUTS) and not name.endswith(HEAD):
            tensor.mul_(1e6)


def far_background(tensors: dict[str, Tensor]) -> None:
    """a background far from everything, so that every image looks like one of the member's classes"""
    tensors[EVIDENCE + BACKGROUND_MEAN].add_(AWAY)


def wide_background(tensors: dict[str, Tensor]) -> None:
    """a background that is spread so thinly that every image looks like one of the member's classes"""
    tensors[EVIDENCE + BACKGROUND].mul_(WIDE)


def narrow_background(tensors: dict[str, Tensor]) -> None:
    """a background so narrow that no image looks like it"""
    tensors[EVIDENCE + BACKGROUND].div_(WIDE)


def wide_classes(tensors: dict[str, Tensor]) -> None:
    """classes that are everywhere, and a background that is nowhere near"""
    tensors[EVIDENCE + WITHIN].mul_(100)
    tensors[EVIDENCE + BACKGROUND].div_(100)
    tensors[EVIDENCE + BACKGROUND_MEAN].add_(5 * AWAY)


def narrow_classes(tensors: dict[str, Tensor]) -> None:
    """classes so narrow that no image belongs to them: the member says nothing about its own images"""
    tensors[EVIDENCE + WITHIN].div_(WIDE)


def exchanged_densities(tensors: dict[str, Tensor]) -> None:
    """densities in which every class has another class's mean"""
    held = (tensors[COUNTS] > 0).nonzero().flatten()
    means = tensors[EVIDENCE + DENSITY_MEANS]
    means[held] = means[held].roll(1, 0)


LIES: dict[str, tuple[str, Lie]] = {
    "negated_sums": (STATISTICS, negated_sums),
    "exchanged_sums": (STATISTICS, exchanged_sums),
    "indefinite_evidence": (EVIDENCE + INPUTS, indefinite_evidence),
    "loud_evidence": (EVIDENCE + INPUTS, loud_evidence),
    **{
        lie.__name__: (EVIDENCE + DENSITY, lie)
        for lie in (
            far_background,
            wide_background,
            narrow_background,
            wide_classes,
            narrow_classes,
            exchanged_densities,
        )
    },
}
"""attack -> how the tensors are called that it needs, what it does to them"""


def claiming_more(tensors: dict[str, Tensor]) -> None:
    """The same upload as if every image had been there `REPEATED` times."""
    for name, tensor in tensors.items():
        if name == COUNTS or name.startswith(STATISTICS):
            tensor.mul_(REPEATED if not name.endswith("#scale") else REPEATED**0.5)


def rewritten(upload: Upload, target: Path, lie: Lie) -> Path:
    """An upload that says something else and whose digests are right all the same."""
    from safetensors.torch import save

    tensors = read_tensors(upload.path, upload.manifest)
    lie(tensors)
    manifest = {key: value for key, value in upload.manifest.items() if key not in ("digest", "signature")}
    if COUNTS in tensors:
        manifest["samples"] = int(tensors[COUNTS].sum())
    manifest["tensors"] = {name: tensor_digest(tensor) for name, tensor in sorted(tensors.items())}
    manifest["digest"] = digest_of(manifest)
    write_bytes(target, save(tensors, metadata={MANIFEST: json.dumps(manifest, sort_keys=True)}))
    return target
