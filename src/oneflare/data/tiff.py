"""Kinds of TIFF that pillow would read wrongly without a word, and that are therefore refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oneflare.data.pixel_scale import Array, Refusal

if TYPE_CHECKING:
    from PIL import Image as Pillow

MAGICS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
BITS, COMPRESSION, PLANES, SAMPLE_FORMAT = 258, 259, 284, 339
UNCOMPRESSED, SEPARATE_PLANES, UNSIGNED = 1, 2, 1
NOT_READ = (
    "it is damaged, or a TIFF of a kind that is not read (such as floats of 16 or 64 bits, or colours as floats); "
    "save it as whole numbers of 8 or 16 bits, or as floats of 32 bits"
)


def is_tiff(head: bytes) -> bool:
    return head.startswith(MAGICS)


def refuse_misread(image: Pillow.Image) -> None:
    """Refuse a TIFF whose numbers pillow would take for others."""
    tags = getattr(image, "tag_v2", None)
    if image.format != "TIFF" or tags is None:
        return
    bits, kinds = (_tuple(tags.get(tag, default)) for tag, default in ((BITS, 1), (SAMPLE_FORMAT, UNSIGNED)))
    deep = max(bits) > 8
    if deep and len(bits) > 1 and tags.get(PLANES, 1) == SEPARATE_PLANES:
        raise Refusal("it is a TIFF of more than 8 bits with its colours in separate planes; save them interleaved")
    if not deep and kinds[0] != UNSIGNED:
        raise Refusal("it is a TIFF of signed numbers of 8 bits; save it as 16-bit numbers")
    swapped = tags.prefix == b"MM" and tags.get(COMPRESSION, UNCOMPRESSED) != UNCOMPRESSED
    if deep and swapped and (kinds[0] != UNSIGNED or max(bits) > 16):
        raise Refusal("it is a compressed TIFF in big-endian byte order; save it uncompressed or as little-endian")


def refuse_wrapped(image: Pillow.Image, values: Array) -> None:
    """Refuse whole numbers beyond 2^31, which pillow turns negative."""
    tags = getattr(image, "tag_v2", {})
    if _tuple(tags.get(SAMPLE_FORMAT, UNSIGNED))[0] == UNSIGNED and image.mode == "I" and float(values.min()) < 0:
        raise Refusal("it holds numbers beyond 2,147,483,647; save it as 16-bit numbers or floats")


def _tuple(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)
