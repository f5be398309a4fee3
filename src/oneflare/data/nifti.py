"""Reads one slice of a NIfTI-1 file (.nii, .nii.gz) with NumPy alone; nothing but the header's numbers is looked at.

The slice lies in the plane of the first two axes and is shown as it is stored: the first axis runs to the right, the
second downwards. The file's orientation in the scanner is not applied.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from oneflare.core.config import Pixels
from oneflare.data.pixel_scale import (
    MOST_BYTES,
    Array,
    Refusal,
    Scan,
    Stored,
    brightness,
    check_size,
    chosen_page,
    window,
)

KIND = "NIfTI"
HEADER = 352
GZIP = b"\x1f\x8b"
TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}


class Volume(NamedTuple):
    """What a header says."""

    width: int
    height: int
    slices: int
    dtype: np.dtype[np.generic]
    offset: int
    """of the first value, in bytes"""
    slope: float
    intercept: float
    shown: tuple[float, float]
    """values that are black and white, if the second is larger"""


def is_nifti(head: bytes) -> bool:
    """Whether a file that begins with these bytes, perhaps compressed, is a NIfTI-1 file."""
    if head.startswith(GZIP):
        try:
            head = zlib.decompressobj(31).decompress(head, HEADER)
        except zlib.error:
            return False
    return head[344:348] in (b"n+1\0", b"ni1\0")


def summary(source: bytes | Path) -> Volume:
    """What the header says, without reading the values."""
    with _opened(source) as file:
        return _header(_bytes(file, 0, HEADER))


def read(source: bytes | Path, rule: Pixels | None, changes: set[str]) -> Scan:
    """The slice that the terms name, or the only one."""
    if rule is None:
        raise Refusal("this model was trained without a rule for NIfTI files; give it an 8-bit image")
    with _opened(source) as file:
        volume = _header(_bytes(file, 0, HEADER))
        page = chosen_page(volume.slices, rule, changes, what="slice")
        size = volume.width * volume.height * volume.dtype.itemsize
        start = volume.offset + page * size
        if start + size > MOST_BYTES:
            raise Refusal(f"its values lie beyond the limit of {MOST_BYTES:,} bytes; split it")
        content = _bytes(file, start, size)
    values = np.frombuffer(content, dtype=volume.dtype).reshape(volume.height, volume.width)
    return Scan(brightness(_stored(volume, values), rule, changes), KIND)


def _stored(volume: Volume, values: Array) -> Stored:
    scaled = (volume.slope, volume.intercept) not in ((0.0, 0.0), (1.0, 0.0)) and volume.slope != 0
    shallow = values.dtype == np.uint8 and not scaled
    floating = values.dtype.kind == "f"
    low, high = volume.shown
    own = window(low, high) if high > low else window(0, 255) if shallow else None
    numbers: Array = values.astype(np.float64 if values.dtype.itemsize > 2 else np.float32)
    if scaled:
        numbers = numbers * volume.slope + volume.intercept
    return Stored(numbers, "floating-point" if floating else f"{8 * values.dtype.itemsize}-bit", own, shallow)


def _header(head: bytes) -> Volume:
    if head[344:348] != b"n+1\0":
        raise Refusal("its header and values lie in two files; save it as one .nii or .nii.gz")
    order = "<" if int.from_bytes(head[:4], "little") == 348 else ">"

    def number(kind: str, place: int, many: int = 1) -> Array:
        return np.frombuffer(head, dtype=order + kind, count=many, offset=place)

    dims = [int(length) for length in number("i2", 40, 8)]
    axes, lengths = dims[0], dims[1:]
    if not 2 <= axes <= 7 or any(length < 1 for length in lengths[:axes]):
        raise Refusal("its header states impossible dimensions")
    if any(length > 1 for length in lengths[3:axes]):
        raise Refusal("it has more than three dimensions; save one volume by itself")
    code = int(number("i2", 70)[0])
    if code not in TYPES:
        raise Refusal(
            f"its values are of a type that is not read (NIfTI type {code}); save it as whole numbers or floats"
        )
    check_size(lengths[0], lengths[1])
    offset, slope, intercept, most, least = (float(number("f4", place)[0]) for place in (108, 112, 116, 124, 128))
    if not np.isfinite([offset, slope, intercept, most, least]).all() or not HEADER <= offset <= MOST_BYTES:
        raise Refusal("its header holds impossible numbers")
    slices = lengths[2] if axes > 2 else 1
    dtype = np.dtype(order + TYPES[code])
    return Volume(lengths[0], lengths[1], slices, dtype, int(offset), slope, intercept, (least, most))


@contextlib.contextmanager
def _opened(source: bytes | Path) -> Iterator[BinaryIO]:
    """The file, decompressed as far as it is read."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        compressed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        try:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if compressed else file
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise Refusal("it is a damaged NIfTI file (its compressed part ends early or is wrong)") from None


def _bytes(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    content = file.read(size)
    if len(content) < size:
        raise Refusal("it is a damaged NIfTI file (it ends early)")
    return content
