"""Writes files that appear whole or not at all, and keeps nested state in safetensors (never pickle)."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from oneflare.errors import InUseError, OneFlareError, RunError

if TYPE_CHECKING:
    import torch

STRUCTURE = "oneflare.structure"
TEMPORARY_SUFFIX = ".partial"
ORPHAN_SECONDS = 10.0
"""how long the workers of a killed process are waited for"""


def write_bytes(path: Path, *content: bytes | bytearray) -> None:
    """Write to a temporary name in the same folder, flush to disk, then rename: a crash leaves old or new.

    Several pieces are written one behind the other, without a copy of all together.
    """
    with writing(path) as file:
        for piece in content:
            file.write(piece)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file to write piece by piece, which appears under its name when all of it was written, and else not at all."""
    try:
        with _written_whole(path) as file:
            yield file
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror or error}); make room or choose another folder, "
            "then run the same command again"
        ) from error


@contextlib.contextmanager
def _written_whole(path: Path) -> Iterator[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name}.{os.getpid()}."
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=TEMPORARY_SUFFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY_SUFFIX}"):
        if not _alive(leftover.name.removeprefix(f".{path.name}.").split(".")[0]):
            leftover.unlink(missing_ok=True)


def _alive(process: str) -> bool:
    """Whether a process of this machine is still there; what is no number is not."""
    if not process.isdecimal():
        return False
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n")


@contextlib.contextmanager
def open_regular(
    path: Path, refuse: type[OneFlareError] = RunError, remedy: str = "give a regular file"
) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file and its size; a pipe or device is refused and never waited for."""
    irregular = f"{path}: is a directory, pipe or device; {remedy}"
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise refuse(irregular)
            yield file, status.st_size
    except FileNotFoundError:
        raise refuse(f"{path}: no such file") from None
    except IsADirectoryError:
        raise refuse(irregular) from None
    except OSError as error:
        raise refuse(f"{path}: cannot be read ({error.strerror})") from None


def read_regular(path: Path, size_limit: int) -> bytes:
    """The bytes of a regular file of bounded size."""
    with open_regular(path) as (file, size):
        if size > size_limit:
            raise RunError(f"{path}: {size:,} bytes exceed the limit of {size_limit:,}")
        return file.read(size_limit)


def read_json(path: Path, remedy: str = "delete it and run again") -> Any:
    """remedy: ends the line that refuses a damaged file"""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise RunError(f"{path} is not valid JSON; {remedy}") from None


def remove_partial(folder: Path) -> None:
    """Clear what a killed process left half-written."""
    for path in folder.rglob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)


def digest_of(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    import torch

    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def save_state(path: Path, state: Any) -> None:
    """A nest of dicts, lists, numbers, strings and tensors as one safetensors file."""
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    structure = _flatten(state, tensors)
    metadata = {STRUCTURE: json.dumps(structure)}
    write_bytes(path, save({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, metadata=metadata))


def load_state(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            structure = json.loads(file.metadata()[STRUCTURE])
            return _unflatten(structure, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise RunError(f"{path} is damaged ({error}); delete it and run again") from None


def parse_state(content: bytes) -> Any:
    """What `save_state` wrote, from bytes of strangers in memory; a ValueError says what is wrong with them."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    from oneflare.core.strict import strict_json

    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        structure = strict_json(strict_json(content[8 : 8 + length])["__metadata__"][STRUCTURE])
        return _unflatten(structure, tensors)
    except (SafetensorError, LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
        raise ValueError("it is damaged, or not written by OneFlare") from None


def _flatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        key = f"t{len(tensors)}"
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, dict):
        return {"dict": {str(key): _flatten(item, tensors) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return {"list": [_flatten(item, tensors) for item in value]}
    return {"value": value}


def _unflatten(node: Any, tensors: dict[str, torch.Tensor]) -> Any:
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unflatten(item, tensors) for key, item in content.items()}
    if kind == "list":
        return [_unflatten(item, tensors) for item in content]
    return content


@contextlib.contextmanager
def exclusive(folder: Path, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold a folder for one process; the lock dies with its holder, so a stale one cannot block anybody.

    A killed holder's worker processes may outlive it for a moment; they are waited for. wait_seconds: how long a living
    holder is waited for.
    """
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a+")
    except OSError as error:
        raise RunError(f"{folder} cannot be written ({error.strerror}); choose another --out") from None
    with file:
        started = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                orphaned = holder.isdecimal() and not _alive(holder)
                if time.monotonic() - started > max(wait_seconds, ORPHAN_SECONDS if orphaned else 0.0):
                    raise InUseError(
                        f"{folder} is in use by process {holder}; wait for it or choose another --out"
                    ) from None
                time.sleep(0.05)
        try:
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written ({error.strerror}); make room or choose another --out"
            ) from None
        yield
