"""What is in an upload and what it tells its reader, in plain words, for the person who has to allow it to leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneflare.errors import ConfigError, UploadError
from oneflare.signing import verify
from oneflare.upload import COUNTS, ENCODER, EVIDENCE, PROTOTYPES, STATISTICS, notes_of, read_layout, read_tensors

MOST_CLASSES = 30
LONGEST = 200


@dataclass(frozen=True)
class Field:
    """One thing an upload holds."""

    name: str
    size_bytes: int
    holds: str
    reveals: str


@dataclass(frozen=True)
class Disclosure:
    """An upload, looked at without trusting it."""

    path: Path
    size_bytes: int
    member: str | None
    created: str | None
    federation: str
    method: str
    digest: str
    signature: str
    """none | valid | not valid"""
    key: str | None
    fields: tuple[Field, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


def disclose(path: Path) -> Disclosure:
    """Describe an upload; every tensor is compared with its digest first."""
    manifest, sizes = read_layout(path)
    notes_of(path, manifest)
    tensors = read_tensors(path, manifest)
    signature, signer = _signature(manifest)
    size = path.stat().st_size
    try:
        return Disclosure(
            path,
            size,
            None if manifest.get("member") is None else _text(manifest, "member"),
            None if manifest.get("created") is None else _text(manifest, "created"),
            _text(manifest, "federation"),
            _text(manifest, "method"),
            str(manifest["digest"]),
            signature,
            signer,
            tuple(_fields(manifest, sizes, tensors, size)),
        )
    except (TypeError, AttributeError, ValueError, KeyError):
        raise UploadError(f"{path}: the manifest has a field of the wrong kind; is it an upload?") from None


def _text(manifest: Mapping[Any, Any], key: Any) -> str:
    """A line that is safe to print."""
    value = manifest[key]
    if not isinstance(value, str) or not value.isprintable() or len(value) > LONGEST:
        raise ValueError(key)
    return value


def _signature(manifest: Mapping[str, Any]) -> tuple[str, str | None]:
    given = manifest.get("signature")
    if given is None:
        return "none", None
    try:
        key = str(given["key"])
        genuine = verify(key, str(given["value"]), str(manifest["digest"]))
        return ("valid", key) if genuine else ("not valid", None)
    except (KeyError, TypeError, ConfigError):
        return "not valid", None


def _fields(
    manifest: Mapping[str, Any], sizes: Mapping[str, int], tensors: Mapping[str, Any], file_bytes: int
) -> Iterator[Field]:
    def bytes_of(prefix: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefix))

    if bytes_of(ENCODER):
        numbers = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith(ENCODER))
        yield Field(
            "network",
            bytes_of(ENCODER),
            f"{numbers:,} trained numbers ({_text(manifest['encoder'], 'name')})",
            "no image; yet an expert can test whether an image they already have was trained on, and draw what "
            "looks typical of a class",
        )
    if PROTOTYPES in sizes:
        yield Field(
            PROTOTYPES,
            sizes[PROTOTYPES],
            "one direction per class in the network's features",
            "which classes you have and roughly how many images: the others stay near where all members start",
        )
    yield _volume(manifest, sizes, tensors)
    if bytes_of(STATISTICS):
        yield _statistics(manifest, bytes_of(STATISTICS))
    if bytes_of(EVIDENCE):
        names = [_text(dict(enumerate(manifest["evidence"])), index) for index in range(len(manifest["evidence"]))]
        yield Field(
            "evidence",
            bytes_of(EVIDENCE),
            f"{', '.join(names)}: averages over your images of what the network made of them",
            "no single image; more about what your images have in common than the network alone (class means most)",
        )
    if manifest.get("trust") is not None:
        yield Field(
            "trust", 8, f"one number, {float(manifest['trust']):g}", "how well your network did on images you kept back"
        )
    if manifest.get("member") is not None:
        who = f"{_text(manifest, 'member')}, {_text(manifest, 'created')}"
        yield Field("member, created", 0, who, "who you are and when you trained")
    notes = notes_of(Path("notes"), manifest)
    if notes:
        yield Field("notes", 0, "; ".join(notes), "that your data hold files which could not be used")
    rest = file_bytes - sum(sizes.values())
    yield Field("manifest", rest, "the federation's terms, sizes, digests, signature", "nothing about your data")


def _volume(manifest: Mapping[str, Any], sizes: Mapping[str, int], tensors: Mapping[str, Any]) -> Field:
    total, mode = int(manifest["samples"]), manifest.get("counts")
    if COUNTS not in sizes:
        return Field("samples", 8, f"{total} images in all", "how many images you have, exactly; not of which classes")
    counts = tensors[COUNTS].tolist()
    classes = [_text(dict(enumerate(manifest["classes"])), label) for label in range(len(counts))]
    shown = ", ".join(f"{name}: {count}" for name, count in list(zip(classes, counts, strict=False))[:MOST_CLASSES])
    more = f", and {len(counts) - MOST_CLASSES} more" if len(counts) > MOST_CLASSES else ""
    exact = (
        "exactly how many images of each class you have"
        if mode == "exact"
        else ("roughly how many images of each class you have; noise was added before it was written")
    )
    return Field(COUNTS, sizes[COUNTS], f"{total} images ({shown}{more})", exact)


def _statistics(manifest: Mapping[str, Any], size: int) -> Field:
    plan = manifest.get("statistics") or {}
    privacy = plan.get("privacy")
    holds = f"sums of {plan.get('dim')} fixed features and of their products, over your images"
    if privacy:
        reveals = (
            f"differentially private: no single image changes it noticeably (epsilon {privacy.get('epsilon'):g}, "
            f"delta {privacy.get('delta'):g})"
        )
    else:
        reveals = "averages over each class; with a handful of images in a class, close to the features of each of them"
    return Field("statistics", size, holds, reveals)
