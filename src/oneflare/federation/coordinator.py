"""The coordinator's side of a federation: fuses a folder of uploads into one model with its card.

The federation's folder keeps a copy of every upload that was fused, so members join (`add`) and leave (`remove`)
later and the result is exactly that of a fresh fusion of whoever is in: a function of the uploads, in order of name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.client.observer import Observer
from oneflare.core.files import exclusive, read_json, remove_partial
from oneflare.core.plain import plain
from oneflare.data import Split
from oneflare.errors import RunError, did_you_mean
from oneflare.federation.admission import Admission, admitted, refuse_faulty
from oneflare.federation.charter import Charter, read_charter
from oneflare.federation.identity import now
from oneflare.federation.intake import Examination, Intake, take_in
from oneflare.federation.masked.opening import Total, open_total
from oneflare.federation.masked.rounds import RoundFiles, closed_history
from oneflare.federation.versions import MODEL, MODELS, FederationFiles, install, prepared, upload_files
from oneflare.federation.vouching import coordinator_key, sign_fusion
from oneflare.fusion import UploadSet, check_needs, without_faulty
from oneflare.fusion.trust.suspects import find_suspects
from oneflare.metrics import fuse_timed, score_all
from oneflare.nn.hardware import one_thread


@dataclass(frozen=True)
class Rules:
    """Which uploads may be fused.

    late: also those made after the deadline. keep: a member that sent nothing usable now stays in with its upload of
    the last fusion. min_members: fewer members and nothing is fused; None: as many as the last fusion had, without
    those who were removed; where there was none yet, all who are admitted. admission: how members are checked by what
    they do to answers; None: they are not. releases: folder with the members' answers, where sums are masked.
    """

    late: bool = False
    keep: bool = False
    min_members: int | None = None
    admission: Admission | None = None
    releases: Path | None = None

    def least(self, charter: Charter, last: Mapping[str, Any] | None, removed: Mapping[str, str]) -> int:
        """How many members a fusion needs; who was removed does not count."""
        if self.min_members is not None:
            return self.min_members
        if charter.terms.upload.masked is not None and charter.roster is not None:
            return charter.roster.threshold
        names = charter.members if last is None else [member["name"] for member in last["members"]]
        return max(1, sum(name not in removed for name in names))


@dataclass(frozen=True)
class FusedFederation:
    """A fusion of real members."""

    charter: Charter
    files: FederationFiles
    content: dict[str, Any]


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

    Where too few members are left nothing is changed (`Rules.min_members`). The version before stays in `previous/`.

    test: held-out images the coordinator may have; otherwise the model stays unmeasured.
    """
    files, rules, observer = FederationFiles(folder), rules or Rules(), observer or Observer()
    coordinator_key(read_charter(folder), folder)  # a wrong key is found before the work
    with exclusive(folder):
        charter = read_charter(folder)
        remove_partial(folder)
        last = files.last()
        intake = _examined(charter, files, uploads, add, rules)
        intake, removed = _without(charter, intake, remove, files.known().removed)
        total = _total(charter, folder, intake, rules, observer)
        for note in intake.notes:
            observer.note(note)
        least = rules.least(charter, last, removed)
        _enough(intake, least, charter, last, removed)
        observer.note(f"fusing {len(intake.uploads)} upload{'s' if len(intake.uploads) > 1 else ''}")
        with one_thread(), prepared(files) as place:
            collected = UploadSet(
                tuple(intake.uploads.values()),
                charter.masked_contract,
                charter.template(),
                total=None if total is None else total.statistics,
            )
            names = {upload.client: name for name, upload in intake.uploads.items()}

            def work(kept: UploadSet) -> tuple[dict[str, str], dict[str, Any] | None, dict[str, dict[str, Any]]]:
                suspects = _suspects(kept, names)
                for warning in suspects.values():
                    observer.note(warning)
                checked = None
                if rules.admission is not None:
                    checked = admitted(rules.admission, charter.terms.fusions[0], kept, names, observer)
                return suspects, checked, _fuse(charter, place, kept, test)

            (suspects, checked, fusions), faults = without_faulty(collected, work)
            intake = refuse_faulty(intake, faults)
            for fault in faults:
                observer.note(f"{names[fault.client]} is refused, and everybody else was fused again: {fault}")
            _enough(intake, least, charter, last, removed)
            content = _result(charter, intake, fusions, removed, test) | {"suspects": suspects, "admission": checked}
            if total is not None:
                content["masked"] = _masked_facts(total)
            content["change"] = change(last, content)
            install(files, content, intake.uploads, removed)
        unsigned = sign_fusion(charter, folder, content)
        if unsigned is not None:
            observer.note(unsigned)
    return FusedFederation(charter, files, content)


