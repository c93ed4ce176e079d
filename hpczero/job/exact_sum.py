"""Sums of a few numbers over many ranks, rounded once: the same bits in whatever order they are added.

Owns: numbers as digits that any reduction may add. Must not know: MPI, what the numbers are.

A finite double is a whole number times 2^-1074. Here it is cut into digits of 32 bits, each in an integer of 64. Up to
2^31 ranks may add such digits, in any order and by any algorithm, and nothing is rounded. The sum is rounded when it
becomes a double again, so it is that of ``math.fsum`` over all ranks' numbers. What travels does not grow with the
number of ranks; a list of all numbers does.

    digits, little end first (66) | how many are NaN, infinity, minus infinity (3)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

WIDTH = 32
LEAST = 1074  # the smallest double above 0 is 2^-LEAST
DIGITS = -(-(1024 + LEAST) // WIDTH)
LENGTH = DIGITS + 3
MOST_RANKS = 2 ** (63 - WIDTH)

Digits = npt.NDArray[np.int64]


def digits_of(values: Sequence[float]) -> Digits:
    """``values`` as rows to add: (len(values), LENGTH) int64."""
    rows = np.zeros((len(values), LENGTH), dtype=np.int64)
    for row, value in zip(rows, values, strict=True):
        if not math.isfinite(value):
            row[DIGITS + (0 if math.isnan(value) else 1 if value > 0 else 2)] = 1
            continue
        whole, denominator = value.as_integer_ratio()  # the latter is a power of two
        shifted = abs(whole) << (LEAST + 1 - denominator.bit_length())
        row[:DIGITS] = np.frombuffer(shifted.to_bytes(DIGITS * WIDTH // 8, "little"), dtype="<u4")
        if whole < 0:
            row[:DIGITS] *= -1
    return rows


def values_of(rows: Digits) -> list[float]:
    """The sums that added ``rows`` stand for, each rounded to the nearest double; infinite where none is large enough.

    Args:
        rows: (n, LENGTH), sums of what ``digits_of`` gave on at most MOST_RANKS ranks.
    """
    found = []
    for *digits, nans, above, below in rows.tolist():
        whole = sum(digit << WIDTH * place for place, digit in enumerate(digits) if digit)
        if nans or (above and below):
            found.append(math.nan)
        elif above or below:
            found.append(math.inf if above else -math.inf)
        else:
            found.append(_rounded(whole))
    return found


def _rounded(whole: int) -> float:
    try:
        return whole / (1 << LEAST)  # of whole numbers: rounded once, however long they are
    except OverflowError:
        return math.inf if whole > 0 else -math.inf
