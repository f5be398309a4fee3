"""The one message a client sends: a safetensors file whose header carries a manifest.

Reading trusts nothing. In this order, and before any tensor is used: size limit, header length, schema, digest,
names, shapes and dtypes against the encoder the server expects, finiteness, plausible ranges. Nothing is allocated that
the federation's own sizes do not account for.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneflare.data import ImageSpec
from oneflare.errors import UploadError
from oneflare.evidence import FIELDS as EVIDENCE_FIELDS
from oneflare.evidence import complaint as evidence_complaint
from oneflare.evidence import layout, offers
from oneflare.files import digest_of, tensor_digest, write_bytes
from oneflare.nn import PrototypeNetwork
from oneflare.seeds import numpy_generator
from oneflare.statistics import Plan, Statistics, complaint, triangle_size, unpack
from oneflare.strict import strict_json

SCHEMA = 1
MANIFEST = "oneflare"
HEADER_LIMIT = 4 << 20
SIZE_LIMIT = 1 << 30
SAMPLES_LIMIT = 10**9
PLAUSIBLE = 1e6
"""largest weight, prototype entry or batch-norm statistic that training can explain"""
DENORMAL_SHARE = 0.01
"""of a tensor's values; numbers below float32's normal range slow a server down a hundredfold"""
ENCODER = "encoder."
PROTOTYPES = "prototypes"
COUNTS = "counts"
STATISTICS = "statistics."
EVIDENCE = "evidence."
KNOWN = 20
"""images of a class from which on a client's network may have a say on it"""

SCALE = "#scale"
"""ends the name of the scales that belong to an int8 or int16 tensor"""

ALTERED = "the manifest does not match its digest; it was altered or damaged, send it again"

_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "I16": torch.int16, "I8": torch.int8}
_FIELDS = {
    "schema", "federation", "method", "client", "epoch", "samples", "counts", "classes", "image", "encoder",
    "encoder_hash", "anchors", "dim", "statistics", "evidence", "trust", "tensors", "digest", "signature",
    "member", "created",
}  # fmt: skip
_COUNTS_MODES = ("exact", "noised", "withheld")


@dataclass(frozen=True)
class Contract:
    """What the server expects of every upload of one federation."""

    federation: str
    """digest of the settings all members share"""
    method: str
    encoder: dict[str, Any]
    anchors: dict[str, Any]
    image: ImageSpec
    classes: tuple[str, ...]
    dim: int
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """encoder tensors: name -> shape, dtype"""
    statistics: Plan | None = None
    deep: bool = True
    """whether uploads hold a trained network"""
    evidence: tuple[str, ...] = ()
    """what clients measure of their networks, see `oneflare.evidence`"""
    evidence_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        network: PrototypeNetwork,
        *,
        federation: str,
        method: str,
        encoder: dict[str, Any],
        anchors: dict[str, Any],
        image: ImageSpec,
        classes: tuple[str, ...],
        statistics: Plan | None = None,
        deep: bool = True,
        evidence: tuple[str, ...] = (),
    ) -> Contract:
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in network.encoder.state_dict().items()}
        dim = network.prototypes.shape[1]
        measured = layout(network, evidence)
        return cls(
            federation, method, encoder, anchors, image, classes, dim, shapes, statistics, deep, evidence, measured
        )

    def encoder_hash(self) -> str:
        shapes = {name: [list(shape), str(dtype)] for name, (shape, dtype) in self.shapes.items()}
        return digest_of([_present(self.encoder), shapes])

    def header_limit(self) -> int:
        """Bytes that the header of an honest upload never exceeds."""
        tensors = [*self.shapes, *self.evidence_shapes]
        words = [*tensors, *self.classes, json.dumps([self.encoder, self.anchors, _plan(self)])]
        return min(HEADER_LIMIT, (64 << 10) + (1 << 10) * len(tensors) + 24 * sum(map(len, words)))

    def size_limit(self) -> int:
        """Bytes that an honest upload never exceeds, whatever its number format."""
        kinds = {ENCODER + name: "I8" for name in self.shapes}
        body = max(
            sum(8 * math.prod(shape) for shape, _ in wanted.values())
            for wanted in (_expected(self, {}), _expected(self, kinds))
        )
        return body + 8 * len(self.classes) + self.header_limit() + 8