def _examined(
    charter: Charter, files: FederationFiles, uploads: Path | None, add: Sequence[Path], rules: Rules
) -> Intake:
    """The verdict on every file that takes part in this fusion."""
    if charter.terms.upload.masked is not None:
        if rules.keep or rules.late:
            raise RunError("--keep, --late: who is in the total was decided by `server missing`; leave these out")
        sources = [] if uploads is None else upload_files(uploads)
        known = closed_history(charter, files.folder)
        return take_in(charter, [*RoundFiles(files.folder).kept(), *sources], add, known=known, late=True)
    kept = files.kept()
    sources = upload_files(uploads) if uploads is not None else kept
    if not sources and not add:
        where = f"in {uploads}" if uploads is not None else "yet; give --uploads FOLDER"
        raise RunError(f"there is no upload {where}")
    late = rules.late or uploads is None
    fallback = kept if rules.keep and uploads is not None else ()
    return take_in(charter, sources, add, known=files.known(), late=late, fallback=fallback)


def _total(charter: Charter, folder: Path, intake: Intake, rules: Rules, observer: Observer) -> Total | None:
    """The opened sums of the round, where they are masked."""
    if charter.terms.upload.masked is None:
        if rules.releases is not None:
            raise RunError("--releases: the sums of this federation are not masked, so there is nothing to release")
        return None
    if rules.admission is not None:
        raise RunError(
            "--check-images: what each member does cannot be checked where sums are masked, because no model can be "
            "made without one of them; leave it out, and measure the model with --test"
        )
    return open_total(charter, folder, intake.uploads, rules.releases, observer)


def _masked_facts(total: Total) -> dict[str, Any]:
    """What a result says of masked sums."""
    return {
        "roster": total.roster.number,
        "roster_digest": total.roster.digest,
        "threshold": total.roster.threshold,
        "counts": total.counts,
        "closed": total.request.created,
    }


def _enough(
    intake: Intake, least: int, charter: Charter, last: Mapping[str, Any] | None, removed: Mapping[str, str]
) -> None:
    """Refuse to fuse fewer members than are needed, and say who is not in and why."""
    present = intake.uploads
    if len(present) >= max(1, least):
        return
    before = [] if last is None else [member["name"] for member in last["members"]]
    reasons = [
        f"{verdict.who} ({verdict.file}) is {verdict.status}: {verdict.reason}"
        for verdict in intake.verdicts
        if verdict.status not in ("in", "superseded")
    ]
    heard = {verdict.member for verdict in intake.verdicts}
    silent = [name for name in dict.fromkeys([*before, *charter.members]) if name not in {*heard, *removed}]
    reasons += [f"{' and '.join(silent)} sent nothing"] if silent else []
    if not present:
        raise RunError(f"no usable upload, nothing was changed ({'; '.join(reasons)})")
    why = "as many as in the last fusion" if last is not None else "as many as are admitted"
    remedies = [f"--min-members {len(present)} fuses without the others"]
    if any(name not in present and name not in removed for name in before):
        remedies.append("--keep fuses the others' uploads of the last fusion again")
    raise RunError(
        f"{len(present)} usable upload{'s' if len(present) > 1 else ''} ({', '.join(present)}), but {least} are needed "
        f"({why}, unless --min-members says otherwise); nothing was changed. {'; '.join(reasons)}. "
        f"{'; '.join(remedies)}"
    )


