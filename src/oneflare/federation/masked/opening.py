"""Opens the total: takes all masks off the sum of the masked uploads with what the members have released.

    total = sum over uploaded i of ( y_i - PRG(b_i) - sum over missing j of +-PRG(s_ij) )    (mod 2^64)

Every released secret is compared with the commitment in the upload that it belongs to, so a wrong one is refused with
the name of whoever sent it. Nothing is opened before everything that is needed is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oneflare.client.observer import Observer
from oneflare.core.files import write_bytes
from oneflare.errors import RunError, UploadError
from oneflare.federation.charter import Charter
from oneflare.federation.masked.enrolment import checked_roster
from oneflare.federation.masked.files import kind_of, read_message
from oneflare.federation.masked.release import RELEASE, SUFFIX, Release
from oneflare.federation.masked.rounds import Request, RoundFiles, note_of, open_request
from oneflare.upload import Upload
from oneflare.upload.masking.fixed_point import counts_of, from_vector, vector_size
from oneflare.upload.masking.masks import SEED_BYTES, Words, add_stream, commitment
from oneflare.upload.masking.message import PAIR, PERSONAL, SHARE, MaskedNote, decoded
from oneflare.upload.masking.roster import Roster
from oneflare.upload.masking.shamir import SHARE_BYTES, join
from oneflare.upload.statistics import Statistics, complaint, limits_of, pack


@dataclass(frozen=True)
class Round:
    """A closed round, and what its uploads say of their masks."""

    roster: Roster
    request: Request
    notes: Mapping[str, MaskedNote]


@dataclass(frozen=True)
class Total:
    """The opened sums of everybody in the round."""

    vector: Tensor
    """int64, as in `oneflare.upload.masking.fixed_point`"""
    statistics: Statistics
    roster: Roster
    request: Request

    @property
    def counts(self) -> list[int]:
        """Images of each class over all members in the total."""
        return [int(count) for count in counts_of(self.vector, len(self.statistics.counts))]


def open_total(
    charter: Charter, folder: Path, uploads: Mapping[str, Upload], releases: Path | None, observer: Observer
) -> Total:
    """The total over the members of the closed round, refused where no images could give it.

    uploads: exactly those of the request. releases: a folder with answers of members; those that came before are kept.
    The observer hears of each release that cannot be used.
    """
    closed, vector = open_vector(charter, folder, uploads, releases, observer)
    return checked_total(charter, closed, vector)


def open_vector(
    charter: Charter, folder: Path, uploads: Mapping[str, Upload], releases: Path | None, observer: Observer
) -> tuple[Round, Words]:
    """The round, and the sum of its uploads without masks."""
    roster, request = checked_roster(charter), open_request(charter, folder)
    lost = sorted(set(request.uploaded) ^ set(uploads))
    if lost:
        raise RunError(
            f"the upload of {' and '.join(lost)} that is in the closed round is not usable here, and a total cannot be "
            "opened without it; put the very file back among the uploads"
        )
    closed = Round(roster, request, {name: note_of(upload, roster) for name, upload in uploads.items()})
    answers, refused = _collect(closed, RoundFiles(folder), releases)
    for line in refused:
        observer.note(line)
    check_enough(closed, answers)
    words = ((name, upload.words().numpy().view(np.uint64)) for name, upload in uploads.items())
    return closed, unmasked(closed, words, answers)


def _collect(closed: Round, files: RoundFiles, folder: Path | None) -> tuple[dict[str, Release], list[str]]:
    """Usable releases by member; new ones are kept in the federation's folder."""
    if folder is not None and not folder.is_dir():
        raise RunError(f"no folder at {folder}; give the one in which the releases were collected")
    given = [] if folder is None else [path for path in folder.rglob("*.json") if _looks_like(path)]
    answers: dict[str, Release] = {}
    refused: list[str] = []
    for path in [*sorted(files.releases.glob(f"*{SUFFIX}")), *sorted(given)]:
        try:
            answer = read_message(path, RELEASE, Release)
            check_release(path, answer, closed)
        except UploadError as error:
            refused.append(f"left out: {error}")
            continue
        if answer.member not in answers:
            answers[answer.member] = answer
            kept = files.releases / f"{answer.member}{SUFFIX}"
            if path != kept:
                write_bytes(kept, path.read_bytes())
    return answers, refused


def _looks_like(path: Path) -> bool:
    return path.is_file() and (path.name.endswith(SUFFIX) or kind_of(path) == RELEASE)


