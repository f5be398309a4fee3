"""Whole numbers of twelve bits, four of them in three words of sixteen bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def twelve_bit_size(numbers: int) -> int:
    """16-bit words that hold so many numbers of 12 bits"""
    return 3 * -(-numbers // 4)


def to_twelve_bits(values: Tensor) -> Tensor:
    """Whole numbers from -2048 to 2047 `(N,)` as int16 words `(3 ceil(N / 4),)`; what fills up the last is 0."""
    whole = F.pad(values.to(torch.int32), (0, -len(values) % 4)) + 2048
    a, b, c, d = whole.view(-1, 4).unbind(1)
    words = torch.stack([a | b << 12, b >> 4 | c << 8, c >> 8 | d << 4], 1) & 0xFFFF
    return (words - (words >> 15 << 16)).to(torch.int16).flatten()


def from_twelve_bits(words: Tensor, numbers: int) -> Tensor:
    """The numbers of `to_twelve_bits`, int32 `(numbers,)`"""
    x, y, z = (words.to(torch.int32) & 0xFFFF).view(-1, 3).unbind(1)
    whole = torch.stack([x, x >> 12 | y << 4, y >> 8 | z << 8, z >> 4], 1) & 0xFFF
    return whole.flatten()[:numbers] - 2048