def change(last: Mapping[str, Any] | None, content: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a fusion differs from the one before: who came, who is gone, who sent anew, which classes nobody has now."""
    if last is None:
        return None
    before, after = ({member["name"]: member for member in result["members"]} for result in (last, content))
    return {
        "since": last["fused"],
        "came": [name for name in after if name not in before],
        "gone": [name for name in before if name not in after],
        "renewed": [name for name in after if name in before and before[name]["digest"] != after[name]["digest"]],
        "lost_classes": [
            name
            for label, name in enumerate(content["classes"])
            if _images(last, label) > 0 and _images(content, label) == 0
        ],
    }


def _images(result: Mapping[str, Any], label: int) -> int:
    """Images of a class over all members; where counts are withheld, one that nobody knows of is assumed."""
    if result.get("masked"):
        return int(result["masked"]["counts"][label])
    rows = [member["counts"] for member in result["members"]]
    return 1 if None in rows else sum(row[label] for row in rows)


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
                verdicts[index] = Examination(**(verdict.to_dict() | {"status": "removed", "reason": "removed now"}))
    uploads = {name: upload for name, upload in intake.uploads.items() if name not in remove}
    return Intake(uploads, tuple(verdicts), intake.notes), left


def _suspects(uploads: UploadSet, names: Mapping[int, str]) -> dict[str, str]:
    """Members whose well-formed uploads do not fit the others', with a warning for the coordinator."""
    return {names[found.client]: found.warning(names[found.client]) for found in find_suspects(uploads)}


def _fuse(charter: Charter, place: Path, collected: UploadSet, test: Split | None) -> dict[str, dict[str, Any]]:
    """Every fusion of the charter, its model saved in a folder; the first is the federation's own."""
    specs = charter.terms.fusions
    check_needs(specs, collected.offered, "; change experiment.fusions")
    made = [fuse_timed(spec, collected) for spec in specs]
    measured = [] if test is None else score_all(made, collected, test)
    scores = {one.name: one.scores.to_dict() for one in measured}
    outcome: dict[str, dict[str, Any]] = {}
    for index, (name, model) in enumerate((one.name, one.model) for one in made):
        path = place / (MODEL if index == 0 else f"{MODELS}/{name}.safetensors")
        model.save(path)
        outcome[name] = {
            "model": str(path.relative_to(place)),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "parameters": model.cost.parameters,
            "forward_passes": model.cost.forward_passes,
            "scores": scores.get(name),
        }
    return outcome


def _result(
    charter: Charter,
    intake: Intake,
    fusions: Mapping[str, Any],
    removed: Mapping[str, str],
    test: Split | None,
) -> dict[str, Any]:
    terms = charter.terms
    present = intake.uploads
    taken = {verdict.member: verdict for verdict in intake.verdicts if verdict.status == "in"}
    return {
        "oneflare": __version__,
        "federation": {"name": charter.name, "id": charter.id, "fingerprint": charter.fingerprint},
        "fused": now(),
        "method": terms.method,
        "encoder": charter.contract.encoder,
        "classes": list(charter.classes),
        "counts_mode": terms.upload.counts,
        "headline": terms.fusions[0]["name"],
        "fusions": dict(fusions),
        "test_images": None if test is None else len(test.labels),
        "members": [
            {
                "name": name,
                "samples": upload.samples,
                "counts": None if upload.counts is None else [int(count) for count in upload.counts],
                "created": upload.manifest["created"],
                "signed": taken[name].signed,
                "upload_bytes": upload.file_bytes,
                "digest": upload.digest,
                "file": plain(upload.path),
            }
            for name, upload in present.items()
        ],
        "missing": [name for name in _expected(charter) if name not in present and name not in removed],
        "removed": dict(removed),
        "verdicts": [verdict.to_dict() for verdict in intake.verdicts],
        "notes": list(intake.notes),
    }


def _expected(charter: Charter) -> list[str]:
    """Members who could have sent: those of the charter, and of the roster where sums are masked."""
    return list(dict.fromkeys([*charter.members, *(() if charter.roster is None else charter.roster.names)]))


def read_fused(folder: Path) -> dict[str, Any]:
    """The result of the last fusion."""
    path = FederationFiles(folder).result
    if not path.exists():
        raise RunError(f"{folder} has no result yet; `oneflare server fuse` makes one")
    return dict(read_json(path))
