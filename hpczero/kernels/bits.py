"""Sums over the bits of tensors: a check of equality at the speed of a copy.

Owns: the sum. Must not know: what is compared, ranks.

A sum of integers modulo 2**64 does not depend on the order of summation, as one of fp32 numbers would. It knows NaN and
-0.0 by their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_of_bits(flat: Tensor) -> Tensor:
    """() int64: the memory in words of 64 bits, added up modulo 2**64; what is left over, in words of 8 bits.

    Args:
        flat: of any dtype, contiguous, beginning at a multiple of 8 bytes of its memory.
    """
    data = flat.view(torch.uint8)
    paired = data.numel() // 8 * 8
    total = data[:paired].view(torch.int64).sum()
    return total if paired == data.numel() else total + data[paired:].sum(dtype=torch.int64)