@dataclass(frozen=True)
class Upload:
    """A verified upload. Small fields are in memory; the weights stay on disk until asked for."""

    path: Path
    manifest: dict[str, Any]
    prototypes: Tensor | None
    """`(C, d)`, or None where no network was trained"""
    counts: Tensor | None
    """`(C,)` float64, or None where withheld"""

    @property
    def client(self) -> int:
        return int(self.manifest["client"])

    @property
    def samples(self) -> int:
        return int(self.manifest["samples"])

    @property
    def digest(self) -> str:
        return str(self.manifest["digest"])

    @property
    def member(self) -> str | None:
        """Who sent it, in a real federation; None in a simulation."""
        return self.manifest.get("member")

    @property
    def file_bytes(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def fields(self) -> frozenset[str]:
        """What this upload offers to a fusion."""
        held = {
            "weights": self.prototypes is not None,
            "prototypes": self.prototypes is not None,
            "counts": self.counts is not None,
            "statistics": any(name.startswith(STATISTICS) for name in self.manifest["tensors"]),
            "calibration": self.trust is not None,
        }
        return frozenset(name for name, offered in held.items() if offered) | offers(
            self.manifest.get("evidence") or ()
        )

    def needed_bytes(self, needs: frozenset[str]) -> int:
        """Size of the tensors that a fusion with these needs reads."""
        needs = needs | offers(needs)
        entries = _read_header(self.path, SIZE_LIMIT, HEADER_LIMIT)
        sizes = {name: entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"}
        return sum(end - start for name, (start, end) in sizes.items() if _field_of(name) in needs)

    @property
    def trust(self) -> float | None:
        """How far the client's own network may be trusted, by the images it kept back; None if it kept none."""
        value = self.manifest.get("trust")
        return None if value is None else float(value)

    def statistics(self) -> Statistics:
        """The analytic statistics; checked again as they are read."""
        tensors = read_tensors(self.path, self.manifest, prefix=STATISTICS)
        if not tensors:
            raise UploadError(f"{self.path}: holds no statistics; set analytic=random_conv for all clients")
        try:
            return unpack({name.removeprefix(STATISTICS): tensor for name, tensor in tensors.items()})
        except (RuntimeError, IndexError, KeyError):
            raise UploadError(f"{self.path}: the statistics changed their shape; send it again") from None

    def evidence(self, prefix: str = "") -> dict[str, Tensor]:
        """What the client measured of its network, by name; checked again as it is read."""
        tensors = read_tensors(self.path, self.manifest, prefix=EVIDENCE + prefix)
        if not tensors:
            raise UploadError(
                f"{self.path}: holds no evidence {prefix.rstrip('.')}; set upload.evidence for all clients"
            )
        return {name.removeprefix(EVIDENCE): tensor for name, tensor in tensors.items()}

    def weights(self) -> dict[str, Tensor]:
        """The encoder's state, float32 where it was floating; checked again as it is read."""
        return _encoder_state(self.path, self.manifest)


def _field_of(name: str) -> str:
    """Which need of a fusion a tensor serves."""
    prefixes = {ENCODER: "weights", STATISTICS: "statistics", **{EVIDENCE + p: f for p, f in EVIDENCE_FIELDS.items()}}
    return next((field for prefix, field in prefixes.items() if name.startswith(prefix)), name)


def read_weights(path: Path, digest: str, size_limit: int = SIZE_LIMIT) -> dict[str, Tensor]:
    """The encoder's state from an upload that was verified before and is known by its digest."""
    manifest = _read_manifest(path, _read_header(path, size_limit, HEADER_LIMIT))
    if manifest.get("digest") != digest or not _digest_holds(manifest):
        raise UploadError(f"{path}: is not the upload that was fused; fuse again")
    return _encoder_state(path, manifest)


def read_prototypes(path: Path, size_limit: int = SIZE_LIMIT) -> tuple[Tensor | None, Tensor | None]:
    """Prototypes and class counts alone, as far as they are in the file; for looking at a run of one's own."""
    manifest = _read_manifest(path, _read_header(path, size_limit, HEADER_LIMIT))
    if not _digest_holds(manifest) or not isinstance(manifest.get("tensors"), dict):
        raise UploadError(f"{path}: {ALTERED}")
    prototypes = read_tensors(path, manifest, prefix=PROTOTYPES).get(PROTOTYPES)
    counts = read_tensors(path, manifest, prefix=COUNTS).get(COUNTS)
    return None if prototypes is None else prototypes.float(), None if counts is None else counts.double()


def _encoder_state(path: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = read_tensors(path, manifest, prefix=ENCODER)
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            tensor = tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))
        state[name.removeprefix(ENCODER)] = tensor.float() if tensor.is_floating_point() else tensor
    shapes = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()}
    if manifest.get("encoder_hash") != digest_of([_present(manifest["encoder"]), shapes]):
        raise UploadError(f"{path}: the weights changed their shape after the upload was checked; send it again")
    return state


