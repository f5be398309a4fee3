"""Slices of NIfTI files, written here by the layout of the format's own header."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest

from oneflare.core.config import Pixels
from oneflare.data import ImageSpec
from oneflare.data.images import ImageFiles, Tally, decode_all, is_grey, is_image_file, shape_of
from oneflare.data.reading import read_all
from oneflare.errors import DataError

CODES = {"u1": 2, "i2": 4, "i4": 8, "f4": 16, "f8": 64, "i1": 256, "u2": 512, "u4": 768}
VOLUME = np.arange(3 * 8 * 10).reshape(3, 8, 10)
"""slices, rows, columns"""


def spec(**rule) -> ImageSpec:
    return ImageSpec.default(1, 8, Pixels(**rule))


def nifti(
    volume: np.ndarray, *, order: str = "<", scale=(0.0, 0.0), shown=(0.0, 0.0), magic=b"n+1\0", **fields
) -> bytes:
    """nifti1.h: sizeof_hdr, dim at 40, datatype at 70, vox_offset at 108, scl at 112, cal at 124, magic at 344."""
    head = bytearray(352)
    dims = fields.get("dims", [volume.ndim, *reversed(volume.shape)])
    struct.pack_into(f"{order}i", head, 0, 348)
    struct.pack_into(f"{order}8h", head, 40, *dims, *[1] * (8 - len(dims)))
    code = fields.get("code", CODES[volume.dtype.str[1:]])
    struct.pack_into(f"{order}2h", head, 70, code, 8 * volume.dtype.itemsize)
    struct.pack_into(f"{order}3f", head, 108, fields.get("offset", 352.0), *scale)
    struct.pack_into(f"{order}2f", head, 124, shown[1], shown[0])
    head[344:348] = magic
    return bytes(head) + volume.astype(volume.dtype.newbyteorder(order)).tobytes()


def seen(content: bytes, image: ImageSpec) -> np.ndarray:
    return read_all([content], ["v"], ImageSpec.default(1, 8, image.pixels))[0, 0].numpy()


def reason(content: bytes, image: ImageSpec) -> str:
    with pytest.raises(DataError) as caught:
        read_all([content], ["v.nii"], image)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SQUARE = VOLUME[:, :, :8]


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("kind", ["i2", "u2", "i4", "f4", "f8", "u4"])
def test_a_slice_by_the_terms(kind, order):
    content = nifti(SQUARE.astype(kind), order=order)
    for packed in (content, gzip.compress(content)):
        for page, which in ((1, 0), (3, 2), ("middle", 1)):
            ours = seen(packed, spec(low=0, high=240, page=page))
            assert np.abs(ours - SQUARE[which] / 240 * 255).max() <= 0.51
        assert "more than one slice" in reason(packed, spec(low=0, high=240))
        assert shape_of(packed) == (8, 8, True)
        assert is_grey(packed)


def test_scale_window_and_depth():
    whole = SQUARE[1].astype(np.int16)
    assert "no rule says how its 16-bit values" in reason(nifti(whole), spec())
    shown = nifti(whole, shown=(100.0, 150.0))
    assert np.abs(seen(shown, spec()) - ((whole - 100) / 50).clip(0, 1) * 255).max() <= 0.51
    scaled = nifti(whole, scale=(2.0, -50.0))
    assert np.abs(seen(scaled, spec(low=0, high=400)) - ((2.0 * whole - 50) / 400).clip(0, 1) * 255).max() <= 0.51
    bytes_ = SQUARE[0].astype(np.uint8)
    assert np.array_equal(seen(nifti(bytes_), spec(bits=12)), bytes_)
    tally = Tally(ImageSpec.default(1, 8, Pixels(low=0, high=240, page="middle")))
    decode_all(ImageFiles([nifti(SQUARE.astype(np.int16))], ["v"]), tally.image, tally)
    assert any("of which the middle one was read" in note for note in tally.notes())


def test_damage_and_bombs_are_refused_in_one_line():
    rule = spec(low=0, high=240, page=2)
    content = nifti(SQUARE.astype(np.int16))
    packed = gzip.compress(content)
    assert "ends early" in reason(content[:500], rule)
    assert "ends early or is wrong" in reason(packed[: len(packed) // 3], rule)
    assert "two files" in reason(nifti(SQUARE.astype(np.int16), magic=b"ni1\0"), rule)
    assert "type 128" in reason(nifti(SQUARE.astype(np.int16), code=128), rule)
    assert "impossible dimensions" in reason(nifti(SQUARE.astype(np.int16), dims=[3, 8, -1, 3]), rule)
    assert "impossible numbers" in reason(nifti(SQUARE.astype(np.int16), offset=float("nan")), rule)
    assert "more than three dimensions" in reason(nifti(SQUARE.astype(np.int16), dims=[4, 8, 8, 1, 3]), rule)
    assert "limit of 80,000,000" in reason(nifti(SQUARE.astype(np.int16), dims=[3, 30_000, 30_000, 3]), rule)
    far = spec(low=0, high=240, page=1000)
    assert "beyond the limit of 1,073,741,824 bytes" in reason(
        nifti(SQUARE.astype(np.int16), dims=[3, 8000, 8000, 1000]), far
    )
    assert "trained without a rule" in reason(content, ImageSpec(1, 8, (0.5,), (0.5,), None))


def test_files_are_found_by_name(tmp_path):
    for name, found in (("a.nii", True), ("b.nii.gz", True), ("c.tar.gz", False), (".d.nii", False)):
        (tmp_path / name).write_bytes(gzip.compress(b"x"))
        assert is_image_file(tmp_path / name) is found
    assert not is_image_file(tmp_path / "absent.nii")
