"""Wrong labels at some clients, to study what one careless member does to a federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from oneflare.core.seeds import numpy_generator
from oneflare.data.dataset import Dataset
from oneflare.data.partition import Indices


def with_wrong_labels(dataset: Dataset, parts: Sequence[Indices], share: float, clients: int, seed: int) -> Dataset:
    """The data set in which the first `clients` have this share of their labels replaced by other classes."""
    labels = dataset.train.labels.numpy().copy()
    for client, rows in enumerate(parts[:clients]):
        labels[rows] = wrong(labels[rows], len(dataset.classes), share, numpy_generator(seed, "wrong labels", client))
    return replace(dataset, train=dataset.train._replace(labels=torch.from_numpy(labels)))


def wrong(labels: NDArray[np.int64], classes: int, share: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """Labels of which `round(share n)`, drawn at random, name another class, each other class equally likely."""
    changed = labels.copy()
    rows = generator.permutation(len(labels))[: round(share * len(labels))]
    changed[rows] = (labels[rows] + generator.integers(1, classes, size=len(rows))) % classes
    return changed
