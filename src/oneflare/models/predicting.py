"""Predicts the classes of image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from oneflare.core.files import read_regular
from oneflare.data.images import KINDS, is_image_file
from oneflare.data.reading import read_all
from oneflare.data.tables import Columns, find_table, listed_paths
from oneflare.errors import DataError, RunError
from oneflare.models import GlobalModel

BLOCK = 256
"""images in memory at a time"""
TOP = 3
IMAGE_BYTES = 1 << 30
"""largest image file"""


def image_files(paths: Sequence[Path]) -> list[Path]:
    """Files as they are given; folders stand for the images below them, and tables for the files that they name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if is_image_file(file))
            if not found:
                raise DataError(f"no images below {path} ({KINDS})")
            files += found
        elif path.is_file() and find_table(path, Columns()) is not None:
            files += listed_paths(path)
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"no image at {path}")
    return files


def classify(model: GlobalModel, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """A row per file: the top class, its probability and the runners-up, or the error that it cannot be read."""
    for start in range(0, len(files), BLOCK):
        block = files[start : start + BLOCK]
        images, errors = read_images(model, block)
        answers = iter(model.predict_proba(images) if len(images) else ())
        for file in block:
            if file in errors:
                yield {"image": str(file), "error": errors[file]}
            else:
                yield {"image": str(file), **ranking(next(answers), model.task.classes)}


def read_images(model: GlobalModel, files: Sequence[Path]) -> tuple[torch.Tensor, dict[Path, str]]:
    """Images that can be read, in order, and why the others cannot."""
    image = model.task.image.decoded
    parts: list[torch.Tensor] = []
    errors: dict[Path, str] = {}
    for file in files:
        try:
            parts.append(read_all([read_regular(file, IMAGE_BYTES)], [str(file)], image))
        except (DataError, RunError) as error:
            errors[file] = str(error)
    empty = torch.empty(0, image.channels, image.size, image.size, dtype=torch.uint8)
    return torch.cat([empty, *parts]), errors


def ranking(probabilities: torch.Tensor, classes: Sequence[str], most: int = TOP) -> dict[str, Any]:
    """probabilities `(C,)` -> the top class, its probability, and the runners-up"""
    values, order = probabilities.topk(min(most, len(classes)))
    top = [
        {"class": classes[int(label)], "probability": float(value)} for value, label in zip(values, order, strict=True)
    ]
    return {**top[0], "top": top}
