"""Data sets that a Python caller hands over as arrays instead of naming them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from oneflare.core.files import digest_of, tensor_digest
from oneflare.data.dataset import Dataset, Split, from_arrays
from oneflare.errors import ConfigError, DataError


def given_data(given: Any, test: tuple[Any, Any] | None) -> Dataset | None:
    """Data handed over in Python: a Dataset, arrays, one pair of arrays per client, or a torch data set."""
    if given is None or isinstance(given, str | dict):
        if test is not None:
            raise ConfigError("test= goes with data given as arrays; named data sets bring their own test images")
        return None
    if isinstance(given, Dataset):
        if test is not None:
            return dataclasses.replace(given, test=from_arrays(test, test, classes=given.classes).test)
        return given
    if isinstance(given, list):
        if not given or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
            raise DataError("a list of clients must hold one (x, y) pair of arrays per client")
        bounds = np.cumsum([0] + [len(y) for _, y in given])
        if test is None:
            raise DataError("data as a list of clients needs held-out images: test=(x, y)")
        images = np.concatenate([np.asarray(x) for x, _ in given])
        labels = np.concatenate([np.asarray(y) for _, y in given])
        owners = tuple(np.arange(start, stop) for start, stop in itertools.pairwise(bounds))
        return dataclasses.replace(from_arrays((images, labels), test), owners=owners)
    if isinstance(given, tuple) and len(given) == 2:
        if isinstance(given[0], tuple):
            return from_arrays(given[0], given[1])
        return from_arrays(given, test)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        pairs = [given[index] for index in range(len(given))]
        arrays = (
            np.stack([np.asarray(x) for x, _ in pairs]),
            np.asarray([y if isinstance(y, str) else int(y) for _, y in pairs]),
        )
        return from_arrays(arrays, test)
    raise DataError(
        f"data of type {type(given).__name__} is not understood; give a name, (x, y) arrays or a torch data set"
    )


def _split_digest(split: Split) -> list[str]:
    return [tensor_digest(split.images), tensor_digest(split.labels)]


def data_digest(dataset: Dataset) -> str:
    public = [] if dataset.public is None else [_split_digest(dataset.public)]
    return digest_of([_split_digest(dataset.train), _split_digest(dataset.test), list(dataset.classes), *public])
