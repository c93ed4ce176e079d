"""Blocks: numbers in 8 bits, each block of 64 with a scale of its own.

Owns: two maps between fp32 and codes. Must not know: optimizers, shards.

    signed     x = s f |f|     f = code / 127, code -127 ... 127     for first moments
    unsigned   x = s f^4       f = code / 255, code 0 ... 255        for second moments, squares of such numbers

``s`` is the largest magnitude of a block, which is kept exactly. A code that was decoded is encoded as itself, so what
is decoded, stored in fp32 and encoded again is the same. 1 + 4/64 bytes for each number.

Source: Dettmers et al., 8-bit optimizers via block-wise quantization, ICLR 2022, sec. 2; the maps are others.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64


class Signed:
    """Of both signs, with steps that are finer near 0."""

    dtype = torch.int8

    @staticmethod
    def encode(values: Tensor) -> tuple[Tensor, Tensor]:
        """(numel,) fp32 in; (numel,) int8 codes and (numel / 64,) fp32 scales. ``numel`` is a multiple of 64."""
        blocks = values.view(-1, BLOCK)
        scales = _scales(blocks)
        part = _parts(blocks, scales)
        codes = part.abs().sqrt().mul_(127).round_().mul_(part.sign())
        return codes.to(torch.int8).view(-1), scales

    @staticmethod
    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        """What ``encode`` gives, in; (numel,) fp32."""
        part = codes.view(-1, BLOCK).float().div_(127)
        return (part * part.abs()).mul_(scales[:, None]).view(-1)


class Unsigned:
    """Of 0 and more; none that is above 0 becomes 0, since a root of it divides."""

    dtype = torch.uint8

    @staticmethod
    def encode(values: Tensor) -> tuple[Tensor, Tensor]:
        """(numel,) fp32 in; (numel,) uint8 codes and (numel / 64,) fp32 scales. ``numel`` is a multiple of 64."""
        blocks = values.view(-1, BLOCK)
        scales = _scales(blocks)
        codes = _parts(blocks, scales).sqrt_().sqrt_().mul_(255).round_()
        codes = torch.where(blocks > 0, codes.clamp(min=1), codes)
        return codes.to(torch.uint8).view(-1), scales

    @staticmethod
    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        """What ``encode`` gives, in; (numel,) fp32."""
        part = codes.view(-1, BLOCK).float().div_(255)
        part.mul_(part)
        return part.mul_(part).mul_(scales[:, None]).view(-1)


def _scales(blocks: Tensor) -> Tensor:
    """The largest magnitude of each; a finite one, so that an overflow stays in its element."""
    return blocks.abs().amax(1).clamp_(max=torch.finfo(torch.float32).max)


def _parts(blocks: Tensor, scales: Tensor) -> Tensor:
    """Each number over its block's scale, -1 to 1; 0 where that is 0."""
    return (blocks / torch.where(scales == 0, 1.0, scales)[:, None]).clamp_(-1, 1)
