"""Deterministic splits of a training set over clients.

Each partitioner owns its generator and returns one index array per client. All but `dirichlet_overlap` give every
sample exactly one owner.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oneflare.core.config import PartitionConfig
from oneflare.core.registry import Registry
from oneflare.core.seeds import numpy_generator
from oneflare.errors import ConfigError, DataError, did_you_mean

Indices = NDArray[np.int64]
RETRIES = 20


class Partitioner(Protocol):
    def __call__(
        self, labels: Indices, config: PartitionConfig, generator: np.random.Generator, /
    ) -> list[Indices]: ...


PARTITIONS: Registry[list[Indices]] = Registry("partition")


@dataclass(frozen=True)
class Partition:
    """The owners of every sample, and the client x class table that goes into every result."""

    kind: str
    indices: tuple[Indices, ...]
    table: NDArray[np.int64]
    """`(clients, classes)` counts"""

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self.indices]

    @property
    def empty(self) -> list[int]:
        return [client for client, size in enumerate(self.sizes) if size == 0]

    @property
    def assignments(self) -> int:
        """images that were given to clients"""
        return int(self.table.sum())

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "sizes": self.sizes,
            "table": self.table.tolist(),
            "empty": self.empty,
            "assignments": self.assignments,
        }


def split_clients(labels: Indices, classes: int, config: PartitionConfig, seed: int) -> Partition:
    """Divide samples over `config.clients` clients; the same arguments always give the same split."""
    if config.clients > len(labels):
        raise DataError(f"clients={config.clients} is more than the {len(labels)} training images; use fewer clients")
    parts = _flower(labels, config, seed) if config.kind.startswith("flwr:") else _best_draw(labels, config, seed)
    parts = [np.sort(part).astype(np.int64) for part in parts]
    return partition_of(config.kind, parts, labels, classes)


def partition_of(kind: str, parts: Sequence[Indices], labels: Indices, classes: int) -> Partition:
    table = np.stack([np.bincount(labels[part], minlength=classes) for part in parts])
    return Partition(kind, tuple(parts), table.astype(np.int64))


def _best_draw(labels: Indices, config: PartitionConfig, seed: int) -> list[Indices]:
    """Redraw at most RETRIES times until every client has `min_samples`; else keep the draw that comes closest."""
    draw = PARTITIONS[config.kind].factory
    best: list[Indices] = []
    fewest = config.clients + 1
    for attempt in range(RETRIES):
        parts = draw(labels, config, numpy_generator(seed, "partition", attempt))
        short = sum(len(part) < config.min_samples for part in parts)
        if short < fewest:
            best, fewest = parts, short
        if short == 0:
            break
    return best


def _divide(members: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """Cut a class at the cumulated shares: every member goes to exactly one client."""
    cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
    return np.split(members, cuts)


@PARTITIONS.register("dirichlet")
def dirichlet(labels: Indices, config: PartitionConfig, generator: np.random.Generator) -> list[Indices]:
    """Per class, proportions over clients are drawn from Dir(alpha) and the class is divided (disjoint)."""
    pieces: list[list[Indices]] = [[] for _ in range(config.clients)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = _dirichlet_draw(generator, config.alpha, config.clients)
        for client, piece in enumerate(_divide(members, shares)):
            pieces[client].append(piece)
    return [np.concatenate(client) for client in pieces]


def _dirichlet_draw(generator: np.random.Generator, alpha: float, clients: int) -> NDArray[np.float64]:
    shares = generator.dirichlet(np.full(clients, alpha))
    if not np.isfinite(shares).all() or abs(shares.sum() - 1) > 1e-6:  # alpha so small that all draws underflow
        shares = np.zeros(clients)
        shares[generator.integers(clients)] = 1.0
    return shares


@PARTITIONS.register("dirichlet_overlap")
def dirichlet_overlap(labels: Indices, config: PartitionConfig, generator: np.random.Generator) -> list[Indices]:
    """FAFI's released split: each client takes up to 10 x its share of a class, so samples have several owners."""
    pieces: list[list[Indices]] = [[] for _ in range(config.clients)]
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        shares = _dirichlet_draw(generator, config.alpha, config.clients)
        for client, wanted in enumerate(np.round(10 * shares * len(members)).astype(int)):
            pieces[client].append(generator.permutation(members)[: min(wanted, len(members))])
    return [np.concatenate(client) for client in pieces]


@PARTITIONS.register("iid")
def iid(labels: Indices, config: PartitionConfig, generator: np.random.Generator) -> list[Indices]:
    """A random permutation cut into equal parts."""
    return np.array_split(generator.permutation(len(labels)), config.clients)


@PARTITIONS.register("shards")
def shards(labels: Indices, config: PartitionConfig, generator: np.random.Generator) -> list[Indices]:
    """Sorted by label, cut into clients x shards pieces, dealt at random (McMahan et al.)."""
    number = config.clients * config.shards
    if number > len(labels):
        raise DataError(f"{config.clients} clients x {config.shards} shards exceed the {len(labels)} training images")
    order = generator.permutation(len(labels))
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], number)
    dealt = generator.permutation(number).reshape(config.clients, config.shards)
    return [np.concatenate([pieces[shard] for shard in hand]) for hand in dealt]


def _flower(labels: Indices, config: PartitionConfig, seed: int) -> list[Indices]:
    """Any partitioner of flwr-datasets: `partition.kind=flwr:DirichletPartitioner partition.options={...}`."""
    try:
        import datasets
        from flwr_datasets import partitioner as catalogue
    except ImportError:
        raise ConfigError(
            f"partition.kind={config.kind} needs flwr-datasets; pip install 'oneflare[flower-datasets]'"
        ) from None
    name = config.kind.removeprefix("flwr:")
    kinds = {
        key: value for key, value in vars(catalogue).items() if key.endswith("Partitioner") and key != "Partitioner"
    }
    if name not in kinds:
        raise ConfigError(f"unknown partitioner '{name}' of flwr-datasets{did_you_mean(name, kinds)}")
    accepted = inspect.signature(kinds[name]).parameters
    given = {"num_partitions": config.clients, "partition_by": "label", "alpha": config.alpha, "seed": seed}
    options = {key: value for key, value in given.items() if key in accepted} | config.options
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it repeats itself while it retries; what matters is raised
            chosen = kinds[name](**options)
            chosen.dataset = datasets.Dataset.from_dict({"label": labels, "index": np.arange(len(labels))})
            parts = [
                np.asarray(chosen.load_partition(client)["index"], dtype=np.int64)
                for client in range(chosen.num_partitions)
            ]
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"partition.kind={config.kind}: {str(error).splitlines()[0]}") from None
    owned = np.concatenate(parts)
    if len(np.unique(owned)) != len(owned):
        raise ConfigError(f"partition.kind={config.kind} gave samples to several clients; every sample needs one owner")
    return parts
