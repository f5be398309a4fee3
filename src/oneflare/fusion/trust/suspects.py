"""Names the suspicious members, which disagree with the rest, without data; and a fusion that leaves them out.

Honest members share their start and their anchors, so their prototypes of a class lie on the way from one to the
other, and their networks give related answers to images that show nothing (`probes`) as far as they know the same
classes. Somebody who lies about labels, signs, sizes or weights breaks at least one of the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.fusion.base import FUSIONS, Fused, Fusion, Suspect, UploadSet
from oneflare.fusion.densities import MemberDensities
from oneflare.fusion.features.sums import counted_prototypes
from oneflare.fusion.trust.influence import capped_influence
from oneflare.fusion.trust.probes import probe_features
from oneflare.fusion.trust.ratios import false_densities
from oneflare.fusion.trust.sums import doubtful_sums, loud_evidence
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.members import usable
from oneflare.models.rules.sums import BoundedFeatureSum
from oneflare.nn import build_anchors
from oneflare.nn.encoders import Features
from oneflare.upload import Upload

LEAST_MEMBERS = 3
"""with fewer there is no majority that could be right"""
PROTOTYPE_AGREEMENT = 0.5
"""least mean cosine to the way from start to anchors, as a part of the members' median"""
ANSWER_AGREEMENT = 1 / 3
"""least agreement of answers, as a part of the members' median"""
EVIDENCE = 0.4
"""least overlap in classes with another member, on average, below which answers are not judged: members that know
different classes answer differently without any lie"""
LENGTH = 5.0
"""prototypes may be so many times longer or shorter than the median member's"""
FEATURE_LENGTH = 5.0
"""features of probes may be so many times longer than the median member's; short ones have no influence"""
STRETCH = 2.0
"""those of members that stay are shortened to so many times the median member's length"""
NO_ANSWER = "its network does not give every test picture a finite feature of plausible size"
COUNT_CAP = 10.0
"""a member may claim so many times the images of the median member"""


@dataclass(frozen=True)
class Fit:
    """How well every member fits the others, `(N,)` each."""

    prototypes: Tensor
    """mean cosine to the way from the shared start to the anchors, in [-1, 1]"""
    answers: Tensor
    """correlation of the answers to probes with others', over classes that both know"""
    evidence: Tensor
    """mean overlap in classes with another member, in [0, 1]"""
    length: Tensor
    """mean prototype length over the median member's"""
    features: Tensor
    """median length of the raw features of probes over the median member's"""


def way_cosine(prototypes: Tensor, start: Tensor, anchors: Tensor) -> Tensor:
    """max cos(p, a s + b t) over a, b >= 0: how near to the way from s to t a prototype is, however far it has come.

    prototypes `(N, C, d)` of length one, start and anchors `(C, d)` of any length; gives `(N, C)`.
    """
    s, t = F.normalize(start, dim=1), F.normalize(anchors, dim=1)
    to_start, to_anchor, between = (prototypes * s).sum(2), (prototypes * t).sum(2), (s * t).sum(1)
    apart = (1 - between.square()).clamp(min=1e-6)
    a, b = (to_start - between * to_anchor) / apart, (to_anchor - between * to_start) / apart
    projection = (a * to_start + b * to_anchor).clamp(min=0).sqrt()
    ends = torch.maximum(to_start, to_anchor)
    return torch.where((a > 0) & (b > 0), torch.maximum(projection, ends), ends)


@dataclass(frozen=True)
class Compared:
    """What is known of every member, and of every two of them, from which `among` makes a `Fit` of some of them."""

    prototypes: Tensor
    """`(N,)` mean cosine to the way from the shared start to the anchors"""
    length: Tensor
    """`(N,)` mean prototype length"""
    features: Tensor
    """`(N,)` median length of the raw features of probes"""
    correlation: Tensor
    """`(N, N)` of two members' answers, over classes that both know"""
    overlap: Tensor
    """`(N, N)` in classes of two members, in [0, 1], and 0 on the diagonal"""

    def among(self, rows: Tensor) -> Fit:
        """How well some members fit each other. rows: `(n,)` their numbers"""
        overlap = self.overlap[rows][:, rows]
        total = overlap.sum(1)
        return Fit(
            prototypes=self.prototypes[rows],
            answers=(overlap * self.correlation[rows][:, rows]).sum(1) / total.clamp(min=1e-12),
            evidence=total / max(len(rows) - 1, 1),
            length=_over_median(self.length[rows]),
            features=_over_median(self.features[rows]),
        )


