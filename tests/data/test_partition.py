from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oneflare.core.config import PartitionConfig
from oneflare.data import split_clients
from oneflare.errors import ConfigError, DataError

DISJOINT = ("dirichlet", "iid", "shards")


def labels_of(samples: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, samples)


@given(
    kind=st.sampled_from(DISJOINT),
    clients=st.integers(1, 30),
    classes=st.integers(2, 12),
    samples=st.integers(60, 400),
    alpha=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**40),
)
def test_every_sample_has_one_owner_and_the_split_is_repeatable(kind, clients, classes, samples, alpha, seed):
    labels = labels_of(samples, classes, seed)
    config = PartitionConfig(kind=kind, clients=clients, alpha=alpha)
    partition = split_clients(labels, classes, config, seed)
    owned = np.concatenate(partition.indices)
    assert sorted(owned) == list(range(samples))
    assert partition.table.sum(0).tolist() == np.bincount(labels, minlength=classes).tolist()
    again = split_clients(labels, classes, config, seed)
    assert all(np.array_equal(a, b) for a, b in zip(partition.indices, again.indices, strict=True))


@given(seed=st.integers(0, 1000))
def test_large_alpha_is_nearly_uniform(seed):
    labels = labels_of(5000, 5)
    table = split_clients(labels, 5, PartitionConfig(clients=5, alpha=1e6), seed).table
    assert np.abs(table / table.sum(0) - 0.2).max() < 0.02


def test_small_alpha_is_badly_skewed():
    labels = labels_of(5000, 10)
    table = split_clients(labels, 10, PartitionConfig(clients=5, alpha=0.05), 0).table
    assert (table.max(0) / table.sum(0)).mean() > 0.7


def test_a_hundred_clients_at_alpha_005_ends_and_names_the_empty_ones():
    partition = split_clients(labels_of(1000, 10), 10, PartitionConfig(clients=100, alpha=0.05), 0)
    assert len(partition.indices) == 100
    assert sum(partition.sizes) == 1000
    assert partition.empty == [client for client, size in enumerate(partition.sizes) if size == 0]


def test_tiny_alpha_does_not_break_the_draw():
    assert sum(split_clients(labels_of(100, 3), 3, PartitionConfig(clients=4, alpha=1e-9), 0).sizes) == 100


def test_other_seeds_give_other_splits():
    labels = labels_of(500, 5)
    one, two = (split_clients(labels, 5, PartitionConfig(), seed).table for seed in (0, 1))
    assert not np.array_equal(one, two)


def test_overlap_is_only_under_its_own_name():
    labels = labels_of(2000, 10)
    partition = split_clients(labels, 10, PartitionConfig(kind="dirichlet_overlap", alpha=0.5), 0)
    assert sum(partition.sizes) > 2000
    assert all(len(np.unique(part)) == len(part) for part in partition.indices)


def test_shards_limit_the_classes_of_a_client():
    labels = np.repeat(np.arange(10), 100)
    table = split_clients(labels, 10, PartitionConfig(kind="shards", clients=10, shards=2), 0).table
    assert (table > 0).sum(1).max() <= 3


def test_more_clients_than_samples_is_refused():
    with pytest.raises(DataError, match="use fewer clients"):
        split_clients(labels_of(10, 2), 2, PartitionConfig(clients=11), 0)


def test_flower_partitioners_are_accepted():
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is an extra")
    labels = labels_of(600, 5)
    config = PartitionConfig(kind="flwr:DirichletPartitioner", clients=4, alpha=5.0)
    partition = split_clients(labels, 5, config, 3)
    assert sorted(np.concatenate(partition.indices)) == list(range(600))
    iid = split_clients(labels, 5, PartitionConfig(kind="flwr:IidPartitioner", clients=4), 3)
    assert iid.sizes == [150] * 4


def test_flower_mistakes_are_one_line():
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is an extra")
    with pytest.raises(ConfigError, match="did you mean 'DirichletPartitioner'"):
        split_clients(labels_of(50, 2), 2, PartitionConfig(kind="flwr:DirichletPartitionr"), 0)
    with pytest.raises(ConfigError, match=r"partition\.kind=flwr:DirichletPartitioner"):
        split_clients(
            labels_of(50, 2), 2, PartitionConfig(kind="flwr:DirichletPartitioner", alpha=0.001, clients=40), 0
        )
