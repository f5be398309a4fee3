"""Reads the pixels of DICOM files, and nothing about whom they show.

Only the tags in `TAGS` are read, all of which describe pixels: names, dates and numbers of patients are skipped where
they lie in the file and never reach memory, notes or messages. pydicom's own messages quote values and are not passed
on. Equations: DICOM PS3.3, C.11.1 (rescale slope and intercept) and C.11.2 (values of interest).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from oneflare.core.config import Pixels
from oneflare.data.pixel_scale import (
    MOST_BYTES,
    Array,
    Refusal,
    Scan,
    Shade,
    Stored,
    brightness,
    check_size,
    chosen_page,
    window,
)

if TYPE_CHECKING:
    from pydicom import Dataset as Header

KIND = "DICOM"
PREAMBLE = 128
MAGIC = b"DICM"
DIRECTORY = "DICOMDIR"
"""name of the index on a disc of DICOM files, which holds no image"""
DEFLATED = "1.2.840.10008.1.2.1.99"
SYNTAX = 0x00020010
TAGS = (
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "NumberOfFrames",
    "Rows",
    "Columns",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "PlanarConfiguration",
    "BurnedInAnnotation",
    "RescaleSlope",
    "RescaleIntercept",
    "ModalityLUTSequence",
    "WindowCenter",
    "WindowWidth",
    "VOILUTFunction",
    "VOILUTSequence",
    "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence",
)
FRAME_MACROS = ("PixelValueTransformationSequence", "FrameVOILUTSequence")
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
ONE_AT_A_TIME = threading.Lock()
"""pydicom's settings and Python's warning filters belong to the process"""


def is_dicom(head: bytes) -> bool:
    """Whether a file that begins with these bytes says that it is DICOM."""
    return head[PREAMBLE : PREAMBLE + len(MAGIC)] == MAGIC


class Summary(NamedTuple):
    """What a header says of the image's shape."""

    width: int
    height: int
    grey: bool


def summary(source: bytes | Path) -> Summary:
    """Size and kind of the image, without decoding it."""
    with _opened(source) as file:
        header = _header(file)
        return Summary(int(header.Columns), int(header.Rows), str(header.PhotometricInterpretation) in GREY)


def read(source: bytes | Path, rule: Pixels | None, changes: set[str]) -> Scan:
    """The image of a DICOM file, or the one frame that the terms name."""
    if rule is None:
        raise Refusal("this model was trained without a rule for DICOM files; give it an 8-bit image")
    with _opened(source) as file:
        header = _header(file)
        frame = chosen_page(int(header.get("NumberOfFrames") or 1), rule, changes)
        if str(header.get("BurnedInAnnotation", "")).upper() == "YES":
            changes.add("annotated")
        pixels = _frame(file, header, frame)
    if header.PhotometricInterpretation in GREY:
        return Scan(brightness(_stored(header, pixels, frame), rule, changes), KIND)
    return Scan(_colour(header, pixels, rule, changes), KIND)


@contextlib.contextmanager
def _opened(source: bytes | Path) -> Iterator[BinaryIO]:
    """The file, while pydicom is silent and errors are told without a value from the file."""
    if importlib.util.find_spec("pydicom") is None:
        raise Refusal("it is a DICOM file, which pydicom reads: pip install 'oneflare[dicom]'")
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    if size > MOST_BYTES:
        raise Refusal(f"its {size:,} bytes exceed the limit of {MOST_BYTES:,}; split it")
    from PIL import Image
    from pydicom.config import disable_value_validation

    with (
        ONE_AT_A_TIME,
        warnings.catch_warnings(),
        disable_value_validation(),
        io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file,
    ):
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            yield file
        except (Refusal, MemoryError):
            raise
        except Exception as error:  # damaged files make pydicom raise many kinds, some of which quote the file
            raise Refusal(f"it is a damaged DICOM file ({type(error).__name__})") from None