def _digest_holds(manifest: Mapping[str, Any]) -> bool:
    content = {key: value for key, value in manifest.items() if key not in ("digest", "signature")}
    return bool(manifest.get("digest") == digest_of(content))


def write_upload(
    path: Path,
    network: PrototypeNetwork | None,
    contract: Contract,
    *,
    client: int,
    counts: Tensor,
    epoch: int,
    seed: int = 0,
    counts_mode: str = "exact",
    counts_epsilon: float = 1.0,
    dtype: str = "float32",
    statistics: Mapping[str, Tensor] | None = None,
    trust: float | None = None,
    evidence: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a client's message; what leaves is decided by `counts_mode` and `dtype`.

    network: None where clients only measure. statistics: packed, see `oneflare.statistics`. evidence: see
    `oneflare.evidence`.
    """
    tensors: dict[str, Tensor] = {}
    if network is not None:
        for name, tensor in network.encoder.state_dict().items():
            tensors |= shrink(ENCODER + name, tensor.detach().cpu(), dtype)
        tensors[PROTOTYPES] = network.prototypes.detach().float().cpu().contiguous()
    tensors |= {STATISTICS + name: tensor.contiguous() for name, tensor in (statistics or {}).items()}
    tensors |= {EVIDENCE + name: tensor.contiguous() for name, tensor in (evidence or {}).items()}
    disclosed = disclose(counts, counts_mode, counts_epsilon, seed, client)
    if disclosed is not None:
        tensors[COUNTS] = disclosed
    samples = int(counts.sum()) if disclosed is None else max(1, round(float(disclosed.sum())))
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "federation": contract.federation,
        "method": contract.method,
        "client": client,
        "epoch": epoch,
        "samples": samples,
        "counts": counts_mode,
        "classes": list(contract.classes),
        "image": contract.image.to_dict(),
        "encoder": contract.encoder,
        "encoder_hash": contract.encoder_hash(),
        "anchors": contract.anchors,
        "dim": contract.dim,
        "statistics": _plan(contract),
        "trust": trust,
        "tensors": {name: tensor_digest(tensor) for name, tensor in sorted(tensors.items())},
    }
    if contract.evidence:
        manifest["evidence"] = list(contract.evidence)
    manifest["digest"] = digest_of(manifest)
    from safetensors.torch import save

    write_bytes(path, save(tensors, metadata={MANIFEST: json.dumps(manifest, sort_keys=True)}))


def _present(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are absent do not count, so a new one leaves old uploads readable."""
    return {key: value for key, value in spec.items() if value is not None}


def seal_upload(
    source: Path,
    target: Path,
    *,
    member: str,
    created: str,
    sign: Callable[[str], dict[str, str]] | None = None,
) -> dict[str, Any]:
    """Copy an upload under its member's name and the moment it was made, signed if `sign` signs its new digest.

    The digest covers both; the tensors stay as they are, byte for byte. Returns the manifest.
    """
    header = _read_header(source, SIZE_LIMIT, HEADER_LIMIT)
    old = _read_manifest(source, header)
    content = {key: value for key, value in old.items() if key not in ("digest", "signature")}
    manifest = content | {"member": member, "created": created}
    manifest["digest"] = digest_of(manifest)
    if sign is not None:
        manifest["signature"] = sign(manifest["digest"])
    with source.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        body = file.read()
    header["__metadata__"] = {MANIFEST: json.dumps(manifest, sort_keys=True)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_bytes(target, len(text).to_bytes(8, "little") + text + body)
    return manifest


def read_manifest(path: Path, size_limit: int = SIZE_LIMIT) -> dict[str, Any]:
    """An upload's manifest, known to be whole; its tensors are neither read nor checked."""
    manifest = _read_manifest(path, _read_header(path, size_limit, HEADER_LIMIT))
    if not _digest_holds(manifest):
        raise UploadError(f"{path}: {ALTERED}")
    return manifest


def read_layout(path: Path, size_limit: int = SIZE_LIMIT) -> tuple[dict[str, Any], dict[str, int]]:
    """An upload's manifest, known to be whole, and the bytes of every tensor."""
    manifest = read_manifest(path, size_limit)
    header = _read_header(path, size_limit, HEADER_LIMIT)
    sizes: dict[str, int] = {}
    for name, entry in header.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) and name != "__metadata__" else None
        if isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(value, int) for value in offsets):
            sizes[name] = offsets[1] - offsets[0]
    if not isinstance(manifest.get("tensors"), dict) or set(sizes) != set(manifest["tensors"]):
        raise UploadError(f"{path}: the tensors are not those the manifest lists; send the file again")
    return manifest, sizes


