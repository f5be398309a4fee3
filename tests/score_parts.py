"""Small made-up scores of members, as `oneflare evaluate --out` would write them."""

from __future__ import annotations

import torch

from oneflare._version import __version__
from oneflare.core.files import digest_of
from oneflare.federation.scores import MemberScores
from oneflare.metrics.figures import compared, figures_of

CLASSES = ("benign", "melanoma", "naevus")


def answers(labels: torch.Tensor, classes: int, right: float, seed: int) -> torch.Tensor:
    """Logits `(n, C)` of which about the share `right` has its highest value at the true class."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(labels), classes, generator=generator, dtype=torch.float64)
    hit = torch.rand(len(labels), generator=generator) < right
    target = torch.where(hit, labels, (labels + 1 + torch.arange(len(labels)) % (classes - 1)) % classes)
    logits[torch.arange(len(labels)), target] += 3 + torch.rand(len(labels), generator=generator)
    return logits


def example_scores(
    member: str = "north",
    *,
    supports: tuple[int, ...] = (40, 25, 30),
    right: float = 0.9,
    alone: float | None = 0.7,
    seed: int = 0,
    **fields,
) -> MemberScores:
    """One member's scores: `supports` test images of each class, two of each patient, unsigned.

    fields: those of `MemberScores` that should differ, and `names`, `patients` (False: not known).
    """
    names = fields.pop("names", CLASSES[: len(supports)])
    labels = torch.arange(len(supports)).repeat_interleave(torch.tensor(supports))
    patients = torch.arange(len(labels)) // 2 if fields.pop("patients", True) else None
    limit = fields.setdefault("smallest_group", 5)
    together = answers(labels, len(supports), right, seed)
    own = None if alone is None else answers(labels, len(supports), alone, seed + 1000)
    standard = {
        "oneflare": __version__,
        "federation": digest_of("federation"),
        "member": member,
        "created": "2027-01-31T12:00:00+00:00",
        "model": digest_of("model"),
        "test": digest_of(["test", member]),
        "together": figures_of(together, labels, names, patients, limit),
        "alone": None if own is None else figures_of(own, labels, names, patients, limit),
        "own": None if own is None else digest_of(["own", member]),
        "comparison": None if own is None else compared(together, own, labels, patients),
    }
    return MemberScores(**(standard | fields))
