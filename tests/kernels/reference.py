"""The order of a gradient sum and its roundings, written out by hand in NumPy: every reduction has these bits."""

from __future__ import annotations

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