def _header(file: BinaryIO) -> Header:
    """The tags of `TAGS`, once the image is known to be of a kind and size that can be shown."""
    from pydicom import dcmread
    from pydicom.filereader import read_dataset, read_preamble

    file.seek(0)
    read_preamble(file, force=False)
    meta = read_dataset(file, False, True, stop_when=lambda tag, *_: tag.group != 2, specific_tags=[SYNTAX])
    if str(meta.get("TransferSyntaxUID", "")) == DEFLATED:
        raise Refusal("the whole DICOM file is compressed (deflated); save it uncompressed")
    file.seek(0)
    header = dcmread(file, stop_before_pixels=True, specific_tags=list(TAGS))
    missing = [name for name in ("Rows", "Columns", "PhotometricInterpretation") if header.get(name) is None]
    if missing:
        raise Refusal(f"it is a DICOM file without an image (it has no {missing[0]})")
    check_size(int(header.Columns), int(header.Rows))
    if header.PhotometricInterpretation not in (*GREY, *COLOUR):
        raise Refusal("it is a DICOM file in other colours than grey, RGB or YBR; save it as one of these")
    return header


def _frame(file: BinaryIO, header: Header, frame: int) -> Array:
    """`(height, width)` or `(height, width, 3)` as stored, without bits that do not belong to the image."""
    from pydicom.pixels import get_decoder, pixel_array

    syntax = header.file_meta.TransferSyntaxUID
    if syntax.is_compressed:
        try:
            available = get_decoder(syntax).is_available
        except NotImplementedError:
            available = False
        if not available:
            known = syntax.name if syntax.name != str(syntax) else "an unknown way"
            raise Refusal(f"its pixels are compressed by {known}, for which no decoder is installed; decompress it")
    file.seek(0)
    try:
        pixels: Array = pixel_array(file, index=frame)
    except (AttributeError, KeyError):
        raise Refusal("it is a DICOM file without pixels, or one that does not say how they are stored") from None
    if pixels.shape[:2] != (header.Rows, header.Columns):
        raise Refusal("its pixels do not have the size that its header states")
    return pixels if pixels.dtype.kind == "f" else _stored_bits(header, pixels)


def _stored_bits(header: Header, pixels: Array) -> Array:
    """Whole numbers of `BitsStored` bits; what lies above them may be an overlay."""
    stored, room = int(header.BitsStored), 8 * pixels.dtype.itemsize
    if int(header.get("HighBit", stored - 1)) != stored - 1 or not 1 <= stored <= room:
        raise Refusal("its bits are packed in a way that is no longer used (HighBit is not BitsStored - 1)")
    shifted: Array = (pixels << (room - stored)) >> (room - stored)
    return shifted


def _stored(header: Header, pixels: Array, frame: int) -> Stored:
    """Stored values in the units of the modality, and the file's own values of interest."""
    find = _finder(header, frame)
    white_is_least = header.PhotometricInterpretation == "MONOCHROME1"
    if pixels.dtype.kind == "f":
        values = pixels.astype(np.float64)
        return Stored(values, "floating-point", _values_of_interest(find), white_is_least=white_is_least)
    bits = int(header.BitsStored)
    values, rescaled = _rescaled(pixels, find)
    shallow = bits <= 8 and not rescaled and not int(header.get("PixelRepresentation") or 0)
    own = _values_of_interest(find)
    if shallow and own is None:
        own = window(0, 2**bits - 1)
    return Stored(values, f"{bits}-bit", own, shallow, white_is_least)


def _finder(header: Header, frame: int) -> Callable[[str], Any]:
    """Looks a tag up in the header, then among what enhanced files say of this frame and of all frames."""
    places = [header]
    for name, item in (("PerFrameFunctionalGroupsSequence", frame), ("SharedFunctionalGroupsSequence", 0)):
        groups = header.get(name)
        if groups and item < len(groups):
            places += [part[0] for macro in FRAME_MACROS if (part := groups[item].get(macro))]

    def find(keyword: str) -> Any:
        found = (place.get(keyword) for place in places)
        return next((value for value in found if value is not None and value != ""), None)

    return find


