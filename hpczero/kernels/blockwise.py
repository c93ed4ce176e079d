"""Block-wise codes of 8 or 4 bits: blocks of values as levels between -1 and 1 times one fp32 scale.

Owns: the arithmetic. Must not know: units, ranks, where codes rest.

    scale = largest magnitude of the block      value = level[code] * scale

The largest level is exactly 1. Therefore the scale of decoded values is the scale that they were decoded with, and
``encode(decode(x)) == x`` bit for bit. A block with a value that is not finite decodes to NaN as a whole.

Source: Dettmers et al., QLoRA, NeurIPS 2023, sec. 3 and app. E (the 16 levels).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CHUNK_NUMEL = 2**18  # elements that are looked at together
LEVELS_8 = 127
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def encode(values: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """Set ``out`` to the codes of ``values``, with their scales behind them.

    Args:
        values: (n,) fp32, n a multiple of ``block``.
        out: (n * bits / 32 + n / block,) fp32 words, whose bits hold the codes.
        bits: 8 or 4.
        block: elements that share a scale, an even number.
    """
    numel = values.numel()
    codes, scales = _parts(out.view(1, -1), numel, bits)
    for begin in range(0, numel, CHUNK_NUMEL):
        end = min(begin + CHUNK_NUMEL, numel)
        blocks = values[begin:end].view(-1, block)
        scale = blocks.abs().amax(1)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        level = (blocks / torch.where(scale == 0, 1.0, scale)[:, None]).nan_to_num_().view(-1)
        if bits == 8:
            made = level.mul_(LEVELS_8).round_().to(torch.int8).view(torch.uint8)
        else:
            made = torch.bucketize(level, _middles(values.device)).to(torch.uint8)
            made = made[0::2] << 4 | made[1::2]
        codes[0, begin * bits // 8 : end * bits // 8].copy_(made)
        scales[0, begin // block : end // block].copy_(scale)


def decode(words: Tensor, out: Tensor, *, bits: int, block: int) -> None:
    """Set ``out`` to the values of some shards, computed in fp32 and then rounded to its dtype.

    Args:
        words: (shards, w), as ``encode`` makes them of each shard.
        out: (shards, n) of any floating dtype.
        bits: 8 or 4.
        block: elements that share a scale.
    """
    shards, numel = out.shape
    if not numel:
        return
    codes, scales = _parts(words, numel, bits)
    rows = max(CHUNK_NUMEL // numel, 1)
    for first in range(0, shards, rows):
        some = slice(first, min(first + rows, shards))
        for begin in range(0, numel, CHUNK_NUMEL):
            end = min(begin + CHUNK_NUMEL, numel)
            part = codes[some, begin * bits // 8 : end * bits // 8]
            scale = scales[some, begin // block : end // block, None]
            level = _levels(part, bits)
            values = level.reshape(part.shape[0], -1, block).mul_(scale)
            out[some, begin:end].copy_(values.view(part.shape[0], -1))


def _levels(codes: Tensor, bits: int) -> Tensor:
    """(shards, codes) or (shards, codes, 2) fp32."""
    if bits == 8:
        return codes.view(torch.int8).float().div_(LEVELS_8)
    return _pairs(codes.device)[codes.int()]


def _parts(words: Tensor, numel: int, bits: int) -> tuple[Tensor, Tensor]:
    """Codes (shards, bytes) uint8 and scales (shards, blocks) fp32 of (shards, w) words."""
    code_words = numel * bits // 32
    return words.view(torch.uint8)[:, : 4 * code_words], words[:, code_words:]


@cache
def _middles(device: torch.device) -> Tensor:
    levels = torch.tensor(NF4, device=device, dtype=torch.float32)
    return (levels[1:] + levels[:-1]) / 2


@cache
def _pairs(device: torch.device) -> Tensor:
    """(256, 2): the two levels of each byte."""
    levels = torch.tensor(NF4, device=device, dtype=torch.float32)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)
