"""Norms of gradients, right to fp64 rounding whatever their size and however they are cut into shards.

A sum of squares in fp32 loses what is small against it: 6e-4 of the norm at 10 million elements over 24 binades, and
another part of it for every cut into shards. The square of an fp32 number is exact in fp64, where it neither overflows
nor vanishes. Elements are therefore widened block by block, into one small buffer, and multiplied there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

# Sums over the bits of tensors: a check of equality at the speed of a copy.
#
# A sum of integers modulo 2**64 does not depend on the order of summation; a sum of fp32 numbers does. It tells NaN and
# -0.0 apart from others by their bits.

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


def digest_of_bits(flat: Tensor, first: int = 0) -> Tensor:
    """A number that another order of the same words changes too; slower than ``sum_of_bits`` by several passes.

    Each word is mixed with its place, then all are added: digests of parts add up, modulo 2**64, to that of the whole.
    It is no cryptographic digest.

    Args:
        flat: as of ``sum_of_bits``, on any device.
        first: place of its first word of 64 bits in what it is a part of.

    Returns:
        () int64.
    """
    data = flat.view(torch.uint8)
    paired = data.numel() // 8 * 8
    words = data[:paired].view(torch.int64)
    if paired < data.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
        rest[: data.numel() - paired] = data[paired:]
        total = _mixed(rest.view(torch.int64), first + paired // 8)
    else:
        total = torch.zeros((), dtype=torch.int64, device=data.device)
    for begin in range(0, paired // 8, CHUNK):
        total = total + _mixed(words[begin : begin + CHUNK], first + begin)
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


# Elements widened at a time: 2 MiB on the host, which stays in the cache and is more than one thread's share of a
# parallel copy; on devices enough to keep one busy (32 MiB).
HOST_BLOCK = 2**18
DEVICE_BLOCK = 2**22


def numbers_of(sums: Sequence[Tensor]) -> list[float]:
    """Of 0-dimensional tensors of one dtype on one device; one transfer, none for nothing."""
    found: list[float] = torch.stack(list(sums)).tolist() if sums else []
    return found


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    """``sum(x**2)`` over all elements in fp64; infinite or NaN as they are.

    Args:
        tensors: flat, fp32, all on one device. One transfer from it, however many they are.
    """
    return math.fsum(squares(tensors))


def squares(tensors: Iterable[Tensor]) -> list[float]:
    """What ``sum_of_squares`` sums up, by ``math.fsum``: one number for each block."""
    return numbers_of(square_sums(tensors))


def square_sums(tensors: Iterable[Tensor]) -> list[Tensor]:
    """``squares`` where they are computed: 0-dimensional, fp64, not waited for."""
    held = [tensor for tensor in tensors if tensor.numel()]
    if not held:
        return []
    device = held[0].device
    block = HOST_BLOCK if device.type == "cpu" else DEVICE_BLOCK
    longest = min(block, max(tensor.numel() for tensor in held))
    wide = torch.empty(longest, dtype=torch.float64, device=device)
    sums = []
    for tensor in held:
        flat = tensor.detach()
        for part in torch.split(flat, block) if len(flat) > block else (flat,):
            # linalg.vector_norm(dtype=float64) does the same, 50 times slower on the host (torch 2.13).
            widened = wide[: part.numel()].copy_(part)
            sums.append(torch.dot(widened, widened))
    return sums


# The exact sum of squares: order and cuts play no part, so neither do ranks.
#
# Let 2^e be more than the square of the largest element of all ranks. Each square, exact in fp64, is rounded to a
# multiple of 2^(e - 40), and what is left of it to one of 2^(e - 80). To round is to add 1.5 * 2^(e + 12), whose last
# digit is that unit: the bits of the sum, read as a whole number, then are those of the constant and the multiple.
# Whole numbers add up in any order. Each of n elements loses at most 2^(e - 81).
#
# Source: Demmel and Nguyen, Parallel Reproducible Summation, IEEE Trans. Computers 64 (2015), sec. 3, with two levels;
# there multiples are added up as floating-point numbers.

_LEVEL = 40  # bits
_MANTISSA = 52
EXACT_BLOCK = 2**16  # elements of the host; 2**(63 - _LEVEL) at most, also on devices
_HALF = 2**32  # of the sum of a block, in units
EXACT_WORDS = 4


def exact_square_words(tensors: Iterable[Tensor], largest: float) -> list[Tensor]:
    """Four numbers that add up to ``sum(x**2)``, or none for nothing: 0-dimensional, fp64, not waited for.

    The words of any cut of the same elements have the same sum, where it is rounded once (``math.fsum``); its relative
    error is at most n * 2^-79 and that rounding. Up to 2^36 elements.

    Args:
        tensors: flat, fp32, all on one device.
        largest: of all elements' magnitudes, on all ranks; finite.
    """
    held = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not held:
        return []
    _, exponent = math.frexp(largest * largest)
    device = held[0].device
    units = [2.0 ** (exponent - level * _LEVEL) for level in (1, 2)]
    high, low = (
        torch.full((), 1.5 * 2.0**_MANTISSA * unit, device=device, dtype=torch.float64)
        for unit in units
    )
    block = EXACT_BLOCK if device.type == "cpu" else DEVICE_BLOCK
    longest = min(block, max(tensor.numel() for tensor in held))
    buffers = torch.empty(2, longest, device=device, dtype=torch.float64)
    upper: list[Tensor] = []
    lower: list[Tensor] = []
    parts = [part for tensor in held for part in torch.split(tensor, block)]
    for part in parts:
        wide, sums = buffers[0, : len(part)], buffers[1, : len(part)]
        whole = sums.view(torch.int64)
        wide.copy_(part)
        torch.addcmul(high, wide, wide, out=sums)
        upper.append(whole.sum())
        sums.sub_(high)
        torch.addcmul(sums, wide, wide, value=-1, out=sums)
        torch.sub(low, sums, out=sums)
        lower.append(whole.sum())
    counts = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=device)
    words = []
    for found, constant, unit in zip((upper, lower), (high, low), units, strict=True):
        totals = torch.stack(found) - counts * constant.view(torch.int64)
        halves = totals.div(_HALF, rounding_mode="floor"), totals.remainder(_HALF)
        words += [
            half.sum().double() * scale
            for half, scale in zip(halves, (_HALF * unit, unit), strict=True)
        ]
    return words


def largest_magnitude(
    tensors: Iterable[Tensor], read: Callable[[Sequence[Tensor]], list[float]] = numbers_of
) -> float:
    """``max(abs(x))`` over all elements, in which NaN wins; 0 for nothing. One transfer, by ``read``."""
    held = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not held:
        return 0.0
    # linalg.vector_norm(t, inf) is 17 times slower on the host (torch 2.13).
    ends = [end for tensor in held for end in torch.aminmax(tensor)]
    return largest([abs(end) for end in read(ends)])


def sum_of_powers(tensors: Iterable[Tensor], order: float) -> float:
    """``sum(abs(x)**order)`` over all elements in fp64."""
    held = [tensor.detach().double() for tensor in tensors if tensor.numel()]
    return math.fsum(float(tensor.abs_().pow_(order).sum()) for tensor in held)


def largest(values: Sequence[float]) -> float:
    """Maximum in which NaN wins; 0 for nothing."""
    return math.nan if any(math.isnan(v) for v in values) else max(values, default=0.0)
