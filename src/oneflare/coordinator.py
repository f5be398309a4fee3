"""The coordinator's side of a real federation: a folder of uploads in, one model with its card out.

The federation's folder keeps a copy of every upload that was fused, so members join (`add`) and leave (`remove`)
later and the result is exactly that of a fresh fusion of whoever is in: a function of the uploads, in order of name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.admission import Admission, admitted, refuse_faulty
from oneflare.charter import FILE, Charter, read_charter
from oneflare.data import Split
from oneflare.errors import RunError, did_you_mean
from oneflare.files import exclusive, read_json, remove_partial, write_bytes, write_json
from oneflare.fusion import GlobalModel, UploadSet, build_fusion, check_needs, without_faulty
from oneflare.fusion.suspects import find_suspects
from oneflare.intake import Intake, Verdict, take_in
from oneflare.member import now
from oneflare.metrics import score
from oneflare.nn.hardware import one_thread
from oneflare.upload import Upload

Say = Callable[[str], None]


class FederationFiles:
    """Where a federation's files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.charter = folder / FILE
        self.members = folder / "members"
        self.state = folder / "state.json"
        self.model = folder / "model.safetensors"
        self.result = folder / "result.json"
        self.card = folder / "card.md"
        self.report = folder / "report.html"

    def member(self, name: str) -> Path:
        return self.members / f"{name}.safetensors"

    def other_model(self, fusion: str) -> Path:
        return self.folder / "models" / f"{fusion}.safetensors"

    def kept(self) -> list[Path]:
        return sorted(self.members.glob("[!.]*.safetensors"))

    def removed(self) -> dict[str, str]:
        """member -> when it was removed"""
        return dict(read_json(self.state)["removed"]) if self.state.exists() else {}


@dataclass(frozen=True)
class Fused:
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
    late: bool = False,
    test: Split | None = None,
    admission: Admission | None = None,
    say: Say | None = None,
) -> Fused:
    """Verify, choose, fuse, write model and result. Without `uploads`, those of the last fusion are taken again.

    test: held-out images the coordinator may have; otherwise the model stays unmeasured. admission: how members are
    checked by what they do to answers; otherwise nobody is.
    """
    charter, files = read_charter(folder), FederationFiles(folder)
    tell = say or (lambda _: None)
    with exclusive(folder):
        remove_partial(folder)
        sources = _upload_files(uploads) if uploads is not None else files.kept()
        if not sources and not add:
            where = f"in {uploads}" if uploads is not None else "yet; give --uploads FOLDER"
            raise RunError(f"there is no upload {where}")
        intake = take_in(charter, sources, add, removed=files.removed(), late=late or uploads is None)
        intake, removed = _without(charter, intake, remove, files.removed())
        if say is not None:
            for note in intake.notes:
                say(note)
        if not intake.uploads:
            reasons = "; ".join(f"{verdict.file}: {verdict.reason or verdict.status}" for verdict in intake.verdicts)
            raise RunError(f"no usable upload, nothing was changed ({reasons})")
        if say is not None:
            say(f"fusing {len(intake.uploads)} upload{'s' if len(intake.uploads) > 1 else ''}")
        with one_thread():
            collected = UploadSet(tuple(intake.uploads.values()), charter.contract, charter.template())
            names = {upload.client: name for name, upload in intake.uploads.items()}

            def work(kept: UploadSet) -> tuple[dict[str, str], dict[str, Any] | None, dict[str, dict[str, Any]]]:
                suspects = _suspects(kept, names)
                for warning in suspects.values():
                    tell(warning)
                checked = None
                if admission is not None:
                    checked = admitted(admission, charter.terms.fusions[0], kept, names, tell)
                return suspects, checked, _fuse(charter, files, kept, test)

            (suspects, checked, fusions), faults = without_faulty(collected, work)
            intake = refuse_faulty(intake, faults)
            for fault in faults:
                tell(f"{names[fault.client]} is refused, and everybody else was fused again: {fault}")
        content = _result(charter, intake, fusions, removed, test) | {"suspects": suspects, "admission": checked}
        _keep(files, intake.uploads)
        write_json(files.state, {"removed": removed})
        write_json(files.result, content)
    return Fused(charter, files, content)


