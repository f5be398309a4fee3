"""The largest directions of sums of products apart from the rest: nothing is lost, and fewer bits are needed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.upload.rice import encode_triangle
from oneflare.upload.symmetric import triangle_size
from oneflare.upload.words import (
    HEADER,
    LARGEST,
    NO_REST,
    STEPS,
    Parsed,
    Rows,
    leading,
    logarithm_of,
    rows_apart,
    step_of,
    with_rest,
)


def sums(n: int, dim: int, seed: int = 0, large: int = 5) -> torch.Tensor:
    """Products of n images with unit features, of which a few directions vary much more."""
    generator = torch.Generator().manual_seed(seed)
    strong = torch.randn(n, large, generator=generator) * torch.linspace(8, 3, large)
    phi = strong @ torch.randn(large, dim, generator=generator) / math.sqrt(large)
    phi = phi + torch.randn(n, dim, generator=generator)
    centred = (phi - phi.mean(0)).double()
    return (centred.T @ centred).float()


def read(words: torch.Tensor, dim: int) -> torch.Tensor:
    return Parsed.of(words, dim, dim // 2).products_into(torch.full((dim, dim), float("nan"), dtype=torch.float64))


@given(st.integers(1, 90), st.integers(1, 60), st.integers(-8, 12), st.integers(0, 9))
def test_products_lose_half_a_step_whatever_is_sent_apart(n, dim, step, seed):
    products = sums(n, dim, seed)
    rows = rows_apart(products, math.sqrt(n))
    assert len(rows.whole) == dim // 16
    found = read(with_rest(rows, products, step), dim)
    rounded = (products / step_of(step)).round().double() * step_of(step)
    assert torch.equal(found, rounded.triu() + rounded.triu(1).T)


@given(st.integers(0, 9), st.integers(-6, 6), st.sampled_from([0, 1, 7, 20]), st.sampled_from([1.0, 300.0]))
def test_any_rows_give_the_same_products(seed, width, number, size):
    products = sums(80, 40, seed)
    whole = torch.randn(number, 40, generator=torch.Generator().manual_seed(seed)).mul_(size).round_()
    found = read(with_rest(Rows(whole, width), products, 3), 40)
    assert torch.equal(found, read(with_rest(rows_apart(products, 9.0), products, 3), 40))


def test_leading_rows_are_the_largest_eigenvectors():
    """Oracle: LAPACK's eigenvalues, and the best approximation of that rank (Eckart and Young 1936)."""
    products = sums(400, 150)
    rows = leading(products, 9).double()
    values, vectors = torch.linalg.eigh(products.double())
    best = vectors[:, -9:] * values[-9:] @ vectors[:, -9:].T
    left = float((products - rows.T @ rows).square().sum())
    assert left == pytest.approx(float((products - best).square().sum()), rel=0.02)
    assert torch.allclose(rows[-5:].square().sum(1), values[-5:], rtol=1e-3)


def test_large_directions_apart_take_fewer_bits():
    dim, step = 320, 8
    products = sums(600, dim)
    apart = 64 * len(with_rest(rows_apart(products, math.sqrt(600)), products, step)) / triangle_size(dim)
    together = 64 * len(encode_triangle((products / step_of(step)).round())) / triangle_size(dim)
    assert apart < together - 2


def test_products_of_no_images_are_zero():
    nothing = torch.zeros(40, 40)
    words = with_rest(rows_apart(nothing, 1.0), nothing, STEPS[0])
    assert torch.equal(read(words, 40), nothing.double())


@given(st.floats(1e-30, 1e30))
def test_steps_are_quarters_of_an_octave(step):
    found = logarithm_of(step)
    assert found in STEPS
    if STEPS[0] < found < STEPS[-1]:
        assert abs(math.log2(step_of(found) / step)) <= 1 / 8 + 1e-9


def _good() -> list[int]:
    products = sums(50, 40)
    return with_rest(rows_apart(products, 7.0), products, 4).tolist()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda words: words[:3], "header"),
        (lambda words: [999, *words[1:]], "no step"),
        (lambda words: [words[0], 999, *words[2:]], "rows in"),
        (lambda words: [*words[:2], 21, *words[3:]], "rows in"),
        (lambda words: [*words[:2], -1, *words[3:]], "rows in"),
        (lambda words: [*words[:3], len(words), *words[4:]], "rows in"),
        (lambda words: [*words[:2], 0, *words[3:]], "goes on behind"),
        (lambda words: [*words[:3], 0, *words[4:]], "shorter"),
        (lambda words: [NO_REST, *words[1:]], "neither products nor a factor alone"),
        (lambda words: [NO_REST, 0, 0, 0], "neither products nor a factor alone"),
        (lambda words: words[:-1], "stream"),
        (lambda words: [*words, 1], "stream"),
    ],
)
def test_damaged_words_are_refused(damage, complaint):
    words = torch.tensor(damage(_good()))
    with pytest.raises(ValueError, match=complaint):
        read(words, 40)


def test_rows_that_would_overflow_are_refused():
    rows = Rows(torch.full((1, 40), 2.0**30), logarithm_of(LARGEST / 2.0**30) + 1)
    with pytest.raises(ValueError, match="no images"):
        read(rows.words(), 40)


def test_a_factor_alone_has_no_rest():
    whole = torch.arange(80.0).view(2, 40)
    rows = Rows(whole, 0)
    assert len(rows.words()) == HEADER + len(rows.code)
    assert torch.equal(read(rows.words(), 40), (whole.T @ whole).double())


def test_the_largest_rows_in_the_finest_steps_do_not_overflow():
    """As many rows as the largest blocks of features may have."""
    rows = Rows(torch.full((4096, 2), 0.99 * LARGEST), logarithm_of(1.0))
    assert bool(torch.isfinite(rows.products(step_of(STEPS[0])).float()).all())
