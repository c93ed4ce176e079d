"""Digests of bits: another one for other bits and for other places of the same bits, on memory of any length."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpczero.kernels.norm import CHUNK, digest_of_bits


def splitmix(words: list[int]) -> int:
    """The same by whole numbers of Python, as a signed one."""
    total = 0
    for place, word in enumerate(words, 1):
        mixed = (place * 0x9E3779B97F4A7C15 + word) % 2**64
        # a shift of signed numbers, as torch has it
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            signed = mixed - 2**64 if mixed >= 2**63 else mixed
            mixed = (mixed ^ (signed >> shift) % 2**64) * factor % 2**64
        total = (total + mixed) % 2**64
    return total - 2**64 if total >= 2**63 else total


def content(nbytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 800, 8 * CHUNK, 8 * CHUNK + 13, 24 * CHUNK])
def test_it_is_what_whole_numbers_give(nbytes):
    flat = content(nbytes)
    filled = bytes(flat.tolist()) + bytes(-nbytes % 8)
    words = [int.from_bytes(filled[at : at + 8], "little") for at in range(0, len(filled), 8)]
    assert digest_of_bits(flat).item() == splitmix(words)


def test_any_bit_and_any_exchange_of_words_changes_it():
    flat = torch.zeros(1024)
    flat[::2] = 1.0  # few different words, as activations may have
    flat[7], flat[500] = 2.0, 4.0
    found = {digest_of_bits(flat).item()}
    for at in range(0, 1024, 37):
        other = flat.clone()
        other[at] = -other[at]  # a sign, of zeros too
        found.add(digest_of_bits(other).item())
    pairs = flat.view(-1, 2)
    for one, two in ((3, 250), (3, 3 + 256), (250, 251)):
        other = pairs.clone()
        other[[one, two]] = other[[two, one]]
        found.add(digest_of_bits(other.flatten()).item())
    assert len(found) == 1 + 28 + 3


def test_half_numbers_and_nan_count_by_their_bits():
    flat = torch.full((9,), torch.nan, dtype=torch.bfloat16)
    other = flat.clone()
    other.view(torch.int16)[4] ^= 1
    assert torch.isnan(other).all()
    assert digest_of_bits(flat).item() == digest_of_bits(flat.clone()).item()
    assert digest_of_bits(flat).item() != digest_of_bits(other).item()
