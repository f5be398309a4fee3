"""A verified upload, as the server uses it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from oneflare.core.files import digest_of
from oneflare.core.strict import strict_json
from oneflare.core.threads import in_threads
from oneflare.errors import MemberFault, UploadError
from oneflare.nn.blocks import block_sizes
from oneflare.nn.decorrelation import Decorrelation
from oneflare.upload.blocks import apart
from oneflare.upload.checking import (
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
)
from oneflare.upload.class_statistics import CLASS_SCATTER, ClassStatistics, unpack_classes
from oneflare.upload.coding import CODED, WHOLE, changed_sums, coder_of, decoded_step, plain
from oneflare.upload.contract import (
    COUNTS,
    ENCODER,
    EVIDENCE,
    HEADER_LIMIT,
    MASKED,
    PROTOTYPES,
    SCALE,
    SIZE_LIMIT,
    STATISTICS,
    Contract,
    present,
)
from oneflare.upload.evidence import FIELDS as EVIDENCE_FIELDS
from oneflare.upload.evidence import complaint as evidence_complaint
from oneflare.upload.evidence import offers
from oneflare.upload.masking.fixed_point import FIXED, FixedPoint, from_vector
from oneflare.upload.mixtures import Mixtures, unpack_mixtures
from oneflare.upload.statistics import (
    CLASS_COVARIANCES,
    COVARIANCE,
    DEFAULT_PARTS,
    G_B_N,
    MIXTURES,
    SCATTER,
    SUMS,
    ClassMeans,
    Statistics,
    unpack,
)
from oneflare.upload.statistics import FIELDS as STATISTICS_FIELDS
from oneflare.upload.statistics import offers as statistics_offer
from oneflare.upload.tensors import StoredTensor, copied_tensors, open_upload, tensor_entries
from oneflare.upload.whole import plain_sums, plain_whole, whole_sums


@dataclass(frozen=True)
class Upload:
    """A verified upload. Small fields are in memory; the weights stay on disk until asked for.

    Whatever is read later is copied into memory and compared with its digest again, at the places and in the shapes
    that were verified: a file that has changed since is a `MemberFault`.
    """

    path: Path
    manifest: dict[str, Any]
    entries: Mapping[str, StoredTensor]
    """where every tensor lies, as it was verified"""
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
            "calibration": self.trust is not None,
        }
        measured = offers(self.manifest.get("evidence") or ())
        return frozenset(name for name, offered in held.items() if offered) | measured | self._statistics_fields

    @property
    def _statistics_fields(self) -> frozenset[str]:
        plan = self.manifest.get("statistics")
        if plan is None or self.manifest.get("masked") is not None:
            return frozenset()
        return statistics_offer(plan.get("parts", DEFAULT_PARTS))

    def needed_bytes(self, needs: frozenset[str]) -> int:
        """Size of the tensors that a fusion with these needs reads."""
        needs = needs | offers(needs) | ({G_B_N} if needs & STATISTICS_FIELDS else frozenset())
        return sum(entry.end - entry.start for name, entry in self.entries.items() if _field_of(name) in needs)

    @property
    def trust(self) -> float | None:
        """How far the client's own network may be trusted, by the images it kept back; None if it kept none."""
        value = self.manifest.get("trust")
        return None if value is None else float(value)

    def statistics(self) -> Statistics:
        """The analytic statistics G, b and n."""
        packed = self._packed(G_B_N)
        if len(self._blocks) > 1:
            raise UploadError(
                f"{self.path}: holds products of features within blocks alone (analytic.blocks), which only fusion "
                "analytic can use"
            )
        if FIXED in packed:
            return self._fixed(packed)
        return unpack_classes(packed).pooled() if CLASS_SCATTER in packed else unpack(self._plain(packed))

    def solved_statistics(self, into: Sequence[Tensor] | None = None) -> list[Statistics]:
        """The statistics of each block of features for which fusion `analytic` solves.

        Where sums are coded, they are those of the features in which sums were rounded, z = A phi
        (`oneflare.upload.coding`), and where they are whole numbers, those of q (`oneflare.upload.whole`).

        into: for each block a matrix `(D, D)` float64 that may be overwritten for G
        """
        if not self._coded and len(self._blocks) == 1:
            return [self.statistics()]
        parts = apart(self._packed(G_B_N), self._blocks)
        if not self._coded:
            return [unpack(part) for part in parts]
        with self.blamed():
            memory: Sequence[Tensor | None] = into or [None] * len(parts)
            if self._whole:
                return in_threads(whole_sums, parts, memory)
            coders = self._coder().apart(self._blocks)
            return [Statistics(*sums) for sums in in_threads(changed_sums, parts, coders, memory)]

    def _coder(self) -> Decorrelation:
        """The change of features under which sums are sent in code."""
        image = self.manifest["image"]
        return coder_of(self.manifest["statistics"]["feature_map"], int(image["channels"]), int(image["size"]))

    @property
    def _blocks(self) -> tuple[int, ...]:
        """The sizes of the blocks of features within which products are summed."""
        plan = self.manifest["statistics"]
        return block_sizes(int(plan["dim"]), plan["feature_map"].get("blocks"))

    @property
    def _coded(self) -> bool:
        plan = self.manifest["statistics"]
        return plan["dtype"] in CODED and COVARIANCE in plan.get("parts", DEFAULT_PARTS)

    @property
    def _whole(self) -> bool:
        """Whether sums are of whole numbers, of features that were rounded for each image."""
        return self._coded and self.manifest["statistics"]["dtype"] == WHOLE

    def steps(self) -> list[float]:
        """To which step the coded sums of products of each block were rounded."""
        with self.blamed():
            return [decoded_step(part) for part in apart(self._packed(G_B_N), self._blocks)]

    def class_means(self) -> ClassMeans:
        """The sums and counts of each class alone."""
        packed = self._packed("class_means")
        if FIXED in packed:
            found = self._fixed(packed)
            return ClassMeans(found.sums, found.counts)
        if self._whole:
            packed = {**packed, SUMS: plain_sums(packed, self._coder())}
        return ClassMeans.of(packed)

    def class_statistics(self) -> ClassStatistics:
        """The statistics of each class."""
        return unpack_classes(self._packed(CLASS_COVARIANCES))

    def mixtures(self) -> Mixtures:
        """The Gaussian mixtures of each class."""
        return unpack_mixtures(self._packed(MIXTURES))

    def _packed(self, field: str) -> dict[str, Tensor]:
        """The tensors of the statistics, without their prefix, of an upload that offers this field."""
        tensors = self._tensors(STATISTICS)
        if self.manifest.get("masked") is not None:
            raise UploadError(f"{self.path}: holds no plain statistics; only their total can be read")
        if not tensors:
            raise UploadError(f"{self.path}: holds no statistics; set analytic=random_conv for all clients")
        if field not in self.fields:
            raise UploadError(
                f"{self.path}: its statistics hold no {field}; name it in upload.statistics for all clients"
            )
        return {name.removeprefix(STATISTICS): tensor for name, tensor in tensors.items()}

    def _plain(self, packed: dict[str, Tensor]) -> dict[str, Tensor]:
        """The packed statistics with their sums of products out of the code, if they are in one."""
        if self.manifest["statistics"]["dtype"] not in CODED or SCATTER not in packed:
            return packed
        with self.blamed():
            return (plain_whole if self._whole else plain)(packed, self._coder())

    def _fixed(self, packed: Mapping[str, Tensor]) -> Statistics:
        """The statistics whose sums are plain fixed-point numbers."""
        classes, dim = len(self.manifest["classes"]), int(self.manifest["statistics"]["dim"])
        return from_vector(packed[FIXED], classes, dim, FixedPoint.of(self.manifest["fixed"]))

    def words(self) -> Tensor:
        """The masked sums, int64: each number is the member's own plus masks, modulo 2^64."""
        (vector,) = self._tensors(STATISTICS + MASKED).values()
        return vector

    def evidence(self, prefix: str = "") -> dict[str, Tensor]:
        """What the client measured of its network, by name."""
        tensors = self._tensors(EVIDENCE + prefix)
        if not tensors:
            raise UploadError(
                f"{self.path}: holds no evidence {prefix.rstrip('.')}; set upload.evidence for all clients"
            )
        return {name.removeprefix(EVIDENCE): tensor for name, tensor in tensors.items()}

    def weights(self) -> dict[str, Tensor]:
        """The encoder's state, float32 where it was floating."""
        return encoder_state(self._tensors(ENCODER))

    def content(self) -> bytes:
        """The whole file, known to be the one that was verified."""
        with self.blamed(), open_upload(self.path) as (file, size):
            content = file.read(size)
            begin = 8 + int.from_bytes(content[:8], "little")
            try:
                header = strict_json(content[8:begin])
                same = isinstance(header, dict) and parse_manifest(self.path, header) == self.manifest
            except ValueError:
                same = False
            end = begin + max(entry.end for entry in self.entries.values())
            if not same or len(content) != end or tensor_entries(self.path, header) != self.entries:
                raise UploadError(f"{self.path}: changed after it was verified; send it again")
            for name, entry in self.entries.items():
                part = memoryview(content)[begin + entry.start : begin + entry.end]
                if hashlib.sha256(part).hexdigest() != self.manifest["tensors"][name]:
                    raise UploadError(f"{self.path}: {name} changed after it was verified; send it again")
        return content

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        with self.blamed():
            return dict(copied_tensors(self.path, self.manifest, self.entries, prefix))

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """What this upload's own numbers make impossible is this member's fault, and says so."""
        try:
            yield
        except MemberFault:
            raise
        except UploadError as error:
            raise MemberFault(self.client, str(error)) from None
        except (RuntimeError, ArithmeticError, ValueError) as error:  # torch's linear algebra raises RuntimeErrors
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise MemberFault(
                self.client, f"{self.path}: cannot be calculated with ({reason}); the client must train again"
            ) from error


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
    entries = tensor_entries(path, header)
    small: dict[str, Tensor] = {}
    for name, tensor in copied_tensors(path, manifest, entries):
        reason = implausible(name, tensor, int(manifest["samples"]))
        if reason is not None:
            raise UploadError(f"{path}: {name} has {reason}; the client must train again")
        if not name.startswith(ENCODER):
            small[name] = tensor
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
        entries,
        None if prototypes is None else prototypes.float(),
        None if counts is None else counts.double(),
    )