def _rescaled(pixels: Array, find: Callable[[str], Any]) -> tuple[Array, bool]:
    """Stored values SV -> SV * slope + intercept, or through the modality's table; and whether that changed them."""
    table = find("ModalityLUTSequence")
    if table:
        return _looked_up(pixels, table[0])[0], True
    slope, intercept = find("RescaleSlope"), find("RescaleIntercept")
    slope, intercept = 1.0 if slope is None else float(slope), 0.0 if intercept is None else float(intercept)
    values: Array = pixels.astype(np.float32 if pixels.dtype.itemsize <= 2 else np.float64)
    if (slope, intercept) == (1.0, 0.0):
        return values, False
    if slope == 0:
        raise Refusal("its rescale slope is 0, so every value would be the same")
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused afterwards, with the file's name
        return values * slope + intercept, True


def _looked_up(values: Array, item: Header) -> tuple[Array, int]:
    """Values through a lookup table, whose ends stand for everything beyond them; and the bits of its entries."""
    descriptor = item["LUTDescriptor"].value
    entries, first, bits = int(descriptor[0]) or 1 << 16, int(descriptor[1]), int(descriptor[2])
    data = item["LUTData"].value
    table = (
        np.frombuffer(data, dtype=np.uint16 if len(data) == 2 * entries else np.uint8)
        if isinstance(data, bytes)
        else np.asarray(data)
    )
    if not 1 <= bits <= 16 or len(table) != entries:
        raise Refusal("its lookup table does not have the size that it states")
    if first >= 1 << 15 and float(values.min()) < 0:
        first -= 1 << 16
    return table[(values.astype(np.int64) - first).clip(0, entries - 1)].astype(np.float32), bits


def _values_of_interest(find: Callable[[str], Any]) -> Shade | None:
    """How the file asks to be shown: by its first table or else its first window; None where it does not say."""
    table = find("VOILUTSequence")
    if table:

        def by_table(values: Array) -> Array:
            looked_up, bits = _looked_up(values, table[0])
            return (looked_up / np.float32(2**bits - 1)).clip(0, 1)

        return by_table
    centre, width = find("WindowCenter"), find("WindowWidth")
    if centre is None or width is None:
        return None
    centre, width = (float(value if isinstance(value, str | int | float) else value[0]) for value in (centre, width))
    return voi_window(centre, width, str(find("VOILUTFunction") or "LINEAR").upper())


def voi_window(centre: float, width: float, function: str) -> Shade:
    """A window of a DICOM file: values x -> brightness in [0, 1].

    LINEAR: (x - (c - 1/2)) / (w - 1) + 1/2; LINEAR_EXACT: (x - c) / w + 1/2, both cut off at 0 and 1;
    SIGMOID: 1 / (1 + exp(-4 (x - c) / w)).
    """
    least = 1 if function == "LINEAR" else 0
    if not np.isfinite([centre, width]).all() or width < least or (width == 0):
        raise Refusal(f"its own window has the width {width:g}; set pixels.low and pixels.high")
    if function == "LINEAR":
        return window(centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2)
    if function == "LINEAR_EXACT":
        return window(centre - width / 2, centre + width / 2)
    if function == "SIGMOID":

        def sigmoid(values: Array) -> Array:
            exponent = np.clip(-4 * (values.astype(np.float64) - centre) / width, -700, 700)
            return (1 / (1 + np.exp(exponent))).astype(np.float32)

        return sigmoid
    raise Refusal("its own window is of an unknown kind; set pixels.low and pixels.high")


def _colour(header: Header, pixels: Array, rule: Pixels, changes: set[str]) -> Array:
    """`(height, width, 3)` uint8; pydicom has turned YBR to RGB."""
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise Refusal("its pixels do not have the three colours that its header states")
    bits = int(header.BitsStored)
    if bits == 8:
        return pixels.astype(np.uint8)
    if bits != 16 or rule.bits != 16:
        raise Refusal(f"it has {bits} bits per colour; only 8, or 16 under pixels.bits=16, are covered")
    changes.add("scaled")
    return (pixels >> 8).astype(np.uint8)
