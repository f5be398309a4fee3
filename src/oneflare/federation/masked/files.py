"""Reads and writes the small JSON files of masked sums: enrolments, requests and releases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from oneflare.core.config import Section
from oneflare.core.files import open_regular, write_text
from oneflare.core.registry import one_line
from oneflare.core.strict import strict_json
from oneflare.errors import UploadError

SIZE_LIMIT = 1 << 26
Content = TypeVar("Content", bound=Section)


def write_message(path: Path, kind: str, content: Section) -> None:
    """One JSON object; `oneflare` says what kind of file it is."""
    fields = {"oneflare": kind} | content.model_dump(mode="json", exclude_none=True)
    write_text(path, json.dumps(fields, indent=1) + "\n")


def read_message(path: Path, kind: str, form: type[Content]) -> Content:
    """A file from others: of this kind, with exactly the fields that belong to it."""
    with open_regular(path, UploadError) as (file, size):
        if size > SIZE_LIMIT:
            raise UploadError(f"{path}: {size:,} bytes exceed the limit of {SIZE_LIMIT:,}; ask for the file again")
        text = file.read(size)
    try:
        content = strict_json(text)
    except ValueError:
        raise UploadError(f"{path}: is damaged or cut off (no valid JSON); ask for the file again") from None
    found = content.pop("oneflare", None) if isinstance(content, dict) else None
    if found != kind or not isinstance(content, Mapping):
        what = f"is a {found}" if found in ("enrolment", "request", "release") else "is no such file"
        raise UploadError(f"{path}: {what}; give the file with the {kind}")
    try:
        return form.model_validate(content)
    except ValidationError as error:
        raise UploadError(f"{path}: {one_line(error, form)}; ask for the file again") from None


def kind_of(path: Path) -> str | None:
    """What kind of file it says it is; None where it does not say so."""
    try:
        with open_regular(path, UploadError) as (file, size):
            content: Any = strict_json(file.read(size)) if size <= SIZE_LIMIT else None
    except (ValueError, UploadError):
        return None
    kind = content.get("oneflare") if isinstance(content, dict) else None
    return kind if isinstance(kind, str) else None
