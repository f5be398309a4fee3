"""An upload in the server's hands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from oneflare.errors import UploadError
from oneflare.evidence import FIELDS as EVIDENCE_FIELDS
from oneflare.evidence import complaint as evidence_complaint
from oneflare.evidence import offers
from oneflare.files import digest_of
from oneflare.statistics import Statistics, unpack
from oneflare.upload.contract import (
    COUNTS,
    ENCODER,
    EVIDENCE,
    HEADER_LIMIT,
    PROTOTYPES,
    SCALE,
    SIZE_LIMIT,
    STATISTICS,
    Contract,
    present,
)
from oneflare.upload.reading import (
    ALTERED,
    check_counts,
    check_layout,
    check_manifest,
    check_statistics,
    digest_holds,
    implausible,
    notes_of,
    parse_manifest,
    read_header,
    read_tensors,
)


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
    def notes(self) -> tuple[str, ...]:
        """What the member says of its data."""
        return notes_of(self.path, self.manifest)

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
        entries = read_header(self.path, SIZE_LIMIT, HEADER_LIMIT)
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


def read_upload(path: Path, contract: Contract, size_limit: int = SIZE_LIMIT) -> Upload:
    """Verify a file against what the federation expects; refuse it with one line that names file, field and remedy."""
    header = read_header(path, min(size_limit, contract.size_limit()), contract.header_limit())
    manifest = parse_manifest(path, header)
    check_manifest(path, manifest, contract)
    check_layout(path, header, manifest, contract)
    small: dict[str, Tensor] = {}
    for name, tensor in read_tensors(path, manifest).items():
        reason = implausible(name, tensor, int(manifest["samples"]))
        if reason is not None:
            raise UploadError(f"{path}: {name} has {reason}; the client must train again")
        if not name.startswith(ENCODER):
            small[name] = tensor.clone()  # a view would keep the whole file mapped
    counts = small.get(COUNTS)
    check_counts(path, manifest, counts)
    check_statistics(path, manifest, contract, small)
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


def read_weights(path: Path, digest: str, size_limit: int = SIZE_LIMIT) -> dict[str, Tensor]:
    """The encoder's state from an upload that was verified before and is known by its digest."""
    manifest = parse_manifest(path, read_header(path, size_limit, HEADER_LIMIT))
    if manifest.get("digest") != digest or not digest_holds(manifest):
        raise UploadError(f"{path}: is not the upload that was fused; fuse again")
    return _encoder_state(path, manifest)


def read_prototypes(path: Path, size_limit: int = SIZE_LIMIT) -> tuple[Tensor | None, Tensor | None]:
    """Prototypes and class counts alone, as far as they are in the file; for looking at a run of one's own."""
    manifest = parse_manifest(path, read_header(path, size_limit, HEADER_LIMIT))
    if not digest_holds(manifest) or not isinstance(manifest.get("tensors"), dict):
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
    if manifest.get("encoder_hash") != digest_of([present(manifest["encoder"]), shapes]):
        raise UploadError(f"{path}: the weights changed their shape after the upload was checked; send it again")
    return state
