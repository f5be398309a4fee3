"""Reads an upload and checks its size, manifest, digest, names, shapes, types and numbers: nothing in it is trusted.

In this order, and before any tensor is used: size limit, header length, schema, digest, names, shapes and dtypes
against the encoder the server expects, finiteness, plausible ranges. Nothing is allocated that the federation's own
sizes do not account for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneflare.core.files import digest_of
from oneflare.core.strict import strict_json
from oneflare.core.threads import in_threads
from oneflare.errors import UploadError
from oneflare.upload.blocks import apart, limits_apart
from oneflare.upload.class_statistics import CLASS_SCATTER, class_complaint
from oneflare.upload.coding import code_complaint, coder_of
from oneflare.upload.contract import (
    COUNTS,
    ENCODER,
    EVIDENCE,
    HEADER_LIMIT,
    MANIFEST,
    SCALE,
    SCHEMA,
    SIZE_LIMIT,
    STATISTICS,
    Contract,
    at_most,
    expected_tensors,
    plan_of,
    present,
)
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.masking.fixed_point import FIXED, from_vector
from oneflare.upload.mixtures import MEANS, VARIANCES, mixture_complaint
from oneflare.upload.statistics import SCATTER, complaint, limits_of, pack
from oneflare.upload.tensors import STORED, open_upload
from oneflare.upload.whole import whole_complaint, whole_limits

SAMPLES_LIMIT = 10**9
MOST_NOTES, LONGEST_NOTE = 8, 200
PLAUSIBLE = 1e6
"""largest weight, prototype entry or batch-norm statistic that training can explain"""
DENORMAL_SHARE = 0.01
"""of a tensor's values; numbers below float32's normal range slow a server down a hundredfold"""
ALTERED = "the manifest does not match its digest; it was altered or damaged, send it again"
_FIELDS = {
    "schema", "federation", "method", "client", "epoch", "samples", "counts", "classes", "image", "encoder",
    "encoder_hash", "anchors", "dim", "statistics", "evidence", "trust", "tensors", "digest", "signature",
    "member", "created", "notes", "fixed", "masked",
}  # fmt: skip
SHORT = {STATISTICS + MEANS, STATISTICS + VARIANCES}
"""the tensors that may be float16"""
_COUNTS_MODES = ("exact", "noised", "withheld")


def read_header(path: Path, size_limit: int, header_limit: int) -> dict[str, Any]:
    """The header of a file that is no larger than `size_limit`, as it stands: nothing of it is checked yet."""
    if any("\udc80" <= character <= "\udcff" for character in str(path)):
        raise UploadError(f"{path}: the file's name or its folder's is not UTF-8 text; rename it")
    try:
        with open_upload(path) as (file, size):
            if size > size_limit:
                raise UploadError(
                    f"{path}: {size} bytes exceed the limit of {size_limit}; ask the member for a new upload"
                )
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(header_limit, size - 8):
                raise UploadError(f"{path}: the header is damaged or cut off; send the file again")
            header = strict_json(file.read(length))
    except ValueError:
        raise UploadError(f"{path}: the header is not valid JSON; send the file again") from None
    if not isinstance(header, dict):
        raise UploadError(f"{path}: the header is not a mapping; send the file again")
    return header


def parse_manifest(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    metadata = header.get("__metadata__")
    text = metadata.get(MANIFEST) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise UploadError(f"{path}: has no OneFlare manifest; is it an upload?")
    try:
        manifest = strict_json(text)
    except ValueError:
        raise UploadError(f"{path}: the manifest is not valid JSON; send the file again") from None
    if not isinstance(manifest, dict):
        raise UploadError(f"{path}: the manifest is not a mapping; send the file again")
    schema = manifest.get("schema")
    if schema != SCHEMA or type(schema) is not int:
        raise UploadError(f"{path}: schema {schema!r:.20} is not the {SCHEMA} this version reads; update OneFlare")
    return manifest


def digest_holds(manifest: Mapping[str, Any]) -> bool:
    content = {key: value for key, value in manifest.items() if key not in ("digest", "signature")}
    return bool(manifest.get("digest") == digest_of(content))


def read_manifest(path: Path, size_limit: int = SIZE_LIMIT) -> dict[str, Any]:
    """An upload's manifest, known to be whole; its tensors are neither read nor checked."""
    manifest = parse_manifest(path, read_header(path, size_limit, HEADER_LIMIT))
    if not digest_holds(manifest):
        raise UploadError(f"{path}: {ALTERED}")
    return manifest


def read_layout(path: Path, size_limit: int = SIZE_LIMIT) -> tuple[dict[str, Any], dict[str, int]]:
    """An upload's manifest, known to be whole, and the bytes of every tensor."""
    manifest = read_manifest(path, size_limit)
    header = read_header(path, size_limit, HEADER_LIMIT)
    sizes: dict[str, int] = {}
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) and name != "__metadata__" else None
        if isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(value, int) for value in offsets):
            sizes[name] = offsets[1] - offsets[0]
    if not isinstance(manifest.get("tensors"), dict) or set(sizes) != set(manifest["tensors"]):
        raise UploadError(f"{path}: the tensors are not those the manifest lists; send the file again")
    return manifest, sizes


