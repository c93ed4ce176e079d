"""The order of a gradient sum and its roundings, written out by hand in NumPy: every reduction has these bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

Floats = npt.NDArray[np.float32]

# Balanced in order, the larger half first: written out, not computed.
IN_ORDER: dict[int, Callable[..., Floats]] = {
    1: lambda a: a,
    2: lambda a, b: a + b,
    3: lambda a, b, c: (a + b) + c,
    4: lambda a, b, c, d: (a + b) + (c + d),
    5: lambda a, b, c, d, e: ((a + b) + c) + (d + e),
    6: lambda a, b, c, d, e, f: ((a + b) + c) + ((d + e) + f),
    7: lambda a, b, c, d, e, f, g: ((a + b) + (c + d)) + ((e + f) + g),
    8: lambda a, b, c, d, e, f, g, h: ((a + b) + (c + d)) + ((e + f) + (g + h)),
}


def exact(blocks: Sequence[Tensor]) -> list[Floats]:
    return [block.float().numpy() for block in blocks]


def to_bf16_and_back(values: Floats) -> Floats:
    """Round to nearest even at the 16th bit, on the bits themselves."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


def drawn_and_decoded(values: Floats, most: int, text: str, first: int) -> Floats:
    """What codes of levels -most..most say that ``text`` draws for blocks of 64 values, from element ``first`` on."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    low, high = np.frombuffer(digest, "<u4")
    mixed = np.arange(first, first + len(values), dtype=np.uint32) ^ low
    mixed ^= mixed >> np.uint32(16)
    mixed = (mixed * np.uint32(0x7FEB352D)) ^ high
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0x846CA68B)
    mixed ^= mixed >> np.uint32(16)
    drawn = (mixed & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)
    blocks = values.reshape(-1, 64)
    scale = np.abs(blocks).max(1, keepdims=True, initial=0)
    if scale.size:  # up to the next 16 bits
        scale = ((scale.view(np.uint32) + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        scale = np.minimum(scale, np.float32(2.0**127 * (2 - 2.0**-7)))
    level = blocks / np.where(scale == 0, np.float32(1), scale) * np.float32(most)
    codes = np.clip(np.floor(level + drawn.reshape(-1, 64)), -most, most).astype(np.float32)
    return np.float32((codes + np.float32(0)) / np.float32(most) * scale).reshape(-1)
