"""Sums over the bits of tensors: a check of equality at the speed of a copy.

Owns: the sum. Must not know: what is compared, ranks.

A sum of integers modulo 2**64 does not depend on the order of summation; a sum of fp32 numbers does. It tells NaN and
-0.0 apart from others by their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 2**15  # words of 64 bits that are looked at together: they stay in a core's cache
# Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA14: splitmix64, as signed numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def sum_of_bits(flat: Tensor) -> Tensor:
    """Sum of the tensor's memory as words of 64 bits, modulo 2**64; a remainder is added as words of 8 bits.

    Args:
        flat: of any dtype, contiguous; its first byte lies at a multiple of 8 bytes of its storage.

    Returns:
        () int64.
    """
    data = flat.view(torch.uint8)
    paired = data.numel() // 8 * 8
    total = data[:paired].view(torch.int64).sum()
    return total if paired == data.numel() else total + data[paired:].sum(dtype=torch.int64)


def digest_of_bits(flat: Tensor) -> Tensor:
    """A number that another order of the same words changes too; slower than ``sum_of_bits`` by several passes.

    Each word is mixed with its place, then all are added. It is no cryptographic digest.

    Args:
        flat: as of ``sum_of_bits``, on any device.

    Returns:
        () int64.
    """
    data = flat.view(torch.uint8)
    paired = data.numel() // 8 * 8
    words = data[:paired].view(torch.int64)
    if paired < data.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - paired] = data[paired:]
        total = _mixed(rest.view(torch.int64), paired // 8)
    else:
        total = torch.zeros((), dtype=torch.int64, device=data.device)
    for begin in range(0, paired // 8, CHUNK):
        total = total + _mixed(words[begin : begin + CHUNK], begin)
    return total


def _mixed(words: Tensor, begin: int) -> Tensor:
    places = torch.arange(begin + 1, begin + 1 + words.numel(), device=words.device)
    mixed = places.mul_(_GOLDEN).add_(words)
    mixed ^= mixed >> 30
    mixed *= _FIRST
    mixed ^= mixed >> 27
    mixed *= _SECOND
    mixed ^= mixed >> 31
    return mixed.sum()
