"""Thousands of files that mean harm: each is refused with one line, quickly, in little memory, and never unpickled."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hostile import MUTATIONS, honest_uploads, mutants
from measure import peak_growth
from record import record, record_door

from oneflare.core.files import tensor_digest
from oneflare.errors import MemberFault, UploadError
from oneflare.upload import read_upload, read_weights
from oneflare.upload.tensors import copied_tensors

SIZE_LIMIT = 16 << 20
SECONDS_LIMIT = 5


@pytest.fixture
def forbidden(monkeypatch):
    """Whoever unpickles anything fails the test."""

    def never(*arguments, **keywords):
        pytest.fail("a pickle was opened")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, never)


def alarm(number, frame):
    pytest.fail(f"reading took more than {SECONDS_LIMIT} s")


def attack(folder: Path, number: int, seed: int) -> dict[str, object]:
    """Read `number` hostile files; returns what happened."""
    honest = honest_uploads(folder)
    path = folder / "upload.safetensors"
    refused: Counter[str] = Counter()
    reasons: set[str] = set()
    slowest = 0.0
    signal.signal(signal.SIGALRM, alarm)
    with peak_growth() as memory:
        for name, upload, content in mutants(honest, number, seed):
            path.write_bytes(content)
            signal.alarm(SECONDS_LIMIT)
            started = time.monotonic()
            try:
                read_upload(path, upload.contract, SIZE_LIMIT)
                (folder / "let-in.safetensors").write_bytes(content)
                pytest.fail(f"{name} was let in (seed {seed}, after {refused.total()} files)")
            except UploadError as error:
                line = str(error)
            finally:
                signal.alarm(0)
            slowest = max(slowest, time.monotonic() - started)
            assert line.startswith(f"{path}: "), line
            assert line.isprintable(), line
            assert len(line) < 400, line
            refused[name] += 1
            reasons.add(line.removeprefix(f"{path}: ")[:25])
    assert set(refused) == set(MUTATIONS)
    assert memory.bytes < 2 * SIZE_LIMIT, f"{memory.bytes} bytes"
    return {
        "files": refused.total(),
        "let_in": 0,
        "kinds": dict(sorted(refused.items())),
        "different_reasons": len(reasons),
        "slowest_seconds": round(slowest, 4),
        "peak_bytes": memory.bytes,
        "size_limit": SIZE_LIMIT,
    }


@pytest.mark.usefixtures("forbidden")
def test_hostile_files_are_refused(tmp_path):
    attack(tmp_path, 600, seed=0)


@pytest.mark.soak
@pytest.mark.usefixtures("forbidden")
def test_ten_thousand_hostile_files_are_refused(tmp_path):
    record("hostile", attack(tmp_path, 12_000, seed=1))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    """A pipe would make the server wait for ever, a device would fill its memory."""
    contract = honest_uploads(tmp_path)[0].contract
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    wanted = {"pipe": "regular", "folder": "regular", "device": "regular", "loop": "cannot", "sparse": "exceed"}
    for name, reason in wanted.items():
        with pytest.raises(UploadError, match=reason):
            read_upload(tmp_path / name, contract)


def test_a_header_that_changes_after_the_check_is_not_looked_at_again(tmp_path):
    """Same bytes, same manifest, another shape in the header: the digests still hold."""
    import json

    from hostile import file_of, split_file

    upload = honest_uploads(tmp_path)[0]
    path = tmp_path / "upload.safetensors"
    path.write_bytes(upload.raw)
    checked = read_upload(path, upload.contract)
    before = checked.weights()
    header, body = split_file(upload)
    name = next(name for name, t in upload.tensors.items() if t.ndim == 4)
    header[name]["shape"] = header[name]["shape"][::-1]
    path.write_bytes(file_of(json.dumps(header), body))
    assert all(torch.equal(tensor, before[key]) for key, tensor in checked.weights().items())
    with pytest.raises(UploadError, match="not those of the encoder it names"):
        read_weights(path, checked.digest)
    with pytest.raises(MemberFault, match="changed after it was verified"):
        checked.content()


@pytest.mark.soak
def test_no_file_that_changes_after_its_check_is_used(tmp_path):
    """Somebody writes to a file, or cuts it short, at every place between its check and its use."""
    changed = cut = 0
    for number, upload in enumerate(honest_uploads(tmp_path)):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(upload.raw)
        checked = read_upload(path, upload.contract)
        held = {name: dict(copied_tensors(path, checked.manifest, checked.entries, name)) for name in checked.entries}
        begin = 8 + int.from_bytes(upload.raw[:8], "little")
        for name, entry in checked.entries.items():
            spoilt = bytearray(upload.raw)
            spoilt[begin + entry.start] ^= 1
            with path.open("r+b") as file:
                file.write(spoilt)
            with pytest.raises(UploadError, match="does not match its digest"):
                dict(copied_tensors(path, checked.manifest, checked.entries, name))
            changed += 1
            with path.open("r+b") as file:
                file.truncate(begin + entry.start)
            with pytest.raises(UploadError, match="not a valid safetensors file"):
                dict(copied_tensors(path, checked.manifest, checked.entries, name))
            cut += 1
            assert all(tensor_digest(t) == checked.manifest["tensors"][n] for n, t in held[name].items())
            path.write_bytes(upload.raw)
    record_door(
        "changed-after-check",
        promise="the numbers that are used are the numbers that were verified",
        tried=f"a member who overwrites ({changed} times) or cuts short ({cut} times) a file between check and use",
        outcome=f"{changed + cut} refusals in words; every tensor that had been handed out kept its value",
    )


def test_a_forged_file_with_nothing_altered_is_let_in(tmp_path):
    """So the forged ones are refused for what was altered, not for how they were made."""
    from hostile import forged

    for upload in honest_uploads(tmp_path):
        path = tmp_path / "upload.safetensors"
        path.write_bytes(forged(upload))
        assert read_upload(path, upload.contract).digest == upload.manifest["digest"]
