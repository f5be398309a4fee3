"""The coordinator's side of a federation: fuses a folder of uploads into one model with its card.

The federation's folder keeps a copy of every upload that was fused, so members join (`add`) and leave (`remove`)
later and the result is exactly that of a fresh fusion of whoever is in: a function of the uploads, in order of name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oneflare._version import __version__
from oneflare.client.observer import Observer
from oneflare.core.files import exclusive, remove_partial
from oneflare.data import Split
from oneflare.errors import OneFlareError, RunError, did_you_mean
from oneflare.federation.admission import AdmissionResult, admitted, check_approved, compared, refuse_faulty
from oneflare.federation.charter import Charter, read_charter
from oneflare.federation.identity import now
from oneflare.federation.intake import Examination, Intake, take_in
from oneflare.federation.log import Event
from oneflare.federation.masked.opening import Total, open_total
from oneflare.federation.masked.rounds import RoundFiles, closed_history
from oneflare.federation.model_signing import coordinator_key, sign_fusion
from oneflare.federation.opening import Opener, decrypted
from oneflare.federation.quorum import Rules, check_enough
from oneflare.federation.recording import decision_events, fusion_event, intake_events, release_event, write_down
from oneflare.federation.result import (
    FederationIdentity,
    FederationResult,
    FusedModel,
    MaskedTotal,
    MemberResult,
    change_since,
)
from oneflare.federation.versions import MODEL, MODELS, FederationFiles, install, keep_version, prepared, upload_files
from oneflare.fusion import UploadSet, check_needs, without_faulty
from oneflare.fusion.trust.suspects import find_suspects
from oneflare.metrics import TimedFusion, fuse_timed, score_all
from oneflare.nn.hardware import choose_device, one_thread
from oneflare.upload import Upload


@dataclass(frozen=True)
class FusedFederation:
    """A fusion of real members."""

    charter: Charter
    files: FederationFiles
    content: FederationResult


def fuse_federation(
    folder: Path,
    *,
    uploads: Path | None = None,
    add: Sequence[Path] = (),
    remove: Sequence[str] = (),
    rules: Rules | None = None,
    test: Split | None = None,
    observer: Observer | None = None,
) -> FusedFederation:
    """Verify, choose, fuse, write model and result. Without `uploads`, those of the last fusion are taken again.

    Where too few members are left nothing is changed (`Rules.min_members`). Every version stays in `models/`.

    test: held-out images the coordinator may have; otherwise the model stays unmeasured.
    """
    rules, observer = rules or Rules(), observer or Observer()
    coordinator_key(read_charter(folder), folder)  # a wrong key is found before the work
    with exclusive(folder):
        charter = read_charter(folder)
        remove_partial(folder)
        try:
            with decrypted(charter, folder) as opened:
                sent = Sent(uploads, add, remove, opened)
                return _fuse_sent(sent, charter, FederationFiles(folder), rules, test, observer)
        except OneFlareError as error:
            write_down(charter, folder, [Event("failed", {"reason": str(error)})])
            raise


@dataclass(frozen=True)
class Sent:
    """What a fusion is asked to look at: a folder of uploads, single files, and who leaves."""

    uploads: Path | None
    add: Sequence[Path]
    remove: Sequence[str]
    opened: Opener


def _fuse_sent(
    sent: Sent, charter: Charter, files: FederationFiles, rules: Rules, test: Split | None, observer: Observer
) -> FusedFederation:
    """`fuse_federation` while the folder is held: what comes in, who leaves, what is made of it, all written down."""
    folder, last = files.folder, files.last()
    intake = _examined(charter, files, sent, rules)
    intake, removed = _without(charter, intake, sent.remove, files.known().removed)
    write_down(charter, folder, intake_events(intake, sent.remove))
    total = _total(charter, folder, intake, rules, observer)
    for note in intake.notes:
        observer.note(note)
    check_enough(intake, rules, charter, last, removed)
    observer.note(f"fusing {len(intake.uploads)} upload{'s' if len(intake.uploads) > 1 else ''}")
    with one_thread(), prepared(files) as place:
        collected = UploadSet(
            tuple(intake.uploads.values()),
            charter.masked_contract,
            charter.template(),
            total=None if total is None else total.statistics,
            device=choose_device(charter.terms.train.device),
        )
        names = {upload.client: name for name, upload in intake.uploads.items()}

        def work(kept: UploadSet) -> tuple[dict[str, str], AdmissionResult | None, dict[str, FusedModel]]:
            suspects = _suspects(kept, names)
            for warning in suspects.values():
                observer.note(warning)
            check_approved(rules.admission, names)
            checked = admitted(rules.admission, charter.terms.fusions[0], kept, names, observer)
            made = _fuse(charter, kept)
            left_out = {suspect.client for suspect in made[0].fused.suspects if suspect.left_out}
            checked = compared(rules.admission, checked, kept, names, left_out, observer)
            return suspects, checked, _saved(made, place, kept, test)

        (suspects, checked, fusions), faults = without_faulty(collected, work)
        intake = refuse_faulty(intake, faults)
        for fault in faults:
            observer.note(f"{names[fault.client]} is refused, and everybody else was fused again: {fault}")
        check_enough(intake, rules, charter, last, removed)
        content = _result(charter, intake, fusions, removed)
        content = replace(content, suspects=suspects, admission=checked, masked=_masked_facts(total))
        if test is not None:
            content = replace(content, test_images=len(test.labels))
        content = replace(content, change=change_since(last, content))
        content = replace(content, log=write_down(charter, folder, decision_events(checked, faults, names)))
        content = install(files, content, intake.uploads, removed)
    write_down(charter, folder, [fusion_event(files, content)])
    release(charter, files, content, observer)
    return FusedFederation(charter, files, content)


def release(charter: Charter, files: FederationFiles, content: FederationResult, observer: Observer) -> None:
    """Sign the result in use and its models, write that down, and keep the version."""
    unsigned = sign_fusion(charter, files.folder, content)
    if unsigned is not None:
        observer.note(unsigned)
    else:
        write_down(charter, files.folder, [release_event(charter, content)])
    keep_version(files, content)


def _examined(charter: Charter, files: FederationFiles, sent: Sent, rules: Rules) -> Intake:
    """The verdict on every file that takes part in this fusion."""
    kept, uploads, add = files.kept(), sent.uploads, sent.add
    if charter.terms.upload.masked is not None:
        if rules.keep or rules.late:
            raise RunError("--keep, --late: who is in the total was decided by `server missing`; leave these out")
        sources = [] if uploads is None else upload_files(uploads)
        known = closed_history(charter, files.folder)
        return take_in(
            charter, [*RoundFiles(files.folder).kept(), *sources], add, known=known, late=True, opened=sent.opened
        )
    sources = upload_files(uploads) if uploads is not None else kept
    if not sources and not add:
        where = f"in {uploads}" if uploads is not None else "yet; give --uploads FOLDER"
        raise RunError(f"there is no upload {where}")
    late = rules.late or uploads is None
    fallback = kept if rules.keep and uploads is not None else ()
    return take_in(charter, sources, add, known=files.known(), late=late, opened=sent.opened, fallback=fallback)


def _total(charter: Charter, folder: Path, intake: Intake, rules: Rules, observer: Observer) -> Total | None:
    """The opened sums of the round, where they are masked."""
    if charter.terms.upload.masked is None:
        if rules.releases is not None:
            raise RunError("--releases: the sums of this federation are not masked, so there is nothing to release")
        return None
    if rules.admission.images is not None:
        raise RunError(
            "--check-images: what each member does cannot be checked where sums are masked, because no model can be "
            "made without one of them; leave it out, and measure the model with --test"
        )
    return open_total(charter, folder, intake.uploads, rules.releases, observer)


def _masked_facts(total: Total | None) -> MaskedTotal | None:
    """What a result says of masked sums."""
    if total is None:
        return None
    roster = total.roster
    return MaskedTotal(roster.number, roster.digest, roster.threshold, tuple(total.counts), total.request.created)


def _without(
    charter: Charter, intake: Intake, remove: Sequence[str], removed: Mapping[str, str]
) -> tuple[Intake, dict[str, str]]:
    """The intake without those who leave, and who has left by now."""
    left = {name: when for name, when in removed.items() if name not in intake.uploads}
    verdicts = list(intake.verdicts)
    known = {*intake.uploads, *charter.members, *removed, *(v.member for v in verdicts if v.member)}
    for name in remove:
        if name in intake.uploads and charter.terms.upload.masked is not None:
            raise RunError(
                f"cannot remove '{name}' from a total of masked sums; `oneflare server roster --without {name}` signs "
                "a roster for a new total of the others, who upload again without training"
            )
        if name not in known:
            raise RunError(f"cannot remove '{name}': no such member{did_you_mean(name, known)}")
        left[name] = now()
        for index, verdict in enumerate(verdicts):
            if verdict.member == name and verdict.status == "in":
                verdicts[index] = replace(verdict, status="removed", reason="removed now")
    uploads = {name: upload for name, upload in intake.uploads.items() if name not in remove}
    return Intake(uploads, tuple(verdicts), intake.notes), left


def _suspects(uploads: UploadSet, names: Mapping[int, str]) -> dict[str, str]:
    """Members whose well-formed uploads do not fit the others', with a warning for the coordinator."""
    return {names[found.client]: found.warning(names[found.client]) for found in find_suspects(uploads)}


