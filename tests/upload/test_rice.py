from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.upload import rice
from oneflare.upload.rice import (
    best_widths,
    decode_into,
    decode_rows,
    decode_triangle,
    encode_rows,
    encode_triangle,
    rows_bits,
)


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


def test_each_row_has_the_width_that_is_the_best_of_all():
    rows = np.array([0, 1, 5, 9, 100, 40]), np.array([0, 0, 1]), np.array([700, 900])
    widths = best_widths(np.concatenate(rows), np.array([0, 6, 9]))
    for natural, width in zip(rows, widths, strict=True):
        sizes = [int((natural >> other).sum()) + len(natural) * other for other in range(20)]
        assert sizes[width] == min(sizes)


def plain_code(rows):
    """Oracle: the code as the module's docstring says it, in Python's whole numbers and strings of bits."""
    headers, body = b"", b""
    for row in rows:
        natural = [2 * v if v >= 0 else -2 * v - 1 for v in row]
        guess = int(np.log2(max(sum(natural) / len(natural), 1.0)))
        near = range(max(0, guess - 1), guess + 2)
        width = min(near, key=lambda k: sum(u >> k for u in natural) + len(natural) * k)
        unary = "".join("0" * (u >> width) + "1" for u in natural)
        low = "".join(f"{u & (1 << width) - 1:0{width}b}" for u in natural) if width else ""
        packed = [bytes(int(f"{bits[at : at + 8]:0<8}", 2) for at in range(0, len(bits), 8)) for bits in (unary, low)]
        headers += bytes([width]) + len(packed[0]).to_bytes(4, "little")
        body += packed[0] + packed[1]
    return headers + body


@pytest.mark.parametrize("at_a_time", [1, 50, 1 << 15])
@pytest.mark.parametrize("spread", [0.3, 5.0, 90.0, 3000.0])
def test_rows_of_any_length_are_in_the_code_that_is_stated(at_a_time, spread, monkeypatch):
    monkeypatch.setattr(rice, "AT_A_TIME", at_a_time)
    generator = torch.Generator().manual_seed(1)
    rows = [(spread * torch.randn(1 + place % 19, generator=generator)).round() for place in range(40)]
    words = encode_rows(rows)
    expected = plain_code([[int(value) for value in row] for row in rows])
    assert words.numpy().tobytes()[: len(expected)] == expected
    assert not any(words.numpy().tobytes()[len(expected) :])
    found = list(decode_rows(words, [len(row) for row in rows]))
    assert all(np.array_equal(one, other.numpy()) for one, other in zip(found, rows, strict=True))
    bits = [8 * len(plain_code([[int(value) for value in row]])) - 40 for row in rows]
    assert sum(bits) - 15 * len(rows) < rows_bits(rows) <= sum(bits)


def test_a_matrix_is_overwritten_above_its_diagonal_alone():
    numbers = torch.arange(25.0).view(5, 5)
    target = torch.full((5, 5), -1.0)
    decode_into(target, encode_triangle(numbers))
    assert torch.equal(target.triu(), numbers.triu())
    assert torch.equal(target.tril(-1), torch.full((5, 5), -1.0).tril(-1))


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


@pytest.mark.parametrize("at_a_time", [1, 1 << 15])
def test_numbers_never_move_from_one_row_to_the_next(at_a_time, monkeypatch):
    """The unary parts of two rows with one number more and one number less are refused, although their sum is right."""
    monkeypatch.setattr(rice, "AT_A_TIME", at_a_time)
    stream = bytearray(encode_rows([torch.zeros(4), torch.zeros(4)]).numpy().tobytes())
    stream[10:12] = bytes([0b11111000, 0b11100000])
    with pytest.raises(ValueError, match="row 0 holds 5 numbers instead of 4"):
        list(decode_rows(torch.from_numpy(np.frombuffer(bytes(stream), "<i8").copy()), [4, 4]))
    stream[10:12] = bytes([0b11110000, 0b00000000])
    with pytest.raises(ValueError, match="row 1 holds 0 numbers"):
        list(decode_rows(torch.from_numpy(np.frombuffer(bytes(stream), "<i8").copy()), [4, 4]))
