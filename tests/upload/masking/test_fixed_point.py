"""Sums in fixed point against Python's own whole numbers, up to the last one that fits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneflare.client.start import fixed_point
from oneflare.client.statistics import measure_fixed
from oneflare.errors import ConfigError, TrainingError
from oneflare.upload.masking.fixed_point import FixedPoint, from_vector, to_vector, vector_size

ROUND = FixedPoint(8, 4.0)


class Linear:
    """Features that are the pixels themselves, times 3."""

    dim, parameters = 6, 0

    def __call__(self, images):
        return images.flatten(1)[:, :6] * 3.0

    def fingerprint(self):
        return ""


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_sums_are_those_of_whole_numbers(seed, images):
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(images, 1, 2, 3, generator=generator)
    labels = torch.randint(3, (images,), generator=generator)
    found = measure_fixed(Linear(), pictures, labels, 3, ROUND)
    rows = [[max(-1024, min(1024, round(float(x) * 256))) for x in row] for row in Linear()(pictures).double().tolist()]
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(6)] for i in range(6)]
    sums = [[sum(row[i] for row, y in zip(rows, labels, strict=True) if y == c) for i in range(6)] for c in range(3)]
    counts = [int((labels == c).sum()) for c in range(3)]
    upper = [gram[i][j] for i in range(6) for j in range(i, 6)]
    vector = to_vector(found.counts, found.sums, found.gram)
    assert vector.tolist() == [*counts, *(x for row in sums for x in row), *upper]
    assert len(vector) == vector_size(3, 6)
    back = from_vector(vector, 3, 6, ROUND)
    assert back.gram.tolist() == [[x / 2**16 for x in row] for row in gram]
    assert back.sums.tolist() == [[x / 2**8 for x in row] for row in sums]
    assert back.counts.tolist() == counts


@given(st.integers(4, 22), st.floats(0.01, 8))
def test_the_largest_total_that_is_let_in_fits_and_one_image_more_does_not(bits, clip):
    if not 1 <= int(clip * 2**bits) <= 2**22:
        with pytest.raises(ConfigError, match="steps"):
            FixedPoint(bits, clip)
        return
    fixed = FixedPoint(bits, clip)
    most = (2**63 - 1) // fixed.largest(1, 5)
    fixed.check_room(most, 5)
    assert fixed.largest(most, 5) < 2**63
    with pytest.raises(ConfigError, match=f"may have {most};"):
        fixed.check_room(most + 1, 5)
    fixed.check_room(2**63 - 1, 0)  # where only classes are counted


def test_products_of_a_block_are_exact_at_the_limit():
    """512 images whose every feature is the largest: their products add up in float64 without rounding."""
    fixed = FixedPoint(20, 4.0)
    pictures = torch.full((512, 1, 2, 3), 9.0)
    found = measure_fixed(Linear(), pictures, torch.zeros(512, dtype=torch.long), 1, fixed)
    assert int(found.gram[0, 5]) == 512 * fixed.limit**2 == 2**53
    assert int(found.sums[0, 0]) == 512 * fixed.limit


def test_features_that_are_not_finite_are_refused():
    with pytest.raises(TrainingError, match="not finite"):
        ROUND.round(torch.tensor([[1.0, float("nan")]]))


def test_terms_that_do_not_go_together_are_one_line():
    from oneflare.methods.resolve import resolve

    with pytest.raises(ConfigError, match="neither statistics_epsilon nor statistics_dtype"):
        resolve({"method": "analytic", "upload": {"masked": True, "statistics_dtype": "int16"}})
    with pytest.raises(ConfigError, match=r"set upload\.counts=exact to send these plain"):
        resolve({"method": "flare_analytic", "upload": {"masked": True}})
    terms = resolve({"method": "analytic", "upload": {"masked": True}})
    assert terms.upload.counts == "withheld"
    assert resolve({"method": "analytic", "upload": {"masked": False}}).upload.masked is None
    assert resolve({"method": "analytic"}).training_digest() != terms.training_digest()
    assert fixed_point(resolve({"method": "analytic"}), None, None) is None