def check_manifest(path: Path, manifest: Mapping[str, Any], contract: Contract) -> None:
    if not digest_holds(manifest):
        raise UploadError(f"{path}: {ALTERED}")
    for key in manifest:
        if key not in _FIELDS:
            raise UploadError(
                f"{path}: {key!r:.80} is not a field of the manifest; uploads are written by oneflare alone"
            )
    expected = {
        "federation": contract.federation,
        "method": contract.method,
        "encoder_hash": contract.encoder_hash(),
        "classes": list(contract.classes),
        "image": contract.image.to_dict(),
        "anchors": contract.anchors,
        "dim": contract.dim,
        "statistics": plan_of(contract),
        "evidence": list(contract.evidence) or None,
        "fixed": None if contract.fixed is None else contract.fixed.to_dict(),
    }
    if (manifest.get("masked") is not None) != (contract.masked > 0):
        wanted = "sums must be masked" if contract.masked else "sums must be plain"
        raise UploadError(f"{path}: in this federation {wanted}; train with its charter, and send that file alone")
    for key, value in expected.items():
        if digest_of(manifest.get(key)) != digest_of(value):  # 8, 8.0 and true are three things
            raise UploadError(f"{path}: {key} differs from this federation's; was it made for another one?")
    sent = manifest.get("encoder")
    if not isinstance(sent, dict) or digest_of(present(sent)) != digest_of(present(contract.encoder)):
        raise UploadError(f"{path}: encoder differs from this federation's; was it made for another one?")
    limits = {"samples": (1, SAMPLES_LIMIT), "client": (0, 1 << 53), "epoch": (int(contract.deep), 1 << 53)}
    for key, (least, most) in limits.items():
        number = manifest.get(key)
        if type(number) is not int or not least <= number <= most:
            raise UploadError(f"{path}: {key} is {number!r:.40}, not a number from {least} to {most}; send it again")
    if manifest.get("counts") not in _COUNTS_MODES:
        raise UploadError(f"{path}: counts is {manifest.get('counts')!r:.40}, not one of {', '.join(_COUNTS_MODES)}")
    beta = manifest.get("trust")
    if beta is not None and (not isinstance(beta, int | float) or isinstance(beta, bool) or not 0 <= beta <= 1e3):
        raise UploadError(f"{path}: trust is {beta!r:.20}, not between 0 and 1000; send it again")
    notes_of(path, manifest)
    if not isinstance(manifest.get("tensors"), dict):
        raise UploadError(f"{path}: the manifest lists no tensors; send the file again")


