"""What an image file costs to decode beyond what its pixels explain, from its structure alone, before it is decoded.

Decoders cannot be interrupted, and they walk through the pieces of a file one by one. A file of a few megabytes can
hold a million empty pieces, a photograph that is drawn in two hundred thousand passes, a tile that is far larger than
its image, or a volume that unpacks to a gigabyte before the one pixel that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from oneflare.data import dicom, nifti
from oneflare.data.images import HEAD
from oneflare.data.tiff import is_tiff

PNG, JPEG, GIF = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", (b"GIF87a", b"GIF89a")
START_OF_SCAN, GZIP_MEMBER = b"\xff\xda", b"\x1f\x8b\x08"
START_OF_FRAME = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
JPEG_2000 = b"\xff\x4f\xff\x51"
JPEG_SYNTAXES = b"1.2.840.10008.1.2.4."
"""how DICOM names the compressions of the JPEG family"""
TILE_WIDTH, TILE_LENGTH = 322, 323
OFFSETS = (273, 324)
"""where strips or tiles lie; as many numbers as there are of them"""
WHOLE_NUMBERS = {1: 1, 3: 2, 4: 4, 6: 1, 8: 2, 9: 4, 16: 8, 17: 8}
"""TIFF type -> bytes"""
FREE_PIECES, BYTES_EACH = 1_000, 128
"""so many pieces may be of any size; the others must have this many bytes on average"""
MOST_PASSES = 40
"""over as many pixels as a request may have: encoders write about ten for every image"""
BYTES_PER_PIXEL = 8
"""to which compressed volumes may unpack, for every pixel that a request may have"""


@dataclass(frozen=True)
class Effort:
    """Of one image file."""

    pieces: int
    """chunks, segments, blocks, tags, strips or compressed members; counted up to a limit"""
    passes: int = 1
    """how often all pixels are gone through"""
    tile: int = 0
    """pixels of the largest tile of a TIFF, or frame in a DICOM file, which is decoded whole"""
    unpacked: int = 0
    """bytes to which it is unpacked"""


def most_pieces(size: int) -> int:
    """How many pieces files of so many bytes may have together."""
    return FREE_PIECES + size // BYTES_EACH


def effort_of(content: bytes, most: int) -> Effort:
    """What decoding an image takes; pieces beyond `most` are not looked at. Foreign bytes may raise exceptions."""
    if content.startswith(PNG):
        return Effort(_counted(_png_chunks(content), most))
    if content.startswith(JPEG):
        return Effort(_counted(_jpeg_segments(content), most), content.count(START_OF_SCAN))
    if content.startswith(GIF):
        return Effort(_counted(_gif_blocks(content), most))
    if is_tiff(content[:4]):
        sizes = list(islice(_tiff_tiles(content), most + 1))
        return Effort(len(sizes), tile=max(sizes, default=0))
    if dicom.is_dicom(content[:HEAD]) and JPEG_SYNTAXES in content:
        sizes = list(islice(_dicom_frames(content), most + 1))
        return Effort(len(sizes), content.count(START_OF_SCAN), tile=max(sizes, default=0))
    if content.startswith(nifti.GZIP) and nifti.is_nifti(content[:HEAD]):
        volume = nifti.summary(content)
        size = volume.width * volume.height * volume.slices * volume.dtype.itemsize
        return Effort(content.count(GZIP_MEMBER), unpacked=volume.offset + size)
    return Effort(1)


def _counted(pieces: Iterator[int], most: int) -> int:
    return sum(1 for _ in islice(pieces, most + 1))


def _png_chunks(content: bytes) -> Iterator[int]:
    place = len(PNG)
    while place + 8 <= len(content):
        yield place
        place += 12 + int.from_bytes(content[place : place + 4], "big")


def _jpeg_segments(content: bytes, place: int = 0) -> Iterator[int]:
    """What pillow reads before the first scan: segments, and single bytes between them."""
    from PIL.JpegImagePlugin import MARKER

    while place + 1 < len(content):
        yield place
        marker = int.from_bytes(content[place : place + 2], "big")
        if content[place : place + 2] == START_OF_SCAN:
            return
        if marker not in MARKER:
            place += 1
        elif MARKER[marker][2] is None:  # a marker without content
            place += 2
        else:
            place += 2 + max(2, int.from_bytes(content[place + 2 : place + 4], "big"))


def _dicom_frames(content: bytes) -> Iterator[int]:
    """For every segment of every frame that is compressed as JPEG: the pixels that it states, or 0."""
    place = content.find(JPEG)
    while place >= 0:
        for segment in _jpeg_segments(content, place):
            stated = content[segment + 1] in START_OF_FRAME and content[segment] == JPEG[0]
            yield _area(content, segment + 5, 2) if stated else 0
        place = content.find(JPEG, segment + 1)
    place = content.find(JPEG_2000)
    while place >= 0:
        yield _area(content, place + 8, 4)
        place = content.find(JPEG_2000, place + 1)


def _area(content: bytes, place: int, size: int) -> int:
    """The product of two numbers of so many bytes, which follow each other."""
    first, second = content[place : place + size], content[place + size : place + 2 * size]
    return int.from_bytes(first, "big") * int.from_bytes(second, "big")


def _gif_blocks(content: bytes) -> Iterator[int]:
    """Images, extensions, and the blocks of data in both."""
    place = 13 + _colours(content[10])
    while place < len(content) and content[place] != ord(";"):
        yield place
        kind = content[place]
        if kind == ord("!"):
            place += 2
        elif kind == ord(","):
            place += 11 + _colours(content[place + 9])
        else:
            place += 1
            continue
        while place < len(content) and content[place]:
            yield place
            place += 1 + content[place]
        place += 1


def _colours(flags: int) -> int:
    """Bytes of the table of colours that these flags announce."""
    return 6 << (flags & 7) if flags & 0x80 else 0


def _tiff_tiles(content: bytes) -> Iterator[int]:
    """For every tag, strip and tile of every page: the pixels of one of the page's tiles, 0 where it has none."""
    order = "little" if content.startswith(b"I") else "big"
    big = content[2:4] in (b"+\0", b"\0+")
    wide, entry, count = (8, 20, 8) if big else (4, 12, 2)

    def number(place: int, size: int) -> int:
        return int.from_bytes(content[place : place + size], order)  # type: ignore[arg-type]

    page = number(8 if big else 4, wide)
    while 0 < page < len(content):
        tags, sides = number(page, count), {TILE_WIDTH: 0, TILE_LENGTH: 0}
        for row in range(tags):
            place = page + count + row * entry
            if place >= len(content):
                return
            tag, kind, values = number(place, 2), number(place + 2, 2), number(place + 4, wide)
            yield from (0 for _ in range(values if tag in OFFSETS else 1))
            if tag in sides:
                size = WHOLE_NUMBERS.get(kind, wide)
                where = place + 4 + wide
                found = number(where if size <= wide else number(where, wide), size)
                sides[tag] = max(sides[tag], found)
        yield sides[TILE_WIDTH] * sides[TILE_LENGTH]
        page = number(page + count + tags * entry, wide)
