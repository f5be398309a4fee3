from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.errors import ConfigError
from oneflare.fusion.analytic.solver import Spectrum
from oneflare.upload.contract import statistics_bytes, statistics_layout
from oneflare.upload.statistics import (
    FEWEST_IN_12_BITS,
    INT12_STEPS,
    FeatureLimits,
    Plan,
    Statistics,
    complaint,
    pack,
    unpack,
)
from oneflare.upload.symmetric import triangle_size
from oneflare.upload.twelve_bits import from_twelve_bits, to_twelve_bits, twelve_bit_size

CLASSES, DIM = 3, 7


def statistics(seed=0, n=60) -> Statistics:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES
    phi = torch.rand(n, DIM, generator=generator, dtype=torch.float64) + 0.3 * labels[:, None]
    onehot = torch.nn.functional.one_hot(labels, CLASSES).double()
    return Statistics(phi.T @ phi, onehot.T @ phi, onehot.sum(0))


@given(st.lists(st.integers(-2048, 2047), max_size=40))
def test_numbers_come_back(numbers):
    values = torch.tensor(numbers, dtype=torch.int64)
    words = to_twelve_bits(values)
    assert words.dtype == torch.int16
    assert len(words) == twelve_bit_size(len(numbers))
    assert from_twelve_bits(words, len(numbers)).tolist() == numbers


def test_bits_by_hand():
    """1, 2, 3 and 4 above 2048: 0x801, 0x802, 0x803, 0x804, the lowest bits first."""
    words = [word & 0xFFFF for word in to_twelve_bits(torch.tensor([1, 2, 3, 4])).tolist()]
    assert sum(word << (16 * place) for place, word in enumerate(words)) == 0x804803802801


def scatter(found: Statistics) -> torch.Tensor:
    total = found.sums.sum(0)
    return found.gram - torch.outer(total, total) / found.samples


def test_a_correlation_loses_at_most_half_a_step():
    exact = statistics()
    packed = pack(exact, "int12")
    deviation = scatter(exact).diagonal().sqrt()
    lost = (scatter(unpack(packed)) - scatter(exact)) / deviation[:, None] / deviation
    assert float(lost.abs().max()) <= 0.5 / INT12_STEPS + 1e-6
    limits = FeatureLimits(torch.zeros(DIM), torch.full((DIM,), 2.0))
    assert complaint(packed, 60, limits) is None
    packed["scatter"] = to_twelve_bits(torch.full((DIM * (DIM + 1) // 2,), -2047))
    assert complaint(packed, 60, limits) is not None


def test_scores_change_by_no_more_than_the_bound():
    """|W' - W| <= e |W| / (r - e) with e = |K' - K| in the spectral norm: the second resolvent identity.

    (K' + r)^-1 - (K + r)^-1 = -(K' + r)^-1 (K' - K) (K + r)^-1, and K' + r >= r - e. Class sums are sent as they are.
    """
    exact = statistics()
    coarse = unpack(pack(exact, "int12"))
    coarse = Statistics(coarse.gram, exact.sums, exact.counts)
    one, two = Spectrum(exact), Spectrum(coarse)
    error = float(torch.linalg.matrix_norm(two.matrix - one.matrix, 2))
    assert 0 < error <= DIM / INT12_STEPS
    for ridge in (0.01, 0.1, 1.0):
        change = torch.linalg.matrix_norm(two.solved(ridge) - one.solved(ridge), 2)
        assert float(change) <= error * float(torch.linalg.matrix_norm(one.solved(ridge), 2)) / (ridge - error) + 1e-6


def test_the_size_is_that_of_the_tensors():
    for dtype in ("float32", "int16", "int12"):
        packed = pack(statistics(), dtype)
        assert sum(t.numel() * t.element_size() for t in packed.values()) == statistics_bytes(DIM, CLASSES, dtype)
        layout = statistics_layout(Plan({}, "", DIM, dtype), CLASSES)
        assert {name: (tuple(t.shape), t.is_floating_point()) for name, t in packed.items()} == layout


def test_words_of_twelve_bits_are_never_as_many_as_the_numbers():
    """That is how they are told from 16-bit numbers; where they would be, the format is refused."""
    same = [dim for dim in range(1, 3000) if twelve_bit_size(triangle_size(dim)) == triangle_size(dim)]
    assert max(same) < FEWEST_IN_12_BITS
    with pytest.raises(ConfigError, match="float32 or int16"):
        Plan.of({"name": "identity"}, 3, 1, "int12")
