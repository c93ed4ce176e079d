"""The initial weights of a GPT, whole parameters or any part of one."""

from __future__ import annotations

import hashlib
import math
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Normal deviates by number: any of them is drawn without those before it.
#
# Deviate ``i`` of a key is a function of (key, i) alone: word ``i`` of a counter-based generator, through the inverse
# of the normal distribution. Only integer operations and single additions and multiplications of IEEE numbers are used,
# no library's log or cos. The bits are therefore the same on every processor, at every vector width and for every cut
# into ranges.
#
#     word    32 bits of Philox 4x64-10, of which NumPy jumps to any block of 8 words
#     g       the word as a signed number, plus 1/2: |g| / 2**32 is the probability of a tail, its sign says which
#     deviate a[k] + b[k] * g, a chord of the inverse distribution; k is sign, exponent and first bits of g
#
# The chords depart from the inverse by at most 1e-6, and the largest deviate is 6.4.
#
# Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC11, sec. 3 (Philox).

BLOCK = 8  # words of 32 bits that one count of the generator makes
CHUNK = 2**15  # deviates that are made together: they stay in a core's cache
BITS = 8  # of the mantissa that choose a chord
_SHIFT = 23 - BITS
# Knots are multiples of its inverse, so that the last bit of a library's log changes none
_ROUNDED = 2.0**30
_HALF = np.float32(0.5)

Floats = npt.NDArray[np.float32]


class Deviates:
    """The deviates of one key."""

    def __init__(self, key: str) -> None:
        """``key``: any text; another one gives other deviates, independent of these."""
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        self._generator = np.random.Philox(key=int.from_bytes(digest, "little"))
        self._block = 0  # the next that the generator makes
        self._starts, self._slopes = chords()
        self._g, self._a, self._b = (np.empty(CHUNK, np.float32) for _ in range(3))
        self._chord = np.empty(CHUNK, np.intp)
        self._made = torch.from_numpy(self._a)

    def fill(self, out: Tensor, start: int, std: float) -> None:
        """Fill ``out``, (n,) fp32 on the CPU, with ``std``, in fp32, times deviates ``start``, ``start + 1``, ..."""
        with torch.no_grad():
            for begin in range(0, len(out), CHUNK):
                part = out[begin : begin + CHUNK]
                self._make(start + begin, len(part))
                torch.mul(self._made[: len(part)], std, out=part)

    def _make(self, start: int, count: int) -> None:
        """Make ``count`` deviates, at most CHUNK, in the first elements of ``_a``."""
        g, a, b, chord = self._g[:count], self._a[:count], self._b[:count], self._chord[:count]
        np.copyto(g, self._words(start, count), casting="unsafe")
        np.add(g, _HALF, out=g)
        np.right_shift(g.view(np.uint32), _SHIFT, out=chord, casting="unsafe")
        # "wrap" needs no second pass for the check; no index is out of range.
        np.take(self._starts, chord, out=a, mode="wrap")
        np.take(self._slopes, chord, out=b, mode="wrap")
        # Two operations, never one that rounds once: processors differ in whether they have it.
        np.multiply(b, g, out=b)
        np.add(a, b, out=a)

    def _words(self, start: int, count: int) -> npt.NDArray[np.int32]:
        first, stop = start // BLOCK, -(-(start + count) // BLOCK)
        if first != self._block:
            self._generator.advance(first - self._block)
        self._block = stop
        raw = self._generator.random_raw((stop - first) * BLOCK // 2)
        words: npt.NDArray[np.int32] = raw.astype("<u8", copy=False).view("<i4")
        skipped = start - first * BLOCK
        return words[skipped : skipped + count]


@cache
def chords() -> tuple[Floats, Floats]:
    """Value at 0 and slope of each chord, by the first bits of g as an fp32 number: sign, exponent, BITS of mantissa.

    Knots are where these bits change. A table has room for all of them, and values only for 1/2 <= |g| <= 2**31.
    """
    least, most = (int(np.float32(x).view(np.uint32)) >> _SHIFT for x in (0.5, 2.0**31))
    codes = np.arange(least, most + 1, dtype=np.uint32)
    knots = (codes << np.uint32(_SHIFT)).view(np.float32).astype(np.float64)
    values = np.round(quantiles(knots) * _ROUNDED) / _ROUNDED
    slopes = (values[1:] - values[:-1]) / (knots[1:] - knots[:-1])
    starts = values[:-1] - slopes * knots[:-1]
    # Of |g| = 2**31, the largest code, the deviate is 0.
    a, b = (np.zeros(2 ** (32 - _SHIFT), np.float32) for _ in range(2))
    negative = codes[:-1] | np.uint32(1 << (31 - _SHIFT))
    a[codes[:-1]], a[negative] = starts, -starts
    b[codes[:-1]], b[negative] = slopes, slopes
    return a, b


def quantiles(tails: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Deviates above which the normal distribution has the probabilities ``tails`` / 2**32."""
    inverse = NormalDist().inv_cdf
    return np.array([-inverse(tail / 2**32) for tail in tails.tolist()])


class InitialWeights:
    """What the parameters of a GPT begin with; for ``zeroify(initialize=...)``. Nothing here is collective.

    An element depends on (seed, name of the parameter, its place there) alone: not on the order of calls, on who holds
    it, or on the processor. Every number of ranks starts from the same weights, and each rank draws its own part.

    Source: Radford et al., GPT-2 (2019), sec. 2.3, and its code for the 0.02: normal(0, 0.02), residual projections
    scaled by 1/sqrt(number of residual layers), which is 2 per block.
    """

    def __init__(self, *, seed: int, layers: int) -> None:
        self._seed, self._layers = seed, layers
        self._latest: tuple[str, Deviates] | None = None

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place, fp32 on the CPU, contiguous.

        Raises:
            ValueError: the tensor is not fp32 on the CPU, or not contiguous.
        """
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r}: got {tensor.dtype} on {tensor.device}, expected torch.float32 on cpu"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"parameter {name!r}: got the strides {tensor.stride()}, expected a contiguous tensor"
            )
        with torch.no_grad():
            self.fill_range(name, tuple(tensor.shape), 0, tensor.view(-1))

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        """Fill ``values`` with the elements from ``start`` on of one parameter; takes time for these alone.

        Args:
            name: as in ``named_parameters()``.
            shape: of the whole parameter.
            start: first element, counted in the whole parameter.
            values: (n,) fp32 on the CPU.
        """
        if name.endswith("norm.weight"):
            values.fill_(1.0)
        elif name.endswith("bias"):
            values.zero_()
        else:
            residual = name.endswith("projection.weight")
            std = 0.02 / math.sqrt(2 * self._layers) if residual else 0.02
            self._deviates(name).fill(values, start, std)

    def _deviates(self, name: str) -> Deviates:
        """Those of one parameter. A part of it may be asked for in many ranges, one after the other."""
        if self._latest is None or self._latest[0] != name:
            self._latest = name, Deviates(f"{self._seed}/{name}")
        return self._latest[1]
