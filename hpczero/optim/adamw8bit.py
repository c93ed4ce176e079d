"""AdamW8bit: torch's AdamW whose moments are kept in 8 bits between steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW

# Blocks: numbers in 8 bits, each block of 64 with a scale of its own.
#
#     signed     x = s f |f|     f = code / 127, code -127 ... 127     for first moments
#     unsigned   x = s f^4       f = code / 255, code 0 ... 255        for second moments, squares of such numbers
#
# ``s`` is the largest magnitude of a block, which is kept exactly. A code that was decoded is encoded as itself, so
# what is decoded, stored in fp32 and encoded again is the same. 1 + 4/64 bytes for each number.
#
# Source: Dettmers et al., 8-bit optimizers via block-wise quantization, ICLR 2022, sec. 2; the maps are others.

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


class AdamW8bit(AdamW):
    """The update is torch's AdamW, in fp32. On a zeroified model each moment is then kept in blocks of 64 codes.

    17/8 bytes for each element instead of 8. Blocks are counted in units, not in parameters, so any number of ranks and
    every stage keep the same codes. On a plain model it is AdamW, with moments in fp32.

    Source: Dettmers et al., 8-bit optimizers via block-wise quantization, ICLR 2022.
    """

    # Read by zeroify: how each state is kept between steps.
    hpczero_coded_states: ClassVar[dict[str, Any]] = {"exp_avg": Signed, "exp_avg_sq": Unsigned}

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        """As of torch.optim.AdamW; not collective.

        ``foreach`` and ``fused`` are torch's choice, which gives the same bits wherever a tensor is cut.

        Args:
            params: parameters, or groups.
            lr: learning rate.
            betas: of the moments.
            eps: added to the root of the second moment.
            weight_decay: decoupled.
            maximize: go up instead of down.
        """
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
