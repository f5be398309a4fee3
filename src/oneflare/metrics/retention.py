"""How much accuracy a distilled model keeps of its teacher, and what it saves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from oneflare.models.base import Cost


@dataclass(frozen=True)
class Retention:
    """A distilled model beside the one it was distilled from, on the same test images."""

    name: str
    """the teacher's fusion"""
    accuracy: float
    """the teacher's"""
    kept: float
    """the student's accuracy as a part of the teacher's; above 1 where the student is better"""
    agreement: float
    """share of images on which both choose the same class"""
    parameters: int
    forward_passes: int
    parameters_ratio: float
    """how many times more parameters the teacher has"""
    passes_ratio: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def retention(name: str, student: Tensor, teacher: Tensor, labels: Tensor, cost: Cost, teacher_cost: Cost) -> Retention:
    """name: of the teacher's fusion; logits of both `(n, C)`, labels `(n,)`"""
    chosen, wanted = student.argmax(1), teacher.argmax(1)
    own, theirs = (float((answer == labels).double().mean()) for answer in (chosen, wanted))
    return Retention(
        name=name,
        accuracy=theirs,
        kept=own / max(theirs, 1 / len(labels)),
        agreement=float((chosen == wanted).double().mean()),
        parameters=teacher_cost.parameters,
        forward_passes=teacher_cost.forward_passes,
        parameters_ratio=teacher_cost.parameters / cost.parameters,
        passes_ratio=teacher_cost.forward_passes / cost.forward_passes,
    )
