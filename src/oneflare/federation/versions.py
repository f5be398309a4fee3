"""The files of a federation by file, and how a new fusion replaces an earlier one without losing it.

A fusion is prepared beside the files in use and put in their place when all of it is there. The version before it stays
whole in `previous/`, unless somebody was removed who is in it: then nothing of that version is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from oneflare.core.files import read_json, write_bytes, write_json
from oneflare.errors import RunError, UploadError
from oneflare.federation.charter import FILE
from oneflare.federation.intake import UploadHistory
from oneflare.federation.result import FederationResult
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
        self.previous = folder / "previous"
        self.next = folder / ".next"

    def member(self, name: str) -> Path:
        return self.members / f"{name}.safetensors"

    def kept(self) -> list[Path]:
        """The uploads of the last fusion."""
        return sorted(self.members.glob(UPLOADS))

    def known(self) -> UploadHistory:
        """Who was removed, and how new each member's upload was."""
        if not self.state.exists():
            return UploadHistory()
        state = read_json(self.state)
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
    """All uploads below a folder; what members keep to resume is none of them."""
    if not folder.is_dir():
        raise RunError(f"no folder at {folder}; give the one in which the uploads were collected")
    names = ("*.safetensors", f"*.safetensors{ENCRYPTED}")
    found = (path for name in names for path in folder.rglob(name) if path.is_file())
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
) -> None:
    """Put a prepared fusion in the place of the last one, which stays in `previous/` if all its members do.

    content: the new result. Afterwards there is no file of a member that was removed, nor a model of another fusion.
    """
    old = files.last()
    for name, upload in uploads.items():
        _stage(files, name, upload)
    forget(files, removed)
    if old is not None and _differs(old, content) and not _includes(old, removed) and _whole(files, old):
        _set_aside(files)
    for source in sorted(path for path in files.next.rglob("*") if path.is_file()):
        target = files.folder / source.relative_to(files.next)
        target.parent.mkdir(exist_ok=True)
        source.replace(target)
    current = {made.model for made in content.fusions.values()}
    current |= {f"{MEMBERS}/{name}.safetensors" for name in uploads}
    for path in [*files.kept(), *sorted(files.models.glob(UPLOADS))]:
        if str(path.relative_to(files.folder)) not in current:
            path.unlink()
    newest = {name: when for name, when in files.known().newest.items() if name not in removed}
    newest |= {name: str(upload.manifest["created"]) for name, upload in uploads.items()}
    write_json(files.state, {"removed": dict(removed), "newest": newest})
    content.write(files.result)


def _stage(files: FederationFiles, name: str, upload: Upload) -> None:
    """A copy of a verified upload beside the models, before any file is touched: it may itself lie in `previous/`."""
    target = files.next / MEMBERS / f"{name}.safetensors"
    target.parent.mkdir(exist_ok=True)
    write_bytes(target, upload.content())


def forget(files: FederationFiles, removed: Collection[str]) -> None:
    """Delete the previous version if somebody who was removed is in it, and what the removed sent through Flower."""
    if not removed:
        return
    if files.previous.exists():
        try:
            includes = _includes(FederationResult.read(files.previous / RESULT), removed)
        except RunError:
            includes = True
        if includes:
            shutil.rmtree(files.previous)
    for path in sorted(files.folder.glob(f"inbox/flower-*/{UPLOADS}")):
        with contextlib.suppress(UploadError):
            if read_manifest(path).get("member") in removed:
                path.unlink()


def _differs(old: FederationResult, new: FederationResult) -> bool:
    """Whether a fusion is another one: other uploads or other models."""

    def facts(content: FederationResult) -> Any:
        return (
            {member.name: member.digest for member in content.members},
            {name: made.sha256 for name, made in content.fusions.items()},
        )

    return bool(facts(old) != facts(new))


def _includes(content: FederationResult, names: Collection[str]) -> bool:
    return any(name in names for name in content.names)


def _whole(files: FederationFiles, content: FederationResult) -> bool:
    """Whether the models that a result names are there and are the ones it was written for."""
    for made in content.fusions.values():
        path = files.folder / made.model
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != made.sha256:
            return False
    return True


def _set_aside(files: FederationFiles) -> None:
    """The version in use also as `previous/`: whole, or the one before it stays."""
    fresh = files.folder / ".previous"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    for name in (MODEL, MODELS, MEMBERS, RESULT, files.card.name, files.report.name):
        source = files.folder / name
        for path in sorted(source.glob(UPLOADS)) if source.is_dir() else [source]:
            for file in (path, path.with_name(path.name + SUFFIX)):
                if file.is_file():
                    target = fresh / file.relative_to(files.folder)
                    target.parent.mkdir(exist_ok=True)
                    _second_name(file, target)
    shutil.rmtree(files.previous, ignore_errors=True)
    fresh.rename(files.previous)


def _second_name(path: Path, target: Path) -> None:
    """Files are replaced and never changed, so another name for the same one is as good as a copy."""
    try:
        os.link(path, target)
    except OSError:
        write_bytes(target, path.read_bytes())
