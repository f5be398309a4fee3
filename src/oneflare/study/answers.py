"""Keeps one bit for each test image that a model classifies correctly, so that images can be resampled.

They are read off the saved models, so that runs from before can be given them as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneflare.core.files import digest_of, read_json, write_json
from oneflare.core.records import record_to_dict
from oneflare.data import Dataset
from oneflare.fusion import load_model, logits_of_all
from oneflare.nn.hardware import one_thread
from oneflare.simulation.files import RunFiles
from oneflare.simulation.results import FusionResult

FILE = "answers.json"
DIGITS = 16
"""of the digest of a model's file"""
LARGEST_SLIP = 0.005
"""part of the images that may flip between the saved model and the one that was scored (rounding of logits)"""


def read_answers(folder: Path, fusion: str) -> NDArray[np.bool_] | None:
    """`(images,)`, or None where they are not kept."""
    path = folder / FILE
    row = read_json(path).get(fusion) if path.exists() else None
    if row is None or row["right"] is None:
        return None
    bits = np.frombuffer(bytes.fromhex(row["right"]), dtype=np.uint8)
    return np.unpackbits(bits)[: row["images"]].astype(np.bool_)


def has_answers(folder: Path, fusion: str, metrics: FusionResult) -> bool:
    """Whether the model of these metrics was asked; a model that was made anew since then was not."""
    return _is_of(read_json(folder / FILE), fusion, metrics)


def keep_answers(folder: Path, fusions: Iterable[str], dataset: Dataset) -> None:
    """Ask the saved models that have not been asked yet; one pass of each client's encoder serves all fusions.

    A model that does not reproduce its own accuracy has none: its answers would belong to something else.
    """
    files = RunFiles(folder)
    path = folder / FILE
    kept: dict[str, Any] = read_json(path) if path.exists() else {}
    metrics = {name: FusionResult.read(files.metrics(name)) for name in fusions if files.model(name).exists()}
    digests = {name: hashlib.sha256(files.model(name).read_bytes()).hexdigest()[:DIGITS] for name in metrics}
    missing = [name for name in metrics if not _is_of(kept, name, metrics[name], digests[name])]
    if not missing:
        return
    with one_thread():
        logits = logits_of_all({name: load_model(files.model(name)) for name in missing}, dataset.test.images)
    for name, values in logits.items():
        right = (values.argmax(1) == dataset.test.labels).numpy()
        slip = abs(float(right.mean()) - metrics[name].accuracy)
        bits = np.packbits(right).tobytes().hex() if slip <= LARGEST_SLIP else None
        kept[name] = {"images": len(right), "right": bits, "of": _stamp(metrics[name]), "model": digests[name]}
    write_json(path, kept)


def _is_of(kept: Mapping[str, Any], fusion: str, metrics: FusionResult, model: str | None = None) -> bool:
    """model: the digest of its file where there is one, for a client may have been trained again with the same code"""
    row = kept.get(fusion) or {}
    return fusion in kept and row.get("of") == _stamp(metrics) and model in (None, row.get("model"))


def _stamp(metrics: FusionResult) -> str | None:
    """Names the model: its options and code; None for figures of the first release, which do not say their code.

    A fusion that was never revised has the same name as before revisions were counted.
    """
    if metrics.code is None:
        return None
    code = record_to_dict(metrics.code)
    return digest_of([metrics.options, {key: value for key, value in code.items() if key != "revisions" or value}])
