"""Reads the images of a request: a plain body, JSON with base64, or a form."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from oneflare.data.images import KINDS, shape_of
from oneflare.data.pixel_scale import Refusal, TooLarge
from oneflare.models.serving.effort import BYTES_PER_PIXEL, MOST_PASSES, Effort, effort_of, most_pieces
from oneflare.models.serving.limits import Limits, RequestError

HOW = 'give {"images": ["base64", ...]}, the bytes of one image as the body, or a form as `curl -F image=@FILE` does'


def images_of(content_type: str, body: bytes, limits: Limits) -> list[bytes]:
    """The encoded images of a body, as many and as large as the limits allow; none of them is decoded."""
    kind = content_type.split(";")[0].strip().lower()
    if kind == "application/json":
        contents = _from_json(body)
    elif kind == "multipart/form-data":
        contents = _from_form(content_type, body, limits)
    else:
        contents = [body] if body else []
    if not contents:
        raise RequestError(400, f"there is no image in the request; {HOW}")
    if len(contents) > limits.images:
        raise RequestError(413, f"{len(contents)} images exceed the limit of {limits.images} per request")
    _check_effort(contents, limits)
    return contents


def _from_json(body: bytes) -> list[bytes]:
    if body.count(b"[") + body.count(b"{") + body.count(b",") > most_pieces(len(body)):
        raise RequestError(413, f"the JSON consists of more than {most_pieces(len(body)):,} pieces; {HOW}")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise RequestError(400, "the body is not valid JSON") from None
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list) or not all(isinstance(text, str) for text in images):
        raise RequestError(400, HOW)
    try:
        return [base64.b64decode(text, validate=True) for text in images]
    except (binascii.Error, ValueError):
        raise RequestError(400, "an image is not valid base64") from None


def _from_form(content_type: str, body: bytes, limits: Limits) -> list[bytes]:
    """The files of a form, in order, whatever its fields are called; they are never written to the disk."""
    from python_multipart import create_form_parser
    from python_multipart.exceptions import FormParserError

    contents: list[bytes] = []

    def on_file(file: Any) -> None:
        file.file_object.seek(0)
        contents.append(file.file_object.read())
        file.close()
        if len(contents) > limits.images:
            raise RequestError(413, f"the form has more than the {limits.images} images that one request may have")

    def on_field(field: Any) -> None:
        name = (field.field_name or b"").decode("utf-8", "replace")
        raise RequestError(400, f"the form's field {name!r:.60} is not a file; {HOW}")

    config = {"MAX_MEMORY_FILE_SIZE": limits.body_bytes + 1}
    try:
        parser = create_form_parser({"Content-Type": content_type.encode("latin-1")}, on_field, on_file, config=config)
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError):
        raise RequestError(400, "the body is not a valid form (multipart/form-data)") from None
    return contents


def _check_effort(contents: list[bytes], limits: Limits) -> None:
    """Refuse what would take too much memory or time to decode, from what the images' headers and structure state."""
    most = most_pieces(sum(map(len, contents)))
    pieces = pixels = passed = unpacked = 0
    for number, content in enumerate(contents, 1):
        found, (width, height) = _measured(number, content, most, limits)
        area = max(width * height, found.tile)
        pieces, pixels = pieces + found.pieces, pixels + area
        passed, unpacked = passed + found.passes * area, unpacked + found.unpacked
        if pieces > most:
            raise RequestError(413, f"image number {number}: more than {most:,} pieces of a file; save it anew")
        if pixels > limits.pixels:
            many = f"image number {number}: {width}x{height}" if number == 1 else f"the first {number} images"
            raise RequestError(413, f"{many}: {pixels:,} pixels exceed the limit of {limits.pixels:,} per request")
        if passed > MOST_PASSES * limits.pixels:
            raise RequestError(413, f"image number {number}: {found.passes:,} passes over its pixels; save it anew")
        if unpacked > BYTES_PER_PIXEL * limits.pixels:
            raise RequestError(413, f"image number {number} unpacks to {found.unpacked:,} bytes; send one slice of it")


def _measured(number: int, content: bytes, most: int, limits: Limits) -> tuple[Effort, tuple[int, int]]:
    """What decoding one image takes, and its width and height; pieces are counted before anything else is read."""
    from PIL import Image

    try:
        found = effort_of(content, most)
        if found.pieces > most:
            return found, (0, 0)
        width, height, _ = shape_of(content)
        return found, (width, height)
    except (TooLarge, Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise RequestError(413, f"image number {number} exceeds {limits.pixels:,} pixels") from None
    except Refusal as refusal:
        raise RequestError(422, f"image number {number}: {refusal}") from None
    except Exception:  # foreign bytes make decoders raise many kinds
        raise RequestError(422, f"image number {number} is damaged or not an image ({KINDS})") from None