def check_release(path: Path, answer: Release, closed: Round) -> None:
    """Refuse an answer to another request, or one with a secret that is not the one the uploads commit to."""
    roster, request = closed.roster, closed.request
    if answer.federation != request.federation or answer.roster != roster.digest:
        raise UploadError(f"{path}: answers for another federation or roster; the member must answer this request")
    if answer.request != request.digest:
        raise UploadError(f"{path}: answers another request than the one of {request.created[:16]}; ask for a new one")
    roster.position(answer.member)
    missing = set(request.missing(roster)) if answer.member in request.uploaded else set()
    if not set(answer.shares) <= set(request.uploaded) or set(answer.pairs) != missing:
        raise UploadError(f"{path}: does not answer for the members that the request names; ask {answer.member} again")
    for name, text in answer.shares.items():
        share = decoded(text, SHARE_BYTES)
        if share is None or commitment(SHARE, share) != closed.notes[name].shares[answer.member]:
            raise UploadError(f"{path}: the share of {name}'s mask is not the one that {name} gave {answer.member}")
    for name, text in answer.pairs.items():
        seed = decoded(text, SEED_BYTES)
        if seed is None or commitment(PAIR, seed) != closed.notes[answer.member].pairs[name]:
            raise UploadError(f"{path}: the seed in common with {name} is not the one that {answer.member} masked with")


def check_enough(closed: Round, answers: Mapping[str, Release]) -> None:
    """Say whom to ask while something is lacking."""
    roster, request = closed.roster, closed.request
    here = ", ".join(sorted(answers)) or "nobody"
    silent = [name for name in request.uploaded if name not in answers]
    missing = request.missing(roster)
    if missing and silent:
        raise RunError(
            f"nothing can be opened yet: {' and '.join(missing)} sent no upload, so everybody who did must answer the "
            f"request; ask {', '.join(silent)} to run `oneflare client release` (answered: {here}). If somebody never "
            "will, sign a new roster without them; members then upload again without training"
        )
    for name in request.uploaded:
        have = sum(name in answer.shares for answer in answers.values())
        if have < roster.threshold:
            others = [other for other in roster.names if other not in answers]
            raise RunError(
                f"nothing can be opened yet: {have} of {roster.threshold} needed answers are here for {name}'s mask "
                f"({here}); ask {', '.join(others) or 'for new answers'} to run `oneflare client release`"
            )


def unmasked(closed: Round, uploads: Iterable[tuple[str, Words]], answers: Mapping[str, Release]) -> Words:
    """The sum of all uploads without masks; one upload is in memory at a time, beside the sum.

    uploads: members with their masked sums, which may be overwritten. answers: enough, and checked.
    """
    roster, missing = closed.roster, closed.request.missing(closed.roster)
    total: Words | None = None
    for name, words in uploads:
        total = words if total is None else np.add(total, words, out=total)
        del words  # before the next one is read
        add_stream(total, _personal(closed, name, answers), -1)
        for other in missing:
            seed = decoded(answers[name].pairs[other], SEED_BYTES)
            assert seed is not None
            add_stream(total, seed, -1 if roster.position(name) < roster.position(other) else 1)
    assert total is not None
    return total


def _personal(closed: Round, name: str, answers: Mapping[str, Release]) -> bytes:
    """b_i from the first t shares that were released."""
    shares: dict[int, bytes] = {}
    for holder in sorted(answers):
        share = decoded(answers[holder].shares.get(name), SHARE_BYTES)
        if share is not None and len(shares) < closed.roster.threshold:
            shares[closed.roster.position(holder)] = share
    try:
        seed = join(shares)
    except ValueError:
        seed = b""
    if commitment(PERSONAL, seed) != closed.notes[name].personal:
        raise RunError(
            f"the shares of {name}'s mask do not give the mask that {name} committed to: {name} shared another one; "
            f"sign a new roster, without {name} if it does not explain this"
        )
    return seed


def checked_total(charter: Charter, closed: Round, vector: Words) -> Total:
    """The total, refused where no images could give it."""
    contract = charter.contract
    assert contract.fixed is not None
    classes, plan = len(contract.classes), contract.statistics
    dim = 0 if plan is None else plan.dim
    signed = torch.from_numpy(vector.view(np.int64))
    assert len(signed) == vector_size(classes, dim)
    statistics = from_vector(signed, classes, dim, contract.fixed)
    total = Total(signed, statistics, closed.roster, closed.request)
    reason = implausible_total(total, contract.fixed.largest(_declared(closed), dim), _declared(closed))
    if reason is None and plan is not None:
        limits = limits_of(plan, contract.image.channels, contract.image.size)
        limits = limits.rounded(contract.fixed.clip, 2.0**-contract.fixed.bits)
        reason = complaint(pack(statistics), sum(total.counts), limits)
    if reason is not None:
        raise RunError(
            f"the opened total is not a possible sum over images ({reason}): somebody added other numbers or masks "
            "than agreed, and masked sums do not show who. Ask the members; a new roster can leave some out"
        )
    return total


def _declared(closed: Round) -> int:
    """Images that the members in the total enrolled with."""
    return sum(closed.roster.entry(name).images for name in closed.request.uploaded)


def implausible_total(total: Total, largest: int, images: int) -> str | None:
    """What the bounds that every member keeps by construction exclude; None: nothing."""
    counts = total.counts
    if min(counts) < 0 or sum(counts) > images:
        return f"its class counts add up to {sum(counts)}, and the members enrolled with at most {images} images"
    vector = total.vector
    if int(vector.min()) < -largest or int(vector.max()) > largest:
        return "a number is larger than the largest feature allows"
    return None