def _fuse(charter: Charter, collected: UploadSet) -> list[TimedFusion]:
    """Every fusion of the charter; the first is the federation's own."""
    specs = charter.terms.fusions
    check_needs(specs, collected.offered, "; change experiment.fusions")
    return [fuse_timed(spec, collected) for spec in specs]


def _saved(made: Sequence[TimedFusion], place: Path, collected: UploadSet, test: Split | None) -> dict[str, FusedModel]:
    """Models in a folder, and measured where there are test images."""
    measured = [] if test is None else score_all(made, collected, test)
    scores = {one.name: one.scores for one in measured}
    outcome: dict[str, FusedModel] = {}
    for index, (name, model) in enumerate((one.name, one.model) for one in made):
        path = place / (MODEL if index == 0 else f"{MODELS}/{name}.safetensors")
        model.save(path)
        outcome[name] = FusedModel(
            model=str(path.relative_to(place)),
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
            parameters=model.cost.parameters,
            forward_passes=model.cost.forward_passes,
            scores=scores.get(name),
        )
    return outcome


def _result(
    charter: Charter,
    intake: Intake,
    fusions: dict[str, FusedModel],
    removed: Mapping[str, str],
) -> FederationResult:
    """The result of a first fusion without test images, in which nobody is suspect and nobody was checked."""
    terms, present = charter.terms, intake.uploads
    taken = {verdict.member: verdict for verdict in intake.verdicts if verdict.status == "in"}
    return FederationResult(
        oneflare=__version__,
        federation=FederationIdentity(charter.name, charter.id, charter.fingerprint),
        fused=now(),
        method=terms.method,
        encoder=charter.contract.encoder,
        classes=tuple(charter.classes),
        counts_mode=terms.upload.counts,
        headline=terms.fusions[0]["name"],
        fusions=fusions,
        test_images=None,
        members=tuple(_member(name, upload, taken[name]) for name, upload in present.items()),
        missing=tuple(name for name in _expected(charter) if name not in present and name not in removed),
        removed=dict(removed),
        verdicts=intake.verdicts,
        notes=intake.notes,
        suspects={},
        admission=None,
        change=None,
    )


def _member(name: str, upload: Upload, verdict: Examination) -> MemberResult:
    return MemberResult(
        name=name,
        samples=upload.samples,
        counts=None if upload.counts is None else tuple(int(count) for count in upload.counts),
        created=upload.manifest["created"],
        signed=verdict.signed,
        upload_bytes=upload.file_bytes,
        digest=upload.digest,
        file=verdict.file,
    )


def _expected(charter: Charter) -> list[str]:
    """Members who could have sent: those of the charter, and of the roster where sums are masked."""
    return list(dict.fromkeys([*charter.members, *(() if charter.roster is None else charter.roster.names)]))


def read_fused(folder: Path) -> FederationResult:
    """The result of the last fusion."""
    last = FederationFiles(folder).last()
    if last is None:
        raise RunError(f"{folder} has no result yet; `oneflare server fuse` makes one")
    return last
