"""Signed uploads in the hands of somebody else: replayed, re-signed, renamed, redated. None counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hostile import file_of
from record import record

from crowd import charter_of, upload_of
from oneflare.core.files import digest_of
from oneflare.core.seeds import numpy_generator
from oneflare.federation.intake import take_in
from oneflare.federation.member import signer
from oneflare.upload import MANIFEST
from oneflare.upload.signing import SigningKey, generate


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, SigningKey]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: generate(folder / f"{name}.key", folder / f"{name}.pub") for name in ("north", "south", "mallory")}


STRANGE = [None, 7, [], {}, "", "x", "../north", "north\n", "n" * 5000, True, {"key": 1}, ["north"], "\x1b[2J"]


def forge(content: bytes, keys: dict[str, SigningKey], generator: np.random.Generator) -> tuple[str, bytes]:
    """What somebody without north's key can make of north's upload."""
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    manifest = json.loads(header["__metadata__"][MANIFEST])
    old = manifest["signature"]
    strange = STRANGE[int(generator.integers(len(STRANGE)))]
    mallory = signer(keys["mallory"])
    kind = str(generator.choice(["sign", "claim", "strip", "redate", "rename", "field", "signature", "swap", "resize"]))
    changes: dict[str, dict] = {
        "redate": {"created": f"20{int(generator.integers(10, 26))}-05-05T00:00:00+00:00"},
        "rename": {"member": "south"},
        "field": {str(generator.choice(["member", "created", "federation"])): strange},
        "resize": {"samples": int(manifest["samples"]) + 1 + int(generator.integers(1000))},
    }
    manifest |= changes.get(kind, {})
    manifest["digest"] = digest_of({k: v for k, v in manifest.items() if k not in ("digest", "signature")})
    if kind == "strip":
        del manifest["signature"]
    elif kind == "signature":
        manifest["signature"] = strange if strange is not None else {"key": old["key"], "value": "AAAA"}
    elif kind == "swap":
        manifest["signature"] = {"key": old["key"], "value": mallory(manifest["digest"])["value"]}
    elif kind == "claim":
        manifest["signature"] = {"key": keys["mallory"].public, "value": old["value"]}
    elif kind in ("sign", "field") or generator.random() < 0.5:
        manifest["signature"] = mallory(manifest["digest"])
    header["__metadata__"][MANIFEST] = json.dumps(manifest)
    return kind, file_of(json.dumps(header), body)


def attack(folder: Path, keys: dict[str, SigningKey], number: int, seed: int) -> dict:
    charter = charter_of({name: keys[name].public for name in ("north", "south")})
    honest = upload_of(charter, folder / "north.safetensors", "north", signer(keys["north"]))
    content = honest.read_bytes()
    path, refused = folder / "forged.safetensors", 0
    for index in range(number):
        kind, forged = forge(content, keys, numpy_generator(seed, "forged", index))
        assert forged != content
        path.write_bytes(forged)
        intake = take_in(charter, [path, honest])
        (verdict,) = [verdict for verdict in intake.verdicts if verdict.file == str(path)]
        assert verdict.status == "refused", (kind, verdict)
        assert verdict.reason.isprintable(), kind
        assert 0 < len(verdict.reason) < 400, kind
        assert list(intake.uploads) == ["north"], kind
        assert intake.uploads["north"].path == honest
        refused += 1
    return {"files": number, "refused": refused}


def test_forged_signatures_are_refused(tmp_path, keys):
    attack(tmp_path, keys, 120, seed=0)


@pytest.mark.soak
def test_two_thousand_forged_signatures_are_refused(tmp_path, keys):
    record("signed", attack(tmp_path, keys, 2000, seed=1))


def test_a_replayed_older_upload_does_not_replace_the_newer(tmp_path, keys):
    charter = charter_of({"north": keys["north"].public})
    sign = signer(keys["north"])
    older = upload_of(charter, tmp_path / "a.safetensors", "north", sign)
    newer = upload_of(charter, tmp_path / "b.safetensors", "north", sign, created="2026-02-01T00:00:00+00:00")
    for order in ([older, newer], [newer, older]):
        intake = take_in(charter, order)
        assert intake.uploads["north"].path == newer
        assert {v.file: v.status for v in intake.verdicts}[str(older)] == "superseded"
