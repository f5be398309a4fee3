"""Members that contradict each other about classes: found without any image, and approved by name or not fused.

What is compared are the uploads alone (`oneflare.fusion.trust.exchanged`). Where only one member has a class there is
nobody to compare it with, and that is said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from oneflare.fusion import UploadSet
from oneflare.fusion.trust.exchanged import LEAST_IMAGES, Exchange, alone, comparable, find_exchanges

SHOWN = 6
"""members whose classes are listed; of the others there is a number"""


@dataclass(frozen=True)
class Contradiction:
    """Two classes that one of these members calls by each other's names."""

    members: tuple[str, ...]
    """more than one where nobody else can say which of them it is"""
    classes: tuple[str, str]
    agreement: float
    """of the first of them with the others, where 1 is the same and -1 the opposite"""
    against: tuple[str, ...]
    """other members that they contradict"""
    share: tuple[float, float]
    """percent of all images of the two classes that the members claim to have"""

    def __str__(self) -> str:
        first, second = self.classes
        how = f"agreement {self.agreement:.2f}, where 1 is the same and -1 the opposite"
        have = f"{self.share[0]:.0f} % and {self.share[1]:.0f} % of all images of these classes"
        if len(self.members) == 1:
            whom = f"{_list(self.against)} know as" if self.against else "the others know as"
            return f"calls '{first}' what {whom} '{second}', and the reverse ({how}), and claims {have}"
        return f"contradict each other about which is '{first}' and which is '{second}' ({how}), and claim {have}"

    @property
    def refusal(self) -> str:
        """What the coordinator is told, and can do about it."""
        removing = " or ".join(f"--remove {name}" for name in self.members)
        approving = " ".join(f"--approve {name}" for name in self.members)
        alone = "" if len(self.members) == 1 else ", and nobody else can say which of them is right"
        return (
            f"{_list(self.members)} {self}{alone}; nothing was changed. Ask them whether two classes were exchanged; "
            f"{removing} fuses without them, {approving} accepts it"
        )


def contradictions(uploads: UploadSet, names: Mapping[int, str], left_out: Collection[int]) -> Iterator[Contradiction]:
    """Contradictions among the members that the fusion keeps. left_out: clients that it does not"""
    kept = tuple(upload for upload in uploads if upload.client not in left_out)
    if len(kept) < 2 or not comparable(uploads):
        return
    for group, exchange in find_exchanges(uploads.without(set(left_out))):
        yield _named(uploads, group, exchange, names)


def _named(uploads: UploadSet, group: UploadSet, exchange: Exchange, names: Mapping[int, str]) -> Contradiction:
    first, second = exchange.classes
    clients = [group.uploads[row].client for row in exchange.members]
    counts = {upload.client: upload.counts for upload in uploads if upload.counts is not None}
    shares = []
    for label in exchange.classes:
        total = sum(float(held[label]) for held in counts.values())
        theirs = sum(float(counts[client][label]) for client in clients if client in counts)
        shares.append(100 * theirs / max(total, 1.0))
    return Contradiction(
        tuple(names[client] for client in clients),
        (uploads.contract.classes[first], uploads.contract.classes[second]),
        exchange.agreement,
        tuple(names[group.uploads[row].client] for row in exchange.against),
        (shares[0], shares[1]),
    )


def unchecked(uploads: UploadSet, names: Mapping[int, str]) -> dict[str, tuple[str, ...]]:
    """Member -> its classes of which nobody else has enough images, so that its labels cannot be checked."""
    if not comparable(uploads) or "counts" not in uploads.offered:
        return {}
    classes = uploads.contract.classes
    return {
        names[uploads.uploads[row].client]: tuple(classes[label] for label in labels)
        for row, labels in alone(uploads.counts).items()
    }


def unchecked_note(found: Mapping[str, tuple[str, ...]]) -> str:
    """One line about classes with a single owner."""
    told = [f"{_list([repr(label) for label in labels])} of {name}" for name, labels in list(found.items())[:SHOWN]]
    more = [] if len(found) <= SHOWN else [f"those of {len(found) - SHOWN} more members"]
    return (
        f"nobody else has {LEAST_IMAGES} images of these classes, so their labels cannot be checked: "
        f"{'; '.join([*told, *more])}"
    )


def _list(words: Collection[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
