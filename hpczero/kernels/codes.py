"""Block-wise codes of few bits: blocks of values as levels between -1 and 1 times one scale.

    scale = largest magnitude of the block      value = level[code] * scale

Codes are the nearest ones, or drawn: then the expected value is the value itself, whatever its block.

[Note: Nearest codes are stable] The largest level is exactly 1. Therefore the scale of decoded values is the scale that
they were decoded with, and ``encode(decode(x)) == x`` bit for bit.

``int8`` and ``nf4`` are for values at rest, with fp32 scales. ``sent8`` and ``sent4`` are for values that are sent:
their scales are bf16, rounded up, and so up to 1/128 larger; fp32 scales would be 6 and 11 % of all bytes. Blocks
without an element above 1e-36 may be off by more than that.

A block with a value that is not finite decodes to NaN as a whole, so an overflow is seen wherever it came from. Zeros
stay zeros. Every operation here is exact or rounded once as IEEE 754 says, so hosts and devices make the same codes.

Source: Dettmers et al., QLoRA, NeurIPS 2023, sec. 3 and app. E (the 16 levels); Gupta et al., Deep Learning with
Limited Numerical Precision, ICML 2015, sec. 3 (stochastic rounding).
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

CHUNK_NUMEL = 2**18  # elements that are looked at together
BLOCK = 64  # elements that share a scale
BITS = {"int8": 8, "nf4": 4, "sent8": 8, "sent4": 4}
SHORT_SCALES = ("sent8", "sent4")
LARGEST_BF16 = torch.finfo(
    torch.bfloat16
).max  # a block with more in it comes back up to 1/256 smaller
EVEN_LEVELS = {"int8": 127, "sent8": 127, "sent4": 7}  # codes -n..n
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Multipliers of a 32-bit mix (Wellons, Prospecting for Hash Functions, 2018: lowbias32), as signed numbers.
MIX = (0x7FEB352D, 0x846CA68B - 2**32)

Key = tuple[int, int]


def key_of(text: str) -> Key:
    """Two signed numbers of 32 bits that are drawn by ``text``; equal on every machine."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    low, high = (int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:]))
    return low, high


def encode(
    values: Tensor, out: Tensor, form: str, *, key: Key | None = None, first: int = 0
) -> None:
    """Set ``out`` to the codes of ``values``, with their scales behind them.

    Args:
        values: (n,) fp32, n a multiple of BLOCK.
        out: (n * bits / 32 + n / BLOCK,) fp32 words, whose bits hold the codes; with SHORT_SCALES half as many scales.
        form: a name of BITS: all but ``nf4`` have even levels, ``nf4`` has nearest codes only.
        key: draws codes: each is the level below or above, in proportion. None takes the nearest.
        first: number of the first element, by which codes are drawn: equal keys and numbers draw equally.
    """
    numel, block, bits = values.numel(), BLOCK, BITS[form]
    codes, scales = _parts(out.view(1, -1), numel, form)
    for begin in range(0, numel, CHUNK_NUMEL):
        end = min(begin + CHUNK_NUMEL, numel)
        blocks = values[begin:end].view(-1, block)
        scale = blocks.abs().amax(1)
        if form in SHORT_SCALES:
            scale = _rounded_up(scale)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        level = (blocks / torch.where(scale == 0, 1.0, scale)[:, None]).nan_to_num_().view(-1)
        if form in EVEN_LEVELS:
            most = EVEN_LEVELS[form]
            level.mul_(most)
            if key is None:
                level.round_()
            else:
                level.add_(_drawn(first + begin, end - begin, key, values.device)).floor_()
                level.clamp_(-most, most)  # 127 * 1 + u may be rounded to 128
            made = level.to(torch.int8).view(torch.uint8)
        else:
            assert key is None, "nearest only"
            made = torch.bucketize(level, _middles(values.device)).to(torch.uint8)
        if bits == 4:
            made = made[0::2] << 4 | (made[1::2] & 15)
        codes[0, begin * bits // 8 : end * bits // 8].copy_(made)
        scales[0, begin // block : end // block].copy_(scale)


def decode(words: Tensor, out: Tensor, form: str) -> None:
    """Set ``out`` to the values of some shards, computed in fp32 and then rounded to its dtype.

    Args:
        words: (shards, w), as ``encode`` makes them of each shard; what follows is not looked at.
        out: (shards, n) of any floating dtype.
        form: as of ``encode``.
    """
    shards, numel = out.shape
    block, bits = BLOCK, BITS[form]
    if not numel:
        return
    codes, scales = _parts(words, numel, form)
    rows = max(CHUNK_NUMEL // numel, 1)
    for first in range(0, shards, rows):
        some = slice(first, min(first + rows, shards))
        for begin in range(0, numel, CHUNK_NUMEL):
            end = min(begin + CHUNK_NUMEL, numel)
            part = codes[some, begin * bits // 8 : end * bits // 8]
            scale = scales[some, begin // block : end // block, None]
            level = _levels(part, form)
            values = level.reshape(part.shape[0], -1, block).mul_(scale)
            out[some, begin:end].copy_(values.view(part.shape[0], -1))


def _drawn(first: int, count: int, key: Key, device: torch.device) -> Tensor:
    """(count,) fp32 of 24 random bits, 0 included and 1 not, for elements ``first`` and on."""
    signed = (first + 2**31) % 2**32 - 2**31  # of 32 bits, which wrap here and in ``+``
    mixed = _counted(device)[:count] + signed
    mixed = mixed ^ key[0]  # a new tensor: what follows writes to it
    mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).mul_(MIX[0]).bitwise_xor_(key[1])
    mixed.bitwise_xor_((mixed >> 15).bitwise_and_(0x1FFFF)).mul_(MIX[1])
    mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF))
    return mixed.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


@cache
def _counted(device: torch.device) -> Tensor:
    return torch.arange(CHUNK_NUMEL, device=device, dtype=torch.int32)


def _levels(codes: Tensor, form: str) -> Tensor:
    """(shards, codes) or (shards, codes, 2) fp32."""
    if form == "nf4":
        return _pairs(codes.device)[codes.int()]
    numbers = codes.view(torch.int8)  # two's complement
    if BITS[form] == 4:
        pairs = numbers.new_empty((*codes.shape, 2), dtype=torch.float32)
        pairs[..., 0], pairs[..., 1] = numbers >> 4, (numbers << 4) >> 4
        numbers = pairs
    return numbers.float().div_(EVEN_LEVELS[form])


def _parts(words: Tensor, numel: int, form: str) -> tuple[Tensor, Tensor]:
    """Codes (shards, bytes) uint8 and scales (shards, blocks) of (shards, w) words."""
    code_words = numel * BITS[form] // 32
    scales = words[:, code_words:]
    if form in SHORT_SCALES:
        scales = words.view(torch.bfloat16)[:, 2 * code_words :]
    return words.view(torch.uint8)[:, : 4 * code_words], scales


def _rounded_up(scale: Tensor) -> Tensor:
    """The next bf16 from each fp32 upwards, as fp32; no value is below 0."""
    near = scale.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)
    up = torch.where(near.float() < scale, above, near).float()
    return torch.where(scale.isfinite(), up.clamp(max=LARGEST_BF16), scale)


@cache
def _middles(device: torch.device) -> Tensor:
    levels = torch.tensor(NF4, device=device, dtype=torch.float32)
    return (levels[1:] + levels[:-1]) / 2


@cache
def _pairs(device: torch.device) -> Tensor:
    """(256, 2): the two levels of each byte."""
    levels = torch.tensor(NF4, device=device, dtype=torch.float32)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)
