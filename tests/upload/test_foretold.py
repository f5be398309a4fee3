"""Whole sums by what they miss of what is foretold: nothing is lost, few bits, and damage is noticed."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneflare.upload import foretold
from oneflare.upload.foretold import HEADER, ROWS, Foretold, decode_foretold, encode_foretold, parts
from oneflare.upload.rice import encode_rows, encode_triangle
from oneflare.upload.symmetric import triangle_size


def drawn(images: int, dim: int, seed: int = 0, size: float = 2.0) -> torch.Tensor:
    """Sums of products of whole numbers, with a few strong directions."""
    generator = torch.Generator().manual_seed(seed)
    strong = torch.randn(images, 3, generator=generator) @ torch.randn(3, dim, generator=generator)
    q = ((torch.randn(images, dim, generator=generator) + strong) * size).round().double()
    return q.T @ q


def nothing(dim: int) -> torch.Tensor:
    return torch.zeros(0, dim, dtype=torch.float64)


def read(words: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    dim = known.shape[1]
    return decode_foretold(words, known, torch.full((dim, dim), float("nan"), dtype=torch.float64))


@settings(max_examples=30)
@given(st.integers(1, 200), st.integers(0, 300), st.integers(0, 10**6), st.sampled_from([0.5, 2.0, 30.0]))
def test_nothing_is_lost(dim, images, seed, size):
    products = drawn(images, dim, seed, size)
    known = products[:2] / products.diagonal()[:2, None].clamp(min=1).sqrt()
    known = known[: seed % 2]  # what some image gives of G
    assert torch.equal(read(encode_foretold(products, known), known), products)


def test_what_is_foretold_is_the_regression_on_earlier_rows():
    """Oracle: the normal equations with the ridge, solved by torch."""
    products, dim = drawn(500, 2 * ROWS + 9), 2 * ROWS + 9
    found = Foretold(nothing(dim), dim)
    for first, last in parts(dim):
        before, rows = products[:first, :first], products[first:last, :first]
        ridge = torch.eye(first, dtype=torch.float64)
        expected = rows @ torch.linalg.solve(before + ridge, products[:first, first:]) if first else 0 * products[:last]
        own = found.of(first, last)
        assert torch.allclose(own, expected, rtol=1e-9, atol=1e-6)
        found.learn(first, products[first:last, first:] - own)


def test_it_takes_fewer_bits_than_the_products():
    dim, images = 400, 900
    products = drawn(images, dim)
    alone, own = (64 * len(code) / triangle_size(dim) for code in (encode_triangle(products), words(products)))
    chance = math.log2(math.sqrt(2 * math.pi * math.e * images) * 4)  # of unrelated numbers of deviation 2
    assert own < alone - 3
    assert own < chance + 1.5  # the first rows say nothing of the strong directions
    few = 64 * len(words(drawn(50, dim))) / triangle_size(dim)
    assert few < own / 2


def words(products: torch.Tensor) -> torch.Tensor:
    return encode_foretold(products, nothing(len(products)))


def test_another_processors_rounding_makes_no_difference(monkeypatch):
    """The reader's forecasts are moved as far as processors may differ, and more than they were seen to."""
    products = drawn(300, 150)
    sent, known = words(products), nothing(150)
    assert int(sent[1]) > 0
    exact = Foretold.of

    def elsewhere(self, first, last):
        found = exact(self, first, last)
        noise = torch.rand(found.shape, generator=torch.Generator().manual_seed(first), dtype=torch.float64)
        return found + (2 * noise - 1) * foretold.DOUBT / 4

    monkeypatch.setattr(Foretold, "of", elsewhere)
    assert torch.equal(read(sent, known), products)


def test_a_forecast_that_is_too_different_is_noticed(monkeypatch):
    products = drawn(300, 150)
    sent = words(products)
    monkeypatch.setattr(foretold, "RIDGE", 2.0)
    with pytest.raises(ValueError, match="checksum"):
        read(sent, nothing(150))


@pytest.mark.parametrize("change", [lambda w: w[:-1], lambda w: w[:1], lambda w: w ^ (1 << 7), lambda w: w[HEADER:]])
def test_damaged_words_are_refused(change):
    with pytest.raises(ValueError, match=r"\w"):
        read(change(words(drawn(100, 90))), nothing(90))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 63), st.integers(0, 10**6))
def test_no_changed_bit_is_read_as_other_sums(place, bit, seed):
    products = drawn(60, 30, seed % 7)
    sent = words(products)
    sent[place % len(sent)] ^= (1 << bit) if bit < 63 else -(1 << 63)
    try:
        found = read(sent, nothing(30))
    except ValueError:
        return
    assert torch.equal(found, products)


def test_products_that_no_images_have_are_refused():
    negative = -torch.eye(5, dtype=torch.float64)
    with pytest.raises(ValueError, match="no images"):
        words(negative * 9)
    with pytest.raises(ValueError, match="too large"):
        words(torch.full((2, 2), 2.0**53, dtype=torch.float64))


@pytest.mark.parametrize(("number", "length"), [(10**6, 50), (3, 500), (-1, 4), (3, -4), (0, 4), (3, 10**9)])
def test_more_doubtful_places_than_there_can_be_are_refused(number, length):
    forged = torch.cat([torch.tensor([0, number, length]), torch.zeros(600, dtype=torch.int64)])
    with pytest.raises(ValueError, match="do not fit"):
        read(forged, nothing(90))


def test_places_below_the_diagonal_are_refused():
    products = drawn(100, 90)
    gaps = encode_rows([torch.tensor([90 * 50 + 3])])
    forged = torch.cat([torch.tensor([0, 1, len(gaps)]), gaps, words(products)[HEADER + int(words(products)[2]) :]])
    with pytest.raises(ValueError, match="below the diagonal"):
        read(forged, nothing(90))
