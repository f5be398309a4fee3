"""TIFF files of every number format, written here tag by tag: read as they are, or refused."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from oneflare.core.config import Pixels
from oneflare.data import ImageSpec
from oneflare.data.reading import read_all
from oneflare.errors import DataError

RAMP = np.arange(64).reshape(8, 8)
FORMATS = {"u": 1, "i": 2, "f": 3}


def tiff(values: np.ndarray, order: str = "<", *, packed: bool = False, planes: bool = False) -> bytes:
    """One strip; `(height, width)`, or `(height, width, 3)` whose colours may lie in separate planes."""
    height, width, samples = (*values.shape, 1)[:3]
    stored = np.moveaxis(values, 2, 0) if planes else values
    strips = [part.astype(part.dtype.newbyteorder(order)).tobytes() for part in (stored if planes else [stored])]
    strips = [zlib.compress(strip) for strip in strips] if packed else strips
    start = 8
    places = [start + sum(map(len, strips[:k])) for k in range(len(strips))]
    bits, kind = 8 * values.dtype.itemsize, FORMATS[values.dtype.kind]
    tags = {
        256: [width],
        257: [height],
        258: [bits] * samples,
        259: [8 if packed else 1],
        262: [2 if samples == 3 else 1],
    }
    tags |= {273: places, 277: [samples], 278: [height], 279: [len(strip) for strip in strips]}
    tags |= {284: [2 if planes else 1], 339: [kind] * samples}
    end = start + sum(map(len, strips))
    extra_at, extra, entries = end + 2 + 12 * len(tags) + 4, b"", b""
    for tag, numbers in sorted(tags.items()):
        content = struct.pack(f"{order}{len(numbers)}I", *numbers)
        if len(numbers) > 1:
            place = struct.pack(f"{order}I", extra_at + len(extra))
            extra += content
            content = place
        entries += struct.pack(f"{order}HHI", tag, 4, len(numbers)) + content
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", end)
    return head + b"".join(strips) + struct.pack(f"{order}H", len(tags)) + entries + b"\0" * 4 + extra


def read(content: bytes, **rule) -> np.ndarray:
    return read_all([content], ["x.tif"], ImageSpec.default(1, 8, Pixels(**rule)))[0, 0].numpy()


def reason(content: bytes, **rule) -> str:
    with pytest.raises(DataError) as caught:
        read(content, **rule)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["u2", "i2", "u4", "i4", "f4", "f2", "f8", "u8"])
def test_numbers_are_read_as_they_are_or_refused(kind, order, packed):
    """A wrong image is the only answer that is not allowed."""
    offset = 300 if kind[0] in "if" else 0
    content = tiff((RAMP * 10 - offset).astype(kind), order, packed=packed)
    rule = {"low": -offset, "high": 630 - offset}
    readable = kind in ("u2", "i2", "u4", "i4", "f4") and (
        order == "<" or kind == "u2" or (not packed and kind != "u4")
    )
    if readable:
        assert np.array_equal(read(content, **rule), np.round(RAMP / 63 * 255).astype(np.uint8))
    else:
        assert "TIFF" in reason(content, **rule)


def test_what_pillow_would_misread_is_refused():
    assert "signed numbers of 8 bits" in reason(tiff((RAMP - 30).astype("i1")))
    colours = np.repeat((RAMP * 1000)[..., None], 3, axis=2).astype("u2")
    assert "separate planes" in reason(tiff(colours, planes=True), bits=16)
    spec = ImageSpec.default(3, 8, Pixels(bits=16))
    assert np.array_equal(read_all([tiff(colours)], ["x"], spec)[0, 0].numpy(), (RAMP * 1000 >> 8).astype(np.uint8))
    assert "beyond 2,147,483,647" in reason(tiff((RAMP + 3_000_000_000).astype("u4")), low=0, high=4e9)
    assert np.array_equal(read(tiff(RAMP.astype("u1"))), RAMP)