def read_tensors(path: Path, manifest: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Private copies of the tensors that the manifest lists, each compared with its digest."""
    entries = tensor_entries(path, read_header(path, SIZE_LIMIT, HEADER_LIMIT))
    return dict(copied_tensors(path, manifest, entries, prefix))


def read_weights(path: Path, digest: str, size_limit: int = SIZE_LIMIT) -> dict[str, Tensor]:
    """The encoder's state from an upload that a model refers to by its digest; nothing of the file is taken on trust.

    The manifest must have this digest, every tensor its own digest and plausible values, and all shapes together must
    be those of the manifest's encoder.
    """
    header = read_header(path, size_limit, HEADER_LIMIT)
    manifest = parse_manifest(path, header)
    if manifest.get("digest") != digest or not digest_holds(manifest) or not isinstance(manifest.get("tensors"), dict):
        raise UploadError(f"{path}: is not the upload that was fused; fuse again")
    tensors = dict(copied_tensors(path, manifest, tensor_entries(path, header), ENCODER))
    for name, tensor in tensors.items():
        reason = implausible(name, tensor, 1)
        if reason is not None:
            raise UploadError(f"{path}: {name} has {reason}; fuse again without this client")
    state = encoder_state(tensors)
    shapes = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in state.items()}
    if manifest.get("encoder_hash") != digest_of([present(manifest["encoder"]), shapes]):
        raise UploadError(f"{path}: the weights are not those of the encoder it names; fuse again")
    return state


def read_prototypes(path: Path, size_limit: int = SIZE_LIMIT) -> tuple[Tensor | None, Tensor | None]:
    """Prototypes and class counts alone, as far as they are in the file; for looking at a run of one's own."""
    manifest = parse_manifest(path, read_header(path, size_limit, HEADER_LIMIT))
    if not digest_holds(manifest) or not isinstance(manifest.get("tensors"), dict):
        raise UploadError(f"{path}: {ALTERED}")
    prototypes = read_tensors(path, manifest, prefix=PROTOTYPES).get(PROTOTYPES)
    counts = read_tensors(path, manifest, prefix=COUNTS).get(COUNTS)
    return None if prototypes is None else prototypes.float(), None if counts is None else counts.double()


def encoder_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's tensors of an upload as a network takes them: whole numbers times their scales, float32."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE):
            continue
        scale = tensors.get(name + SCALE)
        if scale is not None:
            tensor = tensor.float() * scale.view(-1, *[1] * (tensor.ndim - 1))
        state[name.removeprefix(ENCODER)] = tensor.float() if tensor.is_floating_point() else tensor
    return state
