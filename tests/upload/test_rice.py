from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.upload.rice import best_width, decode_triangle, encode_triangle


def matrix_of(numbers: list[int], dim: int) -> torch.Tensor:
    upper = torch.zeros(dim, dim, dtype=torch.float64)
    upper[torch.ones(dim, dim, dtype=torch.bool).triu()] = torch.tensor(numbers, dtype=torch.float64)
    return upper


@given(st.integers(1, 6).flatmap(lambda dim: st.lists(st.integers(-(10**9), 10**9) | st.integers(-3, 3),
       min_size=dim * (dim + 1) // 2, max_size=dim * (dim + 1) // 2).map(lambda drawn: (dim, drawn))))  # fmt: skip
def test_numbers_come_back(drawn):
    dim, numbers = drawn
    near = [number % 4099 - 2000 for number in numbers]  # numbers of unlike sizes in a row would fill the memory
    matrix = matrix_of(near, dim)
    assert torch.equal(decode_triangle(encode_triangle(matrix), dim), matrix)


def test_bits_by_hand():
    """-2 is 3 and 1 is 2; with k = 1 their low bits are 1 and 0 and both quotients 1: unary 01 01."""
    words = encode_triangle(matrix_of([-2, 1, 0], 2))
    stream = words.numpy().tobytes()
    assert stream[:5] == bytes([1, 1, 0, 0, 0])
    assert stream[5:10] == bytes([0, 1, 0, 0, 0])
    assert stream[10:13] == bytes([0b01010000, 0b10000000, 0b10000000])


@pytest.mark.parametrize("spread", [3.0, 80.0, 5000.0])
def test_the_code_is_near_the_entropy_of_normal_numbers(spread):
    """A normal distribution has log2(spread sqrt(2 pi e)) bits per number."""
    generator = torch.Generator().manual_seed(0)
    dim = 200
    words = encode_triangle((spread * torch.randn(dim, dim, generator=generator)).round())
    bits = 64 * len(words) / (dim * (dim + 1) / 2)
    entropy = np.log2(spread * np.sqrt(2 * np.pi * np.e))
    assert entropy - 0.02 < bits < entropy + 0.2 + 8 * 7 * dim / (dim * (dim + 1) / 2)


def test_the_width_is_the_best_of_all():
    natural = np.array([0, 1, 5, 9, 100, 40])
    sizes = [int((natural >> width).sum()) + len(natural) * width for width in range(20)]
    assert sizes[best_width(natural)] == min(sizes)


@given(st.binary(min_size=0, max_size=64), st.integers(1, 5))
def test_any_bytes_are_numbers_or_refused(content, dim):
    words = torch.from_numpy(np.frombuffer(content + bytes(-len(content) % 8), "<i8").copy())
    try:
        decoded = decode_triangle(words, dim)
    except ValueError:
        return
    assert torch.isfinite(decoded).all()


def test_a_stream_that_is_cut_or_longer_is_refused():
    words = encode_triangle(torch.arange(36.0).view(6, 6))
    for damaged in (words[:-1], torch.cat([words, words[:1]]), words[:2], words[:0]):
        with pytest.raises(ValueError):
            decode_triangle(damaged, 6)
