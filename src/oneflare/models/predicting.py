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
from oneflare.models.base import Answers

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
        answers = iter(described(model, model.answers(images)) if len(images) else ())
        for file in block:
            if file in errors:
                yield {"image": str(file), "error": errors[file]}
            else:
                yield {"image": str(file), **next(answers)}


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


def described(model: GlobalModel, answers: Answers, most: int = TOP) -> list[dict[str, Any]]:
    """A row per image: its class, the probability of it, and the best classes in order.

    Where the model has thresholds, classes are in the order of `Decision.scores` and carry their thresholds. Where it
    can tell unknown images, `known` says which one an image is; the class of an unknown one is None, and `nearest`
    names the best.
    """
    decision, classes = model.decision, model.task.classes
    probabilities = answers.logits.softmax(1)
    scores = probabilities if decision is None else decision.scores(answers.logits)
    unknown = None if decision is None else decision.unknown(answers.familiarity, len(scores))
    rows = []
    for index, order in enumerate(scores.topk(min(most, len(classes))).indices.tolist()):
        top = [{"class": classes[label], "probability": float(probabilities[index, label])} for label in order]
        if decision is not None:
            limits = [decision.thresholds[label] for label in order]
            top = [one if t is None else {**one, "threshold": t} for one, t in zip(top, limits, strict=True)]
        row: dict[str, Any] = {"class": top[0]["class"], "probability": top[0]["probability"], "top": top}
        if decision is not None and decision.floor is not None and unknown is not None:
            row["known"] = not bool(unknown[index])
            if not row["known"]:
                row |= {"class": None, "nearest": top[0]["class"]}
        rows.append(row)
    return rows
