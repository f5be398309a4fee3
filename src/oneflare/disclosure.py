"""What is in an upload and what it tells its reader, in plain words, for the person who has to allow it to leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneflare.errors import ConfigError, UploadError
from oneflare.signing import verify
from oneflare.upload import COUNTS, ENCODER, PROTOTYPES, STATISTICS, read_layout, read_tensors

MOST_CLASSES = 30


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
    for key in ("federation", "method"):
        if not isinstance(manifest.get(key), str):
            raise UploadError(f"{path}: the manifest does not name its {key}; is it an upload?")
    small = read_tensors(path, manifest)
    signature, signer = _signature(manifest)
    return Disclosure(
        path,
        path.stat().st_size,
        manifest.get("member"),
        manifest.get("created"),
        manifest["federation"],
        manifest["method"],
        str(manifest["digest"]),
        signature,
        signer,
        tuple(_fields(manifest, sizes, small, path.stat().st_size)),
    )


def _signature(manifest: Mapping[str, Any]) -> tuple[str, str | None]:
    given = manifest.get("signature")
    if given is None:
        return "none", None
    try:
        key = str(given["key"])
        return ("valid" if verify(key, str(given["value"]), str(manifest["digest"])) else "not valid"), key
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
            f"{numbers:,} trained numbers ({manifest.get('encoder', {}).get('name', 'unknown')})",
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
    if manifest.get("trust") is not None:
        yield Field("trust", 8, f"one number, {manifest['trust']}", "how well your network did on images you kept back")
    who = manifest.get("member")
    if who is not None:
        yield Field("member, created", 0, f"{who}, {manifest.get('created')}", "who you are and when you trained")
    rest = file_bytes - sum(sizes.values())
    yield Field("manifest", rest, "the federation's terms, sizes, digests, signature", "nothing about your data")


def _volume(manifest: Mapping[str, Any], sizes: Mapping[str, int], tensors: Mapping[str, Any]) -> Field:
    total, mode = manifest.get("samples"), manifest.get("counts")
    if COUNTS not in sizes:
        return Field("samples", 8, f"{total} images in all", "how many images you have, exactly; not of which classes")
    classes = manifest.get("classes") or []
    counts = tensors[COUNTS].tolist()
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