def notes_of(path: Path, manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """What a member says of its data: a few printable lines, or the upload is refused."""
    notes = manifest.get("notes", [])
    plain = isinstance(notes, list) and all(isinstance(text, str) and text.isprintable() for text in notes)
    if not plain or len(notes) > MOST_NOTES or any(len(text) > LONGEST_NOTE for text in notes):
        raise UploadError(
            f"{path}: notes must be at most {MOST_NOTES} printable lines of {LONGEST_NOTE} characters; send it again"
        )
    return tuple(notes)


def check_layout(path: Path, header: Mapping[str, Any], manifest: Mapping[str, Any], contract: Contract) -> None:
    """Names, shapes and dtypes, from the header alone."""
    entries = {key: value for key, value in header.items() if key != "__metadata__"}
    if set(entries) != set(manifest["tensors"]):
        raise UploadError(f"{path}: the tensors are not those the manifest lists; send the file again")
    if set(header["__metadata__"]) != {MANIFEST}:
        raise UploadError(
            f"{path}: the header holds more than a OneFlare manifest; uploads are written by oneflare alone"
        )
    kinds = {name: entry.get("dtype") if isinstance(entry, dict) else None for name, entry in entries.items()}
    expected = expected_tensors(contract, kinds)
    optional = {COUNTS: ((len(contract.classes),), False)}
    shorter = at_most(contract)
    for name in expected:
        if name not in entries:
            raise UploadError(f"{path}: {name} is missing; the client must write its upload again")
    for name, entry in entries.items():
        wanted = expected.get(name) or optional.get(name)
        if wanted is None:
            raise UploadError(
                f"{path}: {name!r:.80} is not a field of this federation's uploads; train with its charter"
            )
        shape, floating = wanted
        found = entry.get("shape") if isinstance(entry, dict) else None
        dtype = STORED.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
        if isinstance(entry, dict) and set(entry) != {"dtype", "shape", "data_offsets"}:
            raise UploadError(f"{path}: {name} is described by other keys than dtype, shape and data_offsets")
        if found != list(shape) and not (name in shorter and _is_shorter(found, shape)):
            raise UploadError(f"{path}: {name} has shape {found!r:.60}, expected {list(shape)}")
        scaled = dtype in (torch.int8, torch.int16)
        short = dtype == torch.float16 and name not in SHORT
        if dtype is None or short or dtype.is_floating_point != floating or scaled != (name + SCALE in expected):
            raise UploadError(f"{path}: {name} has type {entry.get('dtype')!r:.20}, which does not fit")


def _is_shorter(found: Any, most: tuple[int, ...]) -> bool:
    return isinstance(found, list) and len(found) == 1 and type(found[0]) is int and 0 < found[0] <= most[0]


def implausible(name: str, tensor: Tensor, samples: int) -> str | None:
    """What is wrong with a tensor's values; None if nothing is.

    Statistics are sums over images. Batch-norm statistics of a dead channel fade away, so those alone may be denormal.
    """
    if not tensor.is_floating_point():
        if name.startswith(ENCODER) and tensor.dtype == torch.int64 and bool((tensor < 0).any()):
            return "a negative number"
        return "a value outside -127 to 127" if tensor.dtype == torch.int8 and bool((tensor == -128).any()) else None
    if tensor.numel() == 0:
        return None
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        return "values that are not finite"
    limit = PLAUSIBLE * (samples if name.startswith((STATISTICS, EVIDENCE)) else 1)
    if name.startswith(EVIDENCE):
        limit *= PLAUSIBLE  # squares of weights, gradients and features
    if name.endswith(SCALE):
        limit /= 127
        if bool((tensor < 0).any()):
            return "a negative scale"
    if largest > limit:
        return f"a value of {largest:.3g}, beyond the plausible {limit:.3g}"
    if name.endswith("running_var") and bool((tensor < 0).any()):
        return "a negative variance"
    if not name.startswith((STATISTICS, EVIDENCE)) and "running_" not in name:
        denormal = (tensor != 0) & (tensor.abs() < torch.finfo(tensor.dtype).tiny)
        if float(denormal.double().mean()) > DENORMAL_SHARE:
            return "denormal numbers, which training does not leave behind"
    return None


def check_counts(path: Path, manifest: Mapping[str, Any], counts: Tensor | None) -> None:
    if counts is None:
        if manifest["counts"] != "withheld":
            raise UploadError(f"{path}: counts is missing; the client must write its upload again")
        return
    if manifest["counts"] == "withheld":
        raise UploadError(f"{path}: counts is there although the manifest says withheld; write the upload again")
    if bool((counts < 0).any()):
        raise UploadError(f"{path}: counts has a negative number; the client must write its upload again")
    total, samples = sum(counts.tolist()), int(manifest["samples"])
    if total != samples and not (manifest["counts"] == "noised" and total == 0 and samples == 1):
        raise UploadError(
            f"{path}: samples ({samples}) is not the sum of the class counts ({total}); write the upload again"
        )


def check_statistics(
    path: Path, manifest: Mapping[str, Any], contract: Contract, tensors: Mapping[str, Tensor]
) -> None:
    if contract.statistics is None or contract.masked:
        return
    packed = {name.removeprefix(STATISTICS): t for name, t in tensors.items() if name.startswith(STATISTICS)}
    limits = limits_of(contract.statistics, contract.image.channels, contract.image.size)
    if contract.fixed is not None:
        packed = pack(from_vector(packed[FIXED], len(contract.classes), contract.statistics.dim, contract.fixed))
        limits = limits.rounded(contract.fixed.clip, 2.0**-contract.fixed.bits)
    sizes = contract.statistics.blocks
    reasons = in_threads(
        lambda part, own, block: _block_complaint(part, int(manifest["samples"]), own, contract, block),
        apart(packed, sizes),
        limits_apart(limits, sizes),
        range(len(sizes)),
    )
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None and CLASS_SCATTER in packed:
        reason = class_complaint(packed, limits)
    if reason is None and MEANS in packed:
        reason = mixture_complaint(packed, limits)
    if reason is not None:
        raise UploadError(f"{path}: statistics.{reason}; the client must write its upload again")


def _block_complaint(
    packed: Mapping[str, Tensor], samples: int, limits: FeatureLimits, contract: Contract, block: int
) -> str | None:
    """What no images could give, in the packed statistics of one block of features; None if nothing is."""
    plan, image = contract.statistics, contract.image
    assert plan is not None
    if not plan.coded:
        return complaint(packed, samples, limits, plan.privacy)
    coder = coder_of(plan.feature_map, image.channels, image.size).apart(plan.blocks)[block]
    if plan.whole:
        limits = whole_limits(limits, coder)
    plain = {name: tensor for name, tensor in packed.items() if name != SCATTER}
    reason = complaint(plain, samples, limits, plan.privacy)
    if reason is not None:
        return reason
    return whole_complaint(packed, limits) if plan.whole else code_complaint(packed, limits, coder)
