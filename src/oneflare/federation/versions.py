"""The files of a federation by file, and how a new fusion replaces an earlier one without losing it.

A fusion is prepared beside the files in use and put in their place when all of it is there. Every version stays whole
in a folder of its own (`models/001`), unless somebody was removed who is in it: then nothing of that version is kept.
`models/versions.json` lists them all and says which one is in use.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from oneflare.core.files import read_json, write_bytes, write_json
from oneflare.errors import RunError, UploadError
from oneflare.federation.charter import FILE
from oneflare.federation.history import History, version_of
from oneflare.federation.intake import UploadHistory
from oneflare.federation.result import FederationResult
from oneflare.models.decisions import decision_path, is_for
from oneflare.models.sealing import SUFFIX
from oneflare.upload import Upload, read_manifest
from oneflare.upload.encryption import SUFFIX as ENCRYPTED

MODEL, MODELS, MEMBERS, RESULT = "model.safetensors", "models", "members", "result.json"
UPLOADS = "[!.]*.safetensors"


class FederationFiles:
    """Where a federation's files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.charter = folder / FILE
        self.members = folder / MEMBERS
        self.state = folder / "state.json"
        self.model = folder / MODEL
        self.models = folder / MODELS
        self.result = folder / RESULT
        self.card = folder / "card.md"
        self.report = folder / "report.html"
        self.next = folder / ".next"

    def version(self, number: int) -> Path:
        """The folder of a version."""
        return self.models / f"{number:03d}"

    def versions(self) -> list[Path]:
        """The folders of all versions that are there."""
        return sorted(path for path in self.models.glob("[0-9]*") if path.is_dir())

    def member(self, name: str) -> Path:
        return self.members / f"{name}.safetensors"

    def kept(self) -> list[Path]:
        """The uploads of the last fusion."""
        return sorted(self.members.glob(UPLOADS))

    def known(self) -> UploadHistory:
        """Who was removed, and how new each member's upload was."""
        if not self.state.exists():
            return UploadHistory()
        state = read_json(self.state, "restore it from a copy: it says who was removed")
        try:
            return UploadHistory(dict(state["removed"]), dict(state.get("newest", {})))
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{self.state} is damaged; restore it from a copy: it says who was removed") from None

    def removed(self) -> dict[str, str]:
        """member -> when it was removed"""
        return dict(self.known().removed)

    def last(self) -> FederationResult | None:
        """The result of the last fusion, if there was one."""
        return FederationResult.read(self.result) if self.result.exists() else None


def upload_files(folder: Path) -> list[Path]:
    """All uploads below a folder, pipes and devices too, so that they are refused by name and nobody is just missing.

    What members keep to resume is none of them.
    """
    if not folder.is_dir():
        raise RunError(f"no folder at {folder}; give the one in which the uploads were collected")
    names = ("*.safetensors", f"*.safetensors{ENCRYPTED}")
    found = (path for name in names for path in folder.rglob(name) if not path.is_dir())
    return sorted(
        path
        for path in found
        if not any(part.startswith(".") or part.endswith(".work") for part in path.relative_to(folder).parts)
    )


@contextlib.contextmanager
def prepared(files: FederationFiles) -> Iterator[Path]:
    """An empty folder for the models of the next fusion; whatever is still in it at the end is deleted."""
    shutil.rmtree(files.next, ignore_errors=True)
    files.next.mkdir()
    try:
        yield files.next
    finally:
        shutil.rmtree(files.next, ignore_errors=True)


def install(
    files: FederationFiles, content: FederationResult, uploads: Mapping[str, Upload], removed: Mapping[str, str]
) -> FederationResult:
    """Put a prepared fusion in the place of the last one; returns its result, which now has a number.

    content: the new result. Afterwards there is no file of a member that was removed, nor a model of another fusion.
    """
    old = files.last()
    for name, upload in uploads.items():
        _stage(files, name, upload)
    if old is not None and not _includes(old, removed) and _whole(files, old):
        old = keep_version(files, old)
    forget(files, removed)
    content = _numbered(files, old, content, removed)
    _put_in_place(files, content, uploads)
    newest = {name: when for name, when in files.known().newest.items() if name not in removed}
    newest |= {name: str(upload.manifest["created"]) for name, upload in uploads.items()}
    write_json(files.state, {"removed": dict(removed), "newest": newest})
    content.write(files.result)
    return content


def _put_in_place(files: FederationFiles, content: FederationResult, names: Collection[str]) -> None:
    """Move all that was prepared to its place, and delete models and uploads that are not part of it."""
    for source in sorted(path for path in files.next.rglob("*") if path.is_file()):
        target = files.folder / source.relative_to(files.next)
        target.parent.mkdir(exist_ok=True)
        source.replace(target)
    current = {made.model for made in content.fusions.values()} | {f"{MEMBERS}/{name}.safetensors" for name in names}
    for path in [*files.kept(), *sorted(files.models.glob(UPLOADS))]:
        if str(path.relative_to(files.folder)) not in current:
            path.unlink()
    thresholds = decision_path(files.model)
    if thresholds.exists() and not is_for(thresholds, content.own.sha256):
        thresholds.unlink()