def _plan(contract: Contract) -> dict[str, Any] | None:
    return None if contract.statistics is None else contract.statistics.to_dict()


def shrink(name: str, tensor: Tensor, dtype: str) -> dict[str, Tensor]:
    """A tensor as it is sent. Weights (two or more dimensions) shrink; biases and batch-norm statistics stay float32.

    int8: w = q s with one scale s = max|w|/127 per output channel.
    """
    if dtype == "float32" or not tensor.is_floating_point() or tensor.ndim < 2:
        return {name: tensor.contiguous()}
    if dtype == "bfloat16":
        return {name: tensor.to(torch.bfloat16).contiguous()}
    rows = tensor.flatten(1)
    scale = rows.abs().amax(1).clamp(min=1e-12) / 127
    quantised = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return {name: quantised.view_as(tensor).contiguous(), name + SCALE: scale}


def disclose(counts: Tensor, mode: str, epsilon: float, seed: int, client: int) -> Tensor | None:
    """Class counts as the member agreed to reveal them; noise is Laplace(1/epsilon), then rounded and clipped."""
    if mode == "withheld":
        return None
    values = counts.double().cpu()
    if mode == "noised":
        noise = numpy_generator(seed, client, "count noise").laplace(0.0, 1 / epsilon, len(values))
        values = (values + torch.from_numpy(noise)).round().clamp(min=0)
    return values.long()


def read_upload(path: Path, contract: Contract, size_limit: int = SIZE_LIMIT) -> Upload:
    """Verify a file against what the federation expects; refuse it with one line that names file, field and remedy."""
    header = _read_header(path, min(size_limit, contract.size_limit()), contract.header_limit())
    manifest = _read_manifest(path, header)
    _check_manifest(path, manifest, contract)
    _check_layout(path, header, manifest, contract)
    small: dict[str, Tensor] = {}
    for name, tensor in read_tensors(path, manifest).items():
        reason = _implausible(name, tensor, int(manifest["samples"]))
        if reason is not None:
            raise UploadError(f"{path}: {name} has {reason}; the client must train again")
        if not name.startswith(ENCODER):
            small[name] = tensor.clone()  # a view would keep the whole file mapped
    counts = small.get(COUNTS)
    _check_counts(path, manifest, counts)
    _check_statistics(path, manifest, contract, small)
    measured = {name.removeprefix(EVIDENCE): t for name, t in small.items() if name.startswith(EVIDENCE)}
    reason = evidence_complaint(measured, counts)
    if reason is not None:
        raise UploadError(f"{path}: evidence.{reason}; the client must write its upload again")
    prototypes = small.get(PROTOTYPES)
    return Upload(
        path,
        manifest,
        None if prototypes is None else prototypes.float(),
        None if counts is None else counts.double(),
    )


def _implausible(name: str, tensor: Tensor, samples: int) -> str | None:
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


def _check_counts(path: Path, manifest: Mapping[str, Any], counts: Tensor | None) -> None:
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


def _check_statistics(
    path: Path, manifest: Mapping[str, Any], contract: Contract, tensors: Mapping[str, Tensor]
) -> None:
    if contract.statistics is None:
        return
    packed = {name.removeprefix(STATISTICS): t for name, t in tensors.items() if name.startswith(STATISTICS)}
    reason = complaint(packed, int(manifest["samples"]), contract.statistics.privacy is not None)
    if reason is not None:
        raise UploadError(f"{path}: statistics.{reason}; the client must write its upload again")


def _read_header(path: Path, size_limit: int, header_limit: int) -> dict[str, Any]:
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe must not make us wait
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UploadError(f"{path}: is not a regular file; refuse it")
            size = status.st_size
            if size > size_limit:
                raise UploadError(
                    f"{path}: {size} bytes exceed the limit of {size_limit}; raise the limit or refuse it"
                )
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(header_limit, size - 8):
                raise UploadError(f"{path}: the header is damaged or cut off; send the file again")
            header = strict_json(file.read(length))
    except FileNotFoundError:
        raise UploadError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UploadError(f"{path}: is not a regular file; refuse it") from None
    except OSError as error:
        raise UploadError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise UploadError(f"{path}: the header is not valid JSON; send the file again") from None
    if not isinstance(header, dict):
        raise UploadError(f"{path}: the header is not a mapping; send the file again")
    return header


def _read_manifest(path: Path, header: Mapping[str, Any]) -> dict[str, Any]:
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