def compared(features: Tensor, prototypes: Tensor, counts: Tensor | None, start: Tensor, anchors: Tensor) -> Compared:
    """raw features `(N, probes, d)` of the same probes, prototypes `(N, C, d)`, counts `(N, C)` or None if withheld;
    start, anchors `(C, d)`.

    A member with many images travels from the start to the anchors, one with few stays: both are on the way. Compared
    with each other, the largest honest members would look like liars.

    Answers of member i: l_ib = z_ib P_i^T, centred over probes. Members i and j are compared on class c with weight
    sqrt(p_ic p_jc), where p are their class shares; the weights' sum is their overlap.
    """
    unit = F.normalize(prototypes.float(), dim=2)
    answers = torch.einsum("nbd,ncd->nbc", F.normalize(features, dim=2), unit)
    answers = answers - answers.mean(1, keepdim=True)
    members, _, classes = answers.shape
    shares = torch.full((members, classes), 1 / classes)
    if counts is not None:
        shares = (counts / counts.sum(1, keepdim=True).clamp(min=1e-12)).float()
    root = shares.sqrt()
    weighted = (root[:, None] * answers).flatten(1)
    scale = (root * answers.square().sum(1)) @ root.T
    return Compared(
        prototypes=way_cosine(unit, start, anchors).mean(1),
        length=prototypes.norm(dim=2).mean(1),
        features=features.norm(dim=2).median(1).values,
        correlation=weighted @ weighted.T / (scale * scale.T).sqrt().clamp(min=1e-12),
        overlap=(root @ root.T).fill_diagonal_(0),
    )


def agreement(features: Tensor, prototypes: Tensor, counts: Tensor | None, start: Tensor, anchors: Tensor) -> Fit:
    """How well all members fit each other; the arguments are those of `compared`."""
    return compared(features, prototypes, counts, start, anchors).among(torch.arange(len(features)))


def _over_median(values: Tensor) -> Tensor:
    """`(N,)` as multiples of the median member's"""
    return values / values.median().clamp(min=1e-12)


def judge(
    clients: Sequence[int],
    features: Tensor,
    prototypes: Tensor,
    counts: Tensor | None,
    start: Tensor,
    anchors: Tensor,
) -> list[Suspect]:
    """Who to leave out: one at a time, the worst first, never as many as half; the rest is judged anew."""
    known = compared(features, prototypes, counts, start, anchors)
    kept = list(range(len(clients)))
    found: list[Suspect] = []
    while len(kept) >= LEAST_MEMBERS and 2 * (len(found) + 1) < len(clients):
        worst = _worst(known.among(torch.tensor(kept)))
        if worst is None:
            break
        index, reason = worst
        found.append(Suspect(clients[kept[index]], reason, "left out"))
        del kept[index]
    return found


def _worst(seen: Fit) -> tuple[int, str] | None:
    """The member that fits least, by its prototypes, then by its answers."""
    median = float(seen.prototypes.median())
    index = int(seen.prototypes.argmin())
    value = float(seen.prototypes[index])
    if median > 0 and value < PROTOTYPE_AGREEMENT * median:
        return (
            index,
            f"its prototypes agree with the common start and anchors by {value:.2f} where {median:.2f} is usual",
        )
    stretch = seen.length.clamp(min=1e-12).log().abs()
    index = int(stretch.argmax())
    if float(stretch[index]) > torch.tensor(LENGTH).log():
        return index, f"its prototypes are {float(seen.length[index]):.2g} times as long as usual"
    index = int(seen.features.argmax())
    if float(seen.features[index]) > FEATURE_LENGTH:
        return index, f"its features are {float(seen.features[index]):.2g} times as long as usual"
    judged = seen.evidence >= EVIDENCE
    if int(judged.sum()) < LEAST_MEMBERS:
        return None
    answers = torch.where(judged, seen.answers, torch.full_like(seen.answers, torch.inf))
    median = float(seen.answers[judged].median())
    index = int(answers.argmin())
    value = float(answers[index])
    if median > 0 and value < ANSWER_AGREEMENT * median:
        return index, f"its answers agree with the others' by {value:.2f} where {median:.2f} is usual"
    return None