def _numbered(
    files: FederationFiles, old: FederationResult | None, content: FederationResult, removed: Collection[str]
) -> FederationResult:
    """The result as the next version; the same fusion made again stays the version that it is, with its scores."""
    history = History.read(files.models)
    if old is None or differs(old, content):
        earlier = 0 if old is None else old.version or 1
        number = max(history.next_number(), earlier + 1)
        return replace(content, version=number, before=None if old is None else old.own.sha256)
    scores = tuple(one for one in old.scores or () if one.member not in removed)
    return replace(content, version=old.version or 1, before=old.before, scores=scores or None)


def _stage(files: FederationFiles, name: str, upload: Upload) -> None:
    """A copy of a verified upload beside the models, before any file is touched: it may lie in a version's folder."""
    target = files.next / MEMBERS / f"{name}.safetensors"
    target.parent.mkdir(exist_ok=True)
    write_bytes(target, upload.content())


def forget(files: FederationFiles, removed: Mapping[str, str]) -> None:
    """Delete every version in which somebody is who was removed, and what the removed sent through Flower."""
    if not removed:
        return
    history = History.read(files.models)
    for folder in files.versions():
        try:
            gone = [name for name in removed if _includes(FederationResult.read(folder / RESULT), [name])]
        except RunError:
            gone = list(removed)
        if gone:
            shutil.rmtree(folder)
            when = max(removed[name] for name in gone)[:10]
            reason = f"{' and '.join(gone)} {'are' if len(gone) > 1 else 'is'} in it and left on {when}"
            history = history.without_files(int(folder.name), reason)
    history = _also_the_last(files, history, removed)
    if history.versions:
        history.write(files.models)
    for path in sorted(files.folder.glob(f"inbox/flower-*/{UPLOADS}")):
        with contextlib.suppress(UploadError):
            if read_manifest(path).get("member") in removed:
                path.unlink()


def _also_the_last(files: FederationFiles, history: History, removed: Mapping[str, str]) -> History:
    """The list with the version in use, if it is not there because it was made before versions were kept."""
    last = files.last()
    if last is None or any(one.number == (last.version or 1) for one in history.versions):
        return history
    history = history.with_version(version_of(last.version or 1, last))
    gone = [name for name in removed if _includes(last, [name])]
    return history.without_files(last.version or 1, f"{' and '.join(gone)} left") if gone else history


def differs(old: FederationResult, new: FederationResult) -> bool:
    """Whether a fusion is another one: other uploads or other models."""

    def facts(content: FederationResult) -> Any:
        return (
            {member.name: member.digest for member in content.members},
            {name: made.sha256 for name, made in content.fusions.items()},
        )

    return bool(facts(old) != facts(new))


def _includes(content: FederationResult, names: Collection[str]) -> bool:
    """Whether one of them is in a version: by its upload, or by scores that it sent."""
    return any(name in names for name in (*content.names, *(one.member for one in content.scores or ())))


def _whole(files: FederationFiles, content: FederationResult, folder: Path | None = None) -> bool:
    """Whether the models that a result names are there and are the ones it was written for."""
    for made in content.fusions.values():
        path = (folder or files.folder) / made.model
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != made.sha256:
            return False
    return True


def keep_version(files: FederationFiles, content: FederationResult) -> FederationResult:
    """The version in use also in a folder of its own, whole, as it is now; returns its result with its number.

    content: what the result in use says.
    """
    if content.version is None:  # fused before versions had numbers
        content = replace(content, version=History.read(files.models).next_number())
    number = content.version or 1
    fresh, target = files.models / f".{number:03d}", files.version(number)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    thresholds = decision_path(files.model).name
    for name in (MODEL, MODELS, MEMBERS, RESULT, thresholds, files.card.name, files.report.name):
        source = files.folder / name
        for path in sorted(source.glob(UPLOADS)) if source.is_dir() else [source]:
            for file in (path, path.with_name(path.name + SUFFIX)):
                if file.is_file():
                    copy = fresh / file.relative_to(files.folder)
                    copy.parent.mkdir(exist_ok=True)
                    _second_name(file, copy)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)
    History.read(files.models).with_version(version_of(number, content)).write(files.models)
    return content


def put_back(files: FederationFiles, number: int) -> FederationResult:
    """Make an earlier version the one in use, from its folder; returns its result."""
    version = History.read(files.models).find(number)
    source = files.version(number)
    if version.deleted is not None:
        raise RunError(f"version {number} was deleted, because {version.deleted}; fuse again for a model of the others")
    content = FederationResult.read(source / RESULT)
    if not _whole(files, content, source):
        raise RunError(f"{source} is damaged: its models are not those that were fused; choose another version")
    with prepared(files) as place:
        for path in [*sorted(source.rglob("*.safetensors")), *source.glob(decision_path(files.model).name)]:
            copy = place / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            _second_name(path, copy)
        _put_in_place(files, content, content.names)
    content = replace(content, version=number)
    content.write(files.result)
    return content


def _second_name(path: Path, target: Path) -> None:
    """Files are replaced and never changed, so another name for the same one is as good as a copy."""
    try:
        os.link(path, target)
    except OSError:
        write_bytes(target, path.read_bytes())
