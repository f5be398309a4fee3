"""The Flower records of a message to a node and of its reply, which holds files as bytes.

An answer has two records. `FACTS`: small values as JSON (who, how it ended). `FILES`: bytes by file name, above all
the upload; they are opaque here and are verified by whoever reads the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from oneflare.errors import UploadError

TASK = "oneflare.task"
FACTS = "oneflare.facts"
FILES = "oneflare.core.files"
UPLOAD = "upload.safetensors"
RELEASE = "release.json"
_KIND = "oneflare.file"
_FILE_NAME = re.compile(r"upload\.safetensors|release\.json|trace\.jsonl|snapshots/epoch-\d{5}\.safetensors")


def question(task: Mapping[str, Any]) -> RecordDict:
    return RecordDict({TASK: ConfigRecord({"json": json.dumps(task)})})


def read_question(content: RecordDict) -> dict[str, Any]:
    return _mapping(content, TASK)


def answer(facts: Mapping[str, Any], files: Mapping[str, bytes]) -> RecordDict:
    arrays = {name: Array("uint8", (len(data),), _KIND, data) for name, data in files.items()}
    return RecordDict({FACTS: ConfigRecord({"json": json.dumps(facts)}), FILES: ArrayRecord(arrays)})


def read_answer(content: RecordDict) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Facts and files; a name that no upload of ours has is refused, because it becomes a path."""
    facts = _mapping(content, FACTS)
    record = content.get(FILES)
    if not isinstance(record, ArrayRecord):
        raise UploadError("the reply holds no files; does the node run the same version of OneFlare?")
    for name in record:
        if not _FILE_NAME.fullmatch(name):
            raise UploadError(f"the reply holds a file called {name!r:.80}, which is not a file of an upload")
    return facts, {name: array.data for name, array in record.items()}


def _mapping(content: RecordDict, key: str) -> dict[str, Any]:
    record = content.get(key)
    try:
        value = json.loads(record["json"]) if isinstance(record, ConfigRecord) else None  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UploadError(f"the message has no valid record '{key}'; does its sender run the same version of OneFlare?")
    return value
