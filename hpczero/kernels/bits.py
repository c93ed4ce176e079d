"""Sums over the bits of tensors: a check of equality at the speed of a copy.

Owns: the sum. Must not know: what is compared, ranks.

A sum of integers modulo 2**64 does not depend on the order of summation; a sum of fp32 numbers does. It tells NaN and
-0.0 apart from others by their bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