def _check_manifest(path: Path, manifest: Mapping[str, Any], contract: Contract) -> None:
    if not _digest_holds(manifest):
        raise UploadError(f"{path}: {ALTERED}")
    for key in manifest:
        if key not in _FIELDS:
            raise UploadError(f"{path}: {key!r:.80} is not a field of the manifest; refuse it")
    expected = {
        "federation": contract.federation,
        "method": contract.method,
        "encoder_hash": contract.encoder_hash(),
        "classes": list(contract.classes),
        "image": contract.image.to_dict(),
        "anchors": contract.anchors,
        "dim": contract.dim,
        "statistics": _plan(contract),
        "evidence": list(contract.evidence) or None,
    }
    for key, value in expected.items():
        if digest_of(manifest.get(key)) != digest_of(value):  # 8, 8.0 and true are three things
            raise UploadError(f"{path}: {key} differs from this federation's; was it made for another one?")
    sent = manifest.get("encoder")
    if not isinstance(sent, dict) or digest_of(_present(sent)) != digest_of(_present(contract.encoder)):
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
    if not isinstance(manifest.get("tensors"), dict):
        raise UploadError(f"{path}: the manifest lists no tensors; send the file again")


def _check_layout(path: Path, header: Mapping[str, Any], manifest: Mapping[str, Any], contract: Contract) -> None:
    """Names, shapes and dtypes, from the header alone."""
    entries = {key: value for key, value in header.items() if key != "__metadata__"}
    if set(entries) != set(manifest["tensors"]):
        raise UploadError(f"{path}: the tensors are not those the manifest lists; send the file again")
    if set(header["__metadata__"]) != {MANIFEST}:
        raise UploadError(f"{path}: the header has more than a OneFlare manifest; refuse it")
    kinds = {name: entry.get("dtype") if isinstance(entry, dict) else None for name, entry in entries.items()}
    expected = _expected(contract, kinds)
    optional = {COUNTS: ((len(contract.classes),), False)}
    for name in expected:
        if name not in entries:
            raise UploadError(f"{path}: {name} is missing; the client must write its upload again")
    for name, entry in entries.items():
        wanted = expected.get(name) or optional.get(name)
        if wanted is None:
            raise UploadError(f"{path}: {name!r:.80} is not a field of this federation's uploads; refuse it")
        shape, floating = wanted
        found = entry.get("shape") if isinstance(entry, dict) else None
        dtype = _STORED.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
        if isinstance(entry, dict) and set(entry) != {"dtype", "shape", "data_offsets"}:
            raise UploadError(f"{path}: {name} is described by other keys than dtype, shape and data_offsets")
        if found != list(shape):
            raise UploadError(f"{path}: {name} has shape {found!r:.60}, expected {list(shape)}")
        scaled = dtype in (torch.int8, torch.int16)
        if dtype is None or dtype.is_floating_point != floating or scaled != (name + SCALE in expected):
            raise UploadError(f"{path}: {name} has type {entry.get('dtype')!r:.20}, which does not fit")


def _expected(contract: Contract, kinds: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """name -> shape, whether floating; a tensor that came as whole numbers (int8, int16) needs its scales beside it."""
    expected: dict[str, tuple[tuple[int, ...], bool]] = {}
    classes = len(contract.classes)
    if contract.deep:
        expected = {
            ENCODER + name: (shape, dtype.is_floating_point) for name, (shape, dtype) in contract.shapes.items()
        }
        for name, (shape, floating) in list(expected.items()):
            if kinds.get(name) == "I8" and floating and len(shape) >= 2:
                expected |= {name: (shape, False), name + SCALE: (shape[:1], True)}
        expected[PROTOTYPES] = ((classes, contract.dim), True)
        expected |= {EVIDENCE + name: (shape, True) for name, shape in contract.evidence_shapes.items()}
    if contract.statistics is not None:
        dim, scatter = contract.statistics.dim, STATISTICS + "scatter"
        expected |= {
            scatter: ((triangle_size(dim),), contract.statistics.dtype == "float32"),
            STATISTICS + "sums": ((classes, dim), True),
            STATISTICS + "counts": ((classes,), False),
        }
        if contract.statistics.dtype == "int16":
            expected[scatter + SCALE] = ((dim,), True)
    return expected


def read_tensors(path: Path, manifest: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors the manifest lists, each compared with its digest."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in manifest["tensors"]:
                if name.startswith(prefix):
                    tensor = file.get_tensor(name)
                    if tensor_digest(tensor) != manifest["tensors"][name]:
                        raise UploadError(f"{path}: {name} does not match its digest; it was damaged, send it again")
                    tensors[name] = tensor
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UploadError(f"{path}: not a valid safetensors file ({reason}); send it again") from None
    return tensors
