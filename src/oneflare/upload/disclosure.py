"""Describes in plain words what an upload holds and reveals, for the person who allows it to leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oneflare.errors import ConfigError, UploadError
from oneflare.upload import COUNTS, ENCODER, EVIDENCE, PROTOTYPES, STATISTICS, notes_of, read_layout, read_tensors
from oneflare.upload.evidence import UNKNOWN
from oneflare.upload.signing import verify
from oneflare.upload.statistics import CLASS_COVARIANCES, COVARIANCE, DEFAULT_PARTS, MIXTURES

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
    first: tuple[str, ...]
    """what whoever lets the file leave must know before all else, most serious first"""
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
            tuple(_first(manifest, sizes)),
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


def _tuned(manifest: Mapping[str, Any]) -> str:
    """Which part of a backbone was trained, for the name of a network."""
    backbone = manifest["image"].get("backbone") or {}
    if backbone.get("tune") is None:
        return ""
    return f", and {_text(backbone, 'name')} from its module {_text(backbone, 'tune')} on"


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
            f"{numbers:,} trained numbers ({_text(manifest['encoder'], 'name')}{_tuned(manifest)})",
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
    if manifest.get("masked"):
        yield _masked(manifest, bytes_of(STATISTICS))
        note = manifest["masked"]
        yield Field(
            "sealed shares",
            _sealed_bytes(manifest),
            f"shares of the key of your own mask, sealed for {len(note['sealed'])} members, each for itself",
            f"nothing, until {int(note['threshold'])} members release their shares to open the total",
        )
    elif bytes_of(STATISTICS):
        yield _statistics(manifest, bytes_of(STATISTICS))
    trained = sizes.get(EVIDENCE + UNKNOWN, 0)
    if trained:
        yield Field(
            "unknown",
            trained,
            "one direction for images that are unlike yours, in the network's features",
            "little beyond the network: it was trained on your images destroyed",
        )
    if bytes_of(EVIDENCE) > trained:
        names = [_text(dict(enumerate(manifest["evidence"])), index) for index in range(len(manifest["evidence"]))]
        measured = [name for name in names if name != UNKNOWN]
        yield Field(
            "evidence",
            bytes_of(EVIDENCE) - trained,
            f"{', '.join(measured)}: averages over your images of what the network made of them",
            "what your images have in common, more than the network alone tells; for a class of which you have one "
            "or few images, nearly what the network made of each of them",
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
    rest = file_bytes - sum(sizes.values()) - _sealed_bytes(manifest)
    yield Field("manifest", rest, "the federation's terms, sizes, digests, signature", "nothing about your data")


def _first(manifest: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[str]:
    """The consequences of letting the file leave, in sentences."""
    plan = manifest.get("statistics") or {}
    privacy = plan.get("privacy")
    averages = {name for name in sizes if name != EVIDENCE + UNKNOWN}
    held = {prefix for prefix in (ENCODER, STATISTICS, EVIDENCE) if any(name.startswith(prefix) for name in averages)}
    if manifest.get("masked"):
        yield _masked_first(manifest)
        held -= {STATISTICS}
    if STATISTICS in held and not privacy:
        yield _plain_statistics(plan)
    if STATISTICS in held and privacy:
        epsilon, delta = float(privacy["epsilon"]), float(privacy["delta"])
        yield (
            "This file is differentially private: it would look nearly the same if any one of the images had been "
            f"another (epsilon {epsilon:g}, delta {delta:g}: no event becomes more than {_times(epsilon)} as likely, "
            f"up to a probability of {delta:g}). The number of images is not hidden. The promise holds for one upload; "
            "another about the same images adds its epsilon, and your ledger refuses it unless you raise your budget."
        )
    if ENCODER in held:
        yield (
            "This file holds a network that was trained on your images, without any formal promise of privacy: an "
            "expert may find out whether an image they already have was used, and what is typical of a class."
        )
    if EVIDENCE in held:
        yield "It also holds exact averages over your images, which make such attacks easier."
    if manifest.get("counts") == "noised":
        yield (
            "The class counts carry noise, which hides single images and not the shares of classes; another upload "
            "about the same images adds to what is known, and your ledger refuses it unless you raise your budget."
        )


def _sealed_bytes(manifest: Mapping[str, Any]) -> int:
    sealed = (manifest.get("masked") or {}).get("sealed", {})
    return sum(len(_text(sealed, name)) for name in sealed)


def _masked_first(manifest: Mapping[str, Any]) -> str:
    """What masks hide, from whom, and what they do not hide."""
    threshold, members = int(manifest["masked"]["threshold"]), len(manifest["masked"]["shares"])
    return (
        "The sums in this file are masked: to whoever has it they are random numbers, and it reveals nothing but its "
        f"size about them. The coordinator learns the total over all who take part, which {threshold} of {members} "
        f"members must help to open. Your own sums stay hidden from the coordinator and up to {threshold - 1} members "
        "together; but whoever knows the total and the sums of everybody else in it can subtract. This rests on the "
        "roster: compare its fingerprint with the other members."
    )


def _masked(manifest: Mapping[str, Any], size: int) -> Field:
    plan = manifest.get("statistics")
    what = f", sums of {plan.get('dim')} fixed features and of their products" if plan else ""
    return Field(
        "masked sums",
        size,
        f"{size // 8:,} numbers under masks: images of each class{what}",
        "nothing but how many numbers they are, until the total over the members is opened",
    )


def _plain_statistics(plan: Mapping[str, Any]) -> str:
    """What statistics without noise mean for the images behind them, by what they hold and how it is rounded."""
    parts = plan.get("parts", DEFAULT_PARTS)
    remedy = (
        " Let it leave only to somebody who may also see the images; otherwise ask the coordinator for terms under "
        "which only the total of all members is seen (server init --privacy masked) or noise hides every image "
        "(--privacy private)."
    )
    single = " From a class with a single image, that image's features can be read directly."
    if not parts:
        return (
            "This file holds exact sums over the images of each class and their number. Whoever has it and an image "
            "can test whether that image is among yours, the better the fewer images of its class you have; how well "
            "has not been measured." + single + remedy
        )
    apart = ""
    if CLASS_COVARIANCES in parts:
        apart = (
            " The sums are there for each class apart, which says more than sums over all classes: of a class with few "
            "images the features of each of them can nearly be read."
        )
    if MIXTURES in parts:
        apart += (
            " Each class is also described by Gaussian mixtures; a component that rests on few images is nearly the "
            "features of those images."
        )
    held, measured = "exact sums over them", ""
    if plan.get("dtype", "float32") != "float32" and COVARIANCE in parts:
        held = "sums over them, those of each class exact and those of products rounded"
        measured = " That attack was made on exact sums; rounding is no protection that anybody has measured."
    return (
        f"This file identifies the images behind it. It holds {held}: whoever has it and an image can "
        "tell whether that image is among yours. Our own attack on files with sums over all classes found 100 % of the "
        "images, with one false alarm in a hundred (AUC 0.997; digits, few images per member)."
        + measured
        + single
        + apart
        + remedy
    )


def _times(epsilon: float) -> str:
    """exp(epsilon) for people."""
    if epsilon > math.log(1000):
        return "a thousand times, so the promise is worth little,"
    return f"{math.exp(epsilon):.3g} times"


def _volume(manifest: Mapping[str, Any], sizes: Mapping[str, int], tensors: Mapping[str, Any]) -> Field:
    total, mode = int(manifest["samples"]), manifest.get("counts")
    if COUNTS not in sizes and manifest.get("masked"):
        return Field(
            "samples", 8, f"at most {total} images", "the number that you enrolled with, not how many you have"
        )
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


def _blocks(plan: Mapping[str, Any]) -> int | None:
    """In how many blocks the features are within which products are summed, where they are in several."""
    spec = plan.get("feature_map")
    blocks = spec.get("blocks") if isinstance(spec, Mapping) else None
    return blocks if type(blocks) is int else None


def _statistics(manifest: Mapping[str, Any], size: int) -> Field:
    plan = manifest.get("statistics") or {}
    privacy = plan.get("privacy")
    parts = plan.get("parts", DEFAULT_PARTS)
    what = [f"sums of {plan.get('dim')} fixed features over your images of each class"]
    if COVARIANCE in parts:
        rounded = "" if plan.get("dtype", "float32") == "float32" else f", these rounded ({_text(plan, 'dtype')})"
        blocks = _blocks(plan)
        within = "" if blocks is None else f" within each of {blocks} blocks of them"
        short = " (where images are few, a factor of those sums)" if plan.get("factors") is True else ""
        sums = f"sums of {plan.get('dim')} fixed features and of their products{within}{rounded}"
        what = [f"{sums}, over your images{short}"]
    if CLASS_COVARIANCES in parts:
        what.append("sums of their products for each class")
    if MIXTURES in parts:
        what.append(f"a mixture of up to {plan.get('components')} Gaussians for each class")
    holds = "; ".join(what)
    if privacy:
        reveals = (
            f"differentially private: no single image changes it noticeably (epsilon {privacy.get('epsilon'):g}, "
            f"delta {privacy.get('delta'):g})"
        )
    else:
        reveals = (
            "which images are yours, to anybody who has a copy of them; exactly how many of each class; with a single "
            "image in a class, that image's features"
        )
    return Field("statistics", size, holds, reveals)