def capped(samples: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Claims `(N,)` beyond `cap` times the median claim count as the median; also which ones were."""
    median = samples.median()
    excessive = (samples > cap * median) if len(samples) >= LEAST_MEMBERS else torch.zeros(len(samples)).bool()
    return torch.where(excessive, median, samples), excessive


def _disagreeing(uploads: UploadSet, features: Tensor, judged: Tensor) -> list[Suspect]:
    """`judge` on some of the members, `(N,)` of them."""
    start = uploads.template.prototypes.detach().float()
    anchors = build_anchors(uploads.contract.anchors, *start.shape)
    counts = uploads.counts[judged] if all(upload.counts is not None for upload in uploads) else None
    return judge(
        [upload.client for upload in _chosen(uploads, judged)],
        features[judged],
        uploads.prototypes[judged],
        counts,
        start,
        start if anchors is None else anchors.float(),
    )


def _chosen(uploads: UploadSet, judged: Tensor) -> tuple[Upload, ...]:
    return tuple(upload for upload, chosen in zip(uploads, judged.tolist(), strict=True) if chosen)


def find_suspects(
    uploads: UploadSet,
    seed: int = 0,
    count_cap: float = COUNT_CAP,
    features: Features | None = None,
    densities: MemberDensities | None = None,
) -> list[Suspect]:
    """Members whose uploads do not fit the others', with the reason; nothing but uploads is looked at.

    features: of the probes, if they are known already; densities: of the members, if they are.
    """
    samples = torch.tensor([float(upload.samples) for upload in uploads])
    clients = [upload.client for upload in uploads]
    _, excessive = capped(samples, count_cap)
    found: list[Suspect] = []
    wrong = {**loud_evidence(uploads), **doubtful_sums(uploads)}
    if uploads.contract.deep:
        features = probe_features(uploads, seed) if features is None else features
        answering = usable(features.projected.flatten(0, 1)).view(len(uploads), -1).all(1)
        silent = [client for client, answers in zip(clients, answering.tolist(), strict=True) if not answers]
        found = [Suspect(client, NO_ANSWER, "left out") for client in silent]
        if int(answering.sum()) >= LEAST_MEMBERS:
            found += _disagreeing(uploads, features.projected, answering)
            answered = dataclasses.replace(uploads, uploads=_chosen(uploads, answering))
            known = None if densities is None else densities.take(answering)
            wrong |= false_densities(answered, features.own[answering], known)
    named = {suspect.client for suspect in found}
    found += [Suspect(who, why, "left out") for who, why in wrong.items() if who not in named]
    left_out = {suspect.client for suspect in found}
    for index in excessive.nonzero().flatten().tolist():
        if clients[index] not in left_out:
            times = float(samples[index] / samples.median())
            reason = f"it claims {int(samples[index])} images, {times:.0f} times the median member's"
            found.append(Suspect(clients[index], reason, "capped"))
    return found


@FUSIONS.register("robust_prototypes")
class RobustPrototypes(Fusion):
    """count_prototypes without members that do not fit the others, with claims and lengths capped

    Every member's feature of an image is shortened to a few times the length that members give to pictures that show
    nothing. Where everybody is honest hardly anything is capped and the result is that of count_prototypes; where class
    counts were withheld, prototypes are averaged plainly.
    """

    revision = 1

    def __init__(self, *, count_cap: float = COUNT_CAP, class_share: float = 1.0, seed: int = 0) -> None:
        """count_cap: images that a member may claim, times the median member's; class_share: largest part of a class's
        prototype that one member may have where several hold the class; seed: of the probes"""
        if not count_cap >= 1:
            raise ConfigError(f"fusion robust_prototypes.count_cap: must be at least 1 (got {count_cap})")
        if not 0 < class_share <= 1:
            raise ConfigError(
                f"fusion robust_prototypes.class_share: must be above 0 and at most 1 (got {class_share})"
            )
        self.count_cap = count_cap
        self.class_share = class_share
        self.seed = seed

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        features = probe_features(uploads, self.seed)
        suspects = find_suspects(uploads, self.seed, self.count_cap, features)
        out = {suspect.client for suspect in suspects if suspect.left_out}
        trusted = torch.tensor([upload.client not in out for upload in uploads])
        claimed = torch.tensor([upload.samples for upload in uploads], dtype=torch.float64)
        believed = capped(claimed, self.count_cap)[0]
        kept = uploads.without(out)
        prototypes = evened(kept.prototypes)
        counts = torch.ones(prototypes.shape[:2], dtype=torch.float64)
        if all(upload.counts is not None for upload in kept):
            counts = kept.counts * (believed / claimed.clamp(min=1e-12))[trusted, None]
            counts = capped_influence(counts, self.class_share)
        fused = F.normalize(counted_prototypes(prototypes, counts), dim=1)
        weights = believed[trusted] / believed[trusted].sum()
        length = prototypes.norm(dim=2).mean()
        model = kept.members(BoundedFeatureSum.of(weights.float(), length * fused, features.projected[trusted]))
        return Fused(model, suspects=tuple(suspects))


def evened(prototypes: Tensor) -> Tensor:
    """`(N, C, d)` with no member's rows longer on average than `STRETCH` times the median member's"""
    lengths = prototypes.norm(dim=2).mean(1)
    factor = (STRETCH * lengths.median() / lengths.clamp(min=1e-12)).clamp(max=1)
    result: Tensor = prototypes * factor[:, None, None]
    return result
