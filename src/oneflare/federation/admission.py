"""Checks what each member's upload does to the model's answers before a model is written.

An upload can be signed, well-formed and plausible in every number, and still be made of images with swapped labels.
Members that share classes are therefore compared by what their uploads say of them (`oneflare.federation.comparing`),
and a member that contradicts the others must be approved by name.

Where the coordinator has labelled images, the effect tells more: the federation's own fusion is made once with
everybody and once without each member in turn, and a member that costs a class more than some points must be approved
too. Two members that do the same harm hide each other from this; capped influence (`class_share` of density_ratio and
robust_prototypes) bounds what they can do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oneflare.client.observer import Observer
from oneflare.data import Split
from oneflare.errors import MemberFault, RunError, did_you_mean
from oneflare.federation.comparing import Contradiction, contradictions, unchecked, unchecked_note
from oneflare.federation.intake import Intake
from oneflare.fusion import UploadSet, build_fusion
from oneflare.fusion.trust.exchanged import comparable

POINTS = 10.0
CERTAINTY = 2.0
"""standard deviations of chance that a loss must exceed"""


@dataclass(frozen=True)
class Admission:
    """What the coordinator checks members with.

    images: labelled images of the coordinator's own, if there are any. points: percent of a class's images that a
    member may cost without being asked about. approved: members whose effect or contradiction the coordinator accepts.
    compare: whether members are compared with each other by their uploads.
    """

    images: Split | None = None
    points: float = POINTS
    approved: tuple[str, ...] = ()
    compare: bool = True


@dataclass(frozen=True)
class Effect:
    """What one member costs one class."""

    member: str
    label: str
    images: int
    """of the coordinator, of this class"""
    without: float
    """percent answered rightly without the member"""
    including: float
    """and with it"""

    def __str__(self) -> str:
        return f"class '{self.label}' from {self.without:.0f} % to {self.including:.0f} % of {self.images} images"


@dataclass(frozen=True)
class AdmissionResult:
    """What the check of members found."""

    images: int
    """of the coordinator's own; 0: effects were not checked"""
    points: float
    approved: tuple[str, ...]
    effects: tuple[Effect, ...]
    contradictions: tuple[Contradiction, ...] | None = None
    """None where members were not compared with each other"""
    unchecked: dict[str, tuple[str, ...]] | None = None
    """member -> its classes that nobody else has; None where members were not compared"""


def compared(
    admission: Admission,
    checked: AdmissionResult | None,
    uploads: UploadSet,
    names: Mapping[int, str],
    left_out: Collection[int],
    observer: Observer,
) -> AdmissionResult | None:
    """What was checked, with contradictions and classes of a single owner where members can be compared.

    Refuses to go on while one who contradicts others is not approved. checked: their effect, None where there was no
    image to measure it on; names: client -> member; left_out: clients that the fusion leaves out by itself.
    """
    if not admission.compare or not comparable(uploads):
        return checked
    observer.note(f"comparing what {len(uploads)} members say of each other's classes")
    found = tuple(contradictions(uploads, names, left_out))
    for one in found:
        if not set(one.members) <= set(admission.approved):
            raise RunError(one.refusal)
        observer.note(f"approved: {' and '.join(one.members)} {one}")
    single = unchecked(uploads, names)
    if single:
        observer.note(unchecked_note(single))
    checked = checked or AdmissionResult(0, admission.points, admission.approved, ())
    return dataclasses.replace(checked, contradictions=found, unchecked=single)


def check_approved(admission: Admission, names: Mapping[int, str]) -> None:
    """Refuse approvals of members that do not take part."""
    for name in admission.approved:
        if name not in names.values():
            raise RunError(f"cannot approve '{name}': no such member takes part{did_you_mean(name, names.values())}")


def admitted(
    admission: Admission,
    spec: Mapping[str, Any],
    uploads: UploadSet,
    names: Mapping[int, str],
    observer: Observer,
) -> AdmissionResult | None:
    """What every member costs, for the federation's result; refuse to go on while a costly one is not approved.

    None where the coordinator has no images.

    spec: the federation's own fusion; names: client -> member.
    """
    if admission.images is None:
        return None
    labelled = len(admission.images.labels)
    observer.note(f"checking what each of {len(uploads)} members does to your {labelled} labelled images")
    found = effects(admission, spec, uploads, names)
    for member in dict.fromkeys(effect.member for effect in found):
        costs = ", ".join(str(effect) for effect in found if effect.member == member)
        if member not in admission.approved:
            raise RunError(
                f"{member} takes {costs}; nothing was changed. Ask them what they sent; --remove {member} fuses "
                f"without them, --approve {member} accepts it"
            )
        observer.note(f"approved: {member} takes {costs}")
    return AdmissionResult(labelled, admission.points, admission.approved, tuple(found))


def effects(
    admission: Admission, spec: Mapping[str, Any], uploads: UploadSet, names: Mapping[int, str]
) -> list[Effect]:
    """Losses of more than `points` that chance does not explain, by member and class, the worst first."""
    if len(uploads) < 2:
        return []
    assert admission.images is not None
    labels = admission.images.labels
    including = _right(spec, uploads, admission.images)
    found: list[Effect] = []
    for upload in uploads:
        others = dataclasses.replace(uploads, uploads=tuple(other for other in uploads if other is not upload))
        without = _right(spec, others, admission.images)
        for label, name in enumerate(uploads.contract.classes):
            chosen = labels == label
            number = int(chosen.sum())
            lost = int((without & ~including)[chosen].sum())
            gained = int((including & ~without)[chosen].sum())
            certain = lost - gained >= CERTAINTY * math.sqrt(lost + gained)
            if number and certain and 100 * (lost - gained) > admission.points * number:
                before, after = (100 * float(right[chosen].double().mean()) for right in (without, including))
                found.append(Effect(names[upload.client], name, number, before, after))
    return sorted(found, key=lambda effect: effect.including - effect.without)


def _right(spec: Mapping[str, Any], uploads: UploadSet, images: Split) -> Tensor:
    """`(n,)` whether the fused model answers each image rightly"""
    answers: Tensor = build_fusion(spec).fuse(uploads).model.logits(images.images).argmax(1)
    return answers == images.labels


def refuse_faulty(intake: Intake, faults: Sequence[MemberFault]) -> Intake:
    """The intake without the members whose uploads turned out to be of no use, each with a verdict that says why."""
    if not faults:
        return intake
    reasons = {fault.client: str(fault) for fault in faults}
    names = {name: reasons[upload.client] for name, upload in intake.uploads.items() if upload.client in reasons}
    verdicts = tuple(
        dataclasses.replace(verdict, status="refused", reason=names[verdict.member].removeprefix(f"{verdict.file}: "))
        if verdict.status == "in" and verdict.member in names
        else verdict
        for verdict in intake.verdicts
    )
    uploads = {name: upload for name, upload in intake.uploads.items() if name not in names}
    notes = tuple(f"{name} is refused: {reason}" for name, reason in names.items())
    return dataclasses.replace(intake, uploads=uploads, verdicts=verdicts, notes=(*intake.notes, *notes))
