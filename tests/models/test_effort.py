"""Image files that would take far longer, or far more memory, to decode than their pixels explain."""

from __future__ import annotations

import gzip
import io
import struct
import time
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

from oneflare.models.serving.bodies import images_of
from oneflare.models.serving.effort import effort_of, most_pieces
from oneflare.models.serving.limits import Limits, RequestError

SIZE = 2_000_000
"""bytes of a hostile file"""
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (400, 300), dtype=np.uint8))


def saved(kind: str, image: Image.Image = NOISE, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunked_png() -> bytes:
    """Empty chunks of text before the pixels."""
    whole, chunk = saved("PNG"), bytes(4) + b"tEXt" + zlib.crc32(b"tEXt").to_bytes(4, "big")
    return whole[:33] + chunk * (SIZE // len(chunk)) + whole[33:]


def commented_jpeg() -> bytes:
    whole = saved("JPEG")
    return whole[:2] + b"\xff\xfe\x00\x02" * (SIZE // 4) + whole[2:]


def hidden_comments() -> bytes:
    """The same behind markers that have no length, though one seems to follow."""
    whole = saved("JPEG")
    return whole[:2] + (b"\xff\xf0\xff\xff" + b"\xff\xfe\x00\x02" * 16_000) * (SIZE // 64_000) + whole[2:]


def padded_jpeg() -> bytes:
    whole = saved("JPEG")
    return whole[:2] + b"\xff" * SIZE + whole[2:]


def repeated_scans(side: int = 2000, many: int = 1_000) -> bytes:
    """A photograph whose last scan is there many times."""
    whole = saved("JPEG", Image.new("L", (side, side)), progressive=True)
    scan = whole[whole.rfind(b"\xff\xda") : -2]
    return whole[:-2] + scan * many + whole[-2:]


def commented_gif() -> bytes:
    whole = saved("GIF")
    place = whole.index(b",", 13 + 3 * 256)
    return whole[:place] + b"!\xfe\x00" * (SIZE // 3) + whole[place:]


def animated_gif() -> bytes:
    frame = b"," + struct.pack("<HHHHB", 0, 0, 8, 8, 0) + b"\x02\x02\x44\x01\x00"
    start = b"GIF89a" + struct.pack("<HHBBB", 8, 8, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return start + frame * (SIZE // len(frame)) + b";"


BASE = [(256, 3, 8), (257, 3, 8), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (278, 3, 8), (279, 4, 64)]


def tiff(*pages: list[tuple[int, ...]], big: bool = False) -> bytes:
    """Pages of tags (tag, type, value, and how many values if not one), little-endian."""
    start, entry, count, end = (16, "<HHQQ", "<Q", "<Q") if big else (8, "<HHII", "<H", "<I")
    head = b"II+\0\x08\0\0\0" + struct.pack("<Q", start + 64) if big else b"II*\0" + struct.pack("<I", start + 64)
    content = bytearray(head + bytes(64))
    for number, tags in enumerate(pages, 1):
        body = b"".join(struct.pack(entry, tag, kind, (*more, 1)[0], value) for tag, kind, value, *more in tags)
        after = len(content) + struct.calcsize(count) + len(body) + struct.calcsize(end)
        content += struct.pack(count, len(tags)) + body + struct.pack(end, after if number < len(pages) else 0)
    return bytes(content)


def many_pages() -> bytes:
    return tiff(*[BASE] * (SIZE // 102))


def huge_tile(big: bool = False, kind: int = 4) -> bytes:
    return tiff([*BASE, (322, kind, 32_768), (323, kind, 32_768), (324, 4, 8), (325, 4, 64)], big=big)


def many_strips() -> bytes:
    return tiff([*BASE[:5], (273, 4, 8, 500_000), *BASE[6:]])


def deep_volume(offset: float = 1e9, many: int = 1, slices: int = 1) -> bytes:
    """A compressed volume whose one pixel lies far behind its header."""
    head = bytearray(352)
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into("<8h", head, 40, 3, 8, 8, slices, 1, 1, 1, 1)
    struct.pack_into("<h", head, 70, 2)
    struct.pack_into("<f", head, 108, offset)
    head[344:348] = b"n+1\0"
    return gzip.compress(bytes(head) + bytes(64 * slices)) + gzip.compress(b"") * (many - 1)


def dicom(frame: bytes, syntax: str = "1.2.840.10008.1.2.4.50", side: int = 8) -> bytes:
    """A frame in a file whose header states other sizes."""
    pydicom = pytest.importorskip("pydicom")
    header = pydicom.Dataset()
    header.file_meta = pydicom.dataset.FileMetaDataset()
    header.file_meta.TransferSyntaxUID = syntax
    header.file_meta.MediaStorageSOPClassUID = header.SOPClassUID = "1.2.840.10008.5.1.4.1.1.7"
    header.file_meta.MediaStorageSOPInstanceUID = header.SOPInstanceUID = "1.2.3"
    header.Rows = header.Columns = side
    header.SamplesPerPixel, header.PhotometricInterpretation, header.PixelRepresentation = 1, "MONOCHROME2", 0
    header.BitsAllocated, header.BitsStored, header.HighBit = 8, 8, 7
    header.PixelData = pydicom.encaps.encapsulate([frame])
    header["PixelData"].VR = "OB"
    buffer = io.BytesIO()
    header.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def large_frame() -> bytes:
    return dicom(saved("JPEG", Image.new("L", (6000, 6000))))


def many_pieces_in_a_frame() -> bytes:
    return dicom(commented_jpeg())


def large_frame_2000() -> bytes:
    return dicom(b"\xff\x4f\xff\x51\0\x29\0\0" + struct.pack(">II", 6000, 6000), "1.2.840.10008.1.2.4.90")


HOSTILE = {
    "a PNG of empty chunks": (chunked_png, "pieces"),
    "a JPEG of comments": (commented_jpeg, "pieces"),
    "a JPEG of comments behind other markers": (hidden_comments, "pieces"),
    "a JPEG of padding": (padded_jpeg, "pieces"),
    "a JPEG of a thousand scans": (repeated_scans, "passes over its pixels"),
    "a GIF of comments": (commented_gif, "pieces"),
    "a GIF of frames": (animated_gif, "pieces"),
    "a TIFF of pages": (many_pages, "pieces"),
    "a TIFF of strips": (many_strips, "pieces"),
    "a TIFF with a huge tile": (huge_tile, "pixels"),
    "a large TIFF with a huge tile": (lambda: huge_tile(big=True, kind=16), "pixels"),
    "a large JPEG in a small DICOM file": (large_frame, "pixels"),
    "a large JPEG 2000 in a small DICOM file": (large_frame_2000, "pixels"),
    "a JPEG of comments in a DICOM file": (many_pieces_in_a_frame, "pieces"),
    "a JPEG of a thousand scans in a DICOM file": (lambda: dicom(repeated_scans()), "passes over its pixels"),
    "a volume far behind its header": (deep_volume, "unpacks to"),
    "a volume of empty members": (lambda: deep_volume(352.0, many=SIZE // 20), "pieces"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_files_that_take_too_long_are_refused_before_they_are_decoded(name):
    made, reason = HOSTILE[name]
    content = made()
    started = time.process_time()
    with pytest.raises(RequestError, match=reason) as caught:
        images_of("", content, Limits())
    assert caught.value.status == 413
    assert "\n" not in str(caught.value)
    assert time.process_time() - started < 2


def test_together_they_are_bounded_too():
    one = deep_volume(1.5e8)
    assert images_of("", one, Limits()) == [one]
    form = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n' + one + b"\r\n" for _ in range(2)
    )
    with pytest.raises(RequestError, match="number 2 unpacks to"):
        images_of("multipart/form-data; boundary=b", form + b"--b--\r\n", Limits())


def test_json_of_a_million_lists_is_not_read():
    with pytest.raises(RequestError, match="pieces") as caught:
        images_of("application/json", b"[" + b"[]," * 1_000_000 + b"[]]", Limits())
    assert caught.value.status == 413


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {"progressive": True, "quality": 95}),
        ("JPEG", {"restart_marker_blocks": 1}),
        ("GIF", {"save_all": True, "append_images": [NOISE.transpose(Image.Transpose.ROTATE_180)] * 20}),
        ("TIFF", {"compression": "jpeg"}),
        ("TIFF", {"save_all": True, "append_images": [NOISE] * 20}),
        ("TIFF", {"tiffinfo": {278: 1}}),
        ("BMP", {}),
        ("WEBP", {}),
    ],
)
def test_what_encoders_write_passes(kind, options):
    content = saved(kind, **options)
    assert images_of("", content, Limits()) == [content]
    assert effort_of(content, 10**9).pieces < most_pieces(len(content))


def test_scans_as_they_are_written_pass():
    small = Image.new("L", (64, 64), 7)
    for frame, side in ((saved("JPEG", small), 64), (saved("JPEG"), 400)):
        content = dicom(frame, side=side)
        assert images_of("", content, Limits()) == [content]


def test_a_volume_of_many_slices_passes():
    content = deep_volume(352.0, slices=32_000)
    assert images_of("", content, Limits()) == [content]


@pytest.mark.parametrize("made", [chunked_png, commented_jpeg, animated_gif, many_pages, huge_tile, deep_volume])
def test_cut_off_anywhere_they_are_one_line(made, monkeypatch):
    monkeypatch.setattr("test_effort.SIZE", 20_000)
    content = made()
    for end in (*range(0, min(len(content), 200), 7), len(content) // 2, len(content) - 1):
        with suppress(RequestError):
            images_of("", content[:end], Limits())
