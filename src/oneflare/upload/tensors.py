"""Copies the tensors of an upload into memory before they are compared with their digests.

A file may still be written to, or cut short, by whoever sent it. So nothing is mapped into memory: a tensor's bytes
are read into memory of our own, this copy is compared with the digest that the manifest states, and only then does
anybody see it. One tensor is copied at a time, so that checking an upload takes the memory of its largest tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from oneflare.core.files import open_regular
from oneflare.errors import UploadError

STORED = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "I64": torch.int64, "I16": torch.int16, "I8": torch.int8,
}  # fmt: skip
"""the types that uploads may hold, by their names in a header"""


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies, counted from the end of the header, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def open_upload(path: Path) -> AbstractContextManager[tuple[BinaryIO, int]]:
    """A regular file and its size; anything else is refused."""
    return open_regular(path, UploadError, "uploads must be regular files")


def tensor_entries(path: Path, header: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Where the header says the tensors lie: one behind the other, without gaps and without overlap."""
    entries = {name: _entry(path, name, value) for name, value in header.items() if name != "__metadata__"}
    reached = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != reached:
            raise _invalid(path, f"{name!r:.80} does not begin where the tensor before it ends")
        reached = entry.end
    return entries


def _entry(path: Path, name: str, value: Any) -> StoredTensor:
    value = value if isinstance(value, dict) else {}
    dtype, shape, offsets = STORED.get(str(value.get("dtype"))), value.get("shape"), value.get("data_offsets")
    if dtype is None or not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
        raise _invalid(path, f"{name!r:.80} is not described by a known type, a shape and two offsets")
    start, end = offsets
    if end - start != math.prod(shape) * dtype.itemsize:
        raise _invalid(path, f"{name!r:.80} has another size than its shape")
    return StoredTensor(dtype, tuple(shape), start, end)


def _whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number < 1 << 53 for number in numbers)


def _invalid(path: Path, reason: str) -> UploadError:
    return UploadError(f"{path}: not a valid safetensors file ({reason}); send it again")


def copied_tensors(
    path: Path, manifest: Mapping[str, Any], entries: Mapping[str, StoredTensor], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Name and private copy of each tensor the manifest lists, compared with its digest before it is handed out."""
    with open_upload(path) as (file, size):
        begin = 8 + int.from_bytes(file.read(8), "little")
        end = begin + max((entry.end for entry in entries.values()), default=0)
        if size != end:
            raise _invalid(path, f"it has {size} bytes where its header describes {end}")
        for name, digest in manifest["tensors"].items():
            if name.startswith(prefix):
                if name not in entries:
                    raise _invalid(path, f"{name!r:.80} is missing")
                entry = entries[name]
                content = bytearray(entry.end - entry.start)
                file.seek(begin + entry.start)
                if file.readinto(content) != len(content):  # type: ignore[attr-defined]
                    raise UploadError(f"{path}: was cut short while it was read; send it again")
                if hashlib.sha256(content).hexdigest() != digest:
                    raise UploadError(f"{path}: {name} does not match its digest; it was damaged, send it again")
                yield name, _tensor(content, entry)


def _tensor(content: bytearray, entry: StoredTensor) -> Tensor:
    if not content:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(content, dtype=entry.dtype).reshape(entry.shape)