def _upload_files(folder: Path) -> list[Path]:
    """All uploads below a folder; what members keep to resume is none of them."""
    if not folder.is_dir():
        raise RunError(f"no folder at {folder}; give the one in which the uploads were collected")
    found = (path for path in folder.rglob("*.safetensors") if path.is_file())
    return sorted(
        path
        for path in found
        if not any(part.startswith(".") or part.endswith(".work") for part in path.relative_to(folder).parts)
    )


def _without(
    charter: Charter, intake: Intake, remove: Sequence[str], removed: Mapping[str, str]
) -> tuple[Intake, dict[str, str]]:
    """The intake without those who leave, and who has left by now."""
    left = {name: when for name, when in removed.items() if name not in intake.uploads}
    verdicts = list(intake.verdicts)
    known = {*intake.uploads, *charter.members, *removed, *(v.member for v in verdicts if v.member)}
    for name in remove:
        if name not in known:
            raise RunError(f"cannot remove '{name}': no such member{did_you_mean(name, known)}")
        left[name] = now()
        for index, verdict in enumerate(verdicts):
            if verdict.member == name and verdict.status == "in":
                verdicts[index] = Verdict(**(verdict.to_dict() | {"status": "removed", "reason": "removed now"}))
    uploads = {name: upload for name, upload in intake.uploads.items() if name not in remove}
    return Intake(uploads, tuple(verdicts), intake.notes), left


def _suspects(uploads: UploadSet, names: Mapping[int, str]) -> dict[str, str]:
    """Members whose well-formed uploads do not fit the others', with a warning for the coordinator."""
    return {names[found.client]: found.warning(names[found.client]) for found in find_suspects(uploads)}


def _fuse(
    charter: Charter, files: FederationFiles, collected: UploadSet, test: Split | None
) -> dict[str, dict[str, Any]]:
    """Every fusion of the charter, its model saved whole; the first is the federation's own."""
    specs = charter.terms.fusions
    offered = frozenset.intersection(*(upload.fields for upload in collected))
    check_needs(specs, offered, "; change experiment.fusions")
    outcome: dict[str, dict[str, Any]] = {}
    for index, spec in enumerate(specs):
        model = build_fusion(spec).fuse(collected)
        path = files.model if index == 0 else files.other_model(spec["name"])
        model.save(path)
        outcome[spec["name"]] = {
            "model": str(path.relative_to(files.folder)),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "parameters": model.cost.parameters,
            "forward_passes": model.cost.forward_passes,
            "scores": None if test is None else _scores(model, test),
        }
    return outcome


def _scores(model: GlobalModel, test: Split) -> dict[str, Any]:
    return score(model.logits(test.images), test.labels).to_dict()


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
                "file": str(upload.path),
            }
            for name, upload in present.items()
        ],
        "missing": [name for name in charter.members if name not in present and name not in removed],
        "removed": dict(removed),
        "verdicts": [verdict.to_dict() for verdict in intake.verdicts],
        "notes": list(intake.notes),
    }


def _keep(files: FederationFiles, uploads: Mapping[str, Upload]) -> None:
    """Copies of what was fused and of nothing else: who left, leaves no file behind."""
    for name, upload in uploads.items():
        target = files.member(name)
        if not (target.exists() and target.samefile(upload.path)):
            write_bytes(target, upload.content())
    for path in files.kept():
        if path.stem not in uploads:
            path.unlink()


def read_fused(folder: Path) -> dict[str, Any]:
    """The result of the last fusion."""
    path = FederationFiles(folder).result
    if not path.exists():
        raise RunError(f"{folder} has no result yet; `oneflare server fuse` makes one")
    return dict(read_json(path))
