"""A small speech encoder: convolutions that shorten time, transformer blocks, log probabilities of symbols for CTC.

Owns: the network. Must not know: ranks, shards, hpczero.

Source: of the loss that it is made for: Graves et al., Connectionist Temporal Classification, ICML 2006.

Shape suffixes: B batch, T frames, S shorter time, M bands of a frame, H hidden, K symbols and the blank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpczero.models.vit import Encoder

STRIDE = 2  # of each of two convolutions
KERNEL = 3


class SpeechEncoder(nn.Module):
    """Log probabilities for each stretch of ``STRIDE`` ** 2 frames.

    Args:
        bands: Of each frame.
        frames: In an utterance.
        symbols: Number of them; the blank is one more, at index 0.
        hidden: Width.
        heads: Attention heads of a block.
        layers: Number of blocks.
    """

    def __init__(
        self, *, bands: int, frames: int, symbols: int, hidden: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        self.first = nn.Conv1d(bands, hidden, KERNEL, STRIDE, padding=1)
        self.second = nn.Conv1d(hidden, hidden, KERNEL, STRIDE, padding=1)
        self.positions = nn.Parameter(torch.empty(shortened(shortened(frames)), hidden))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(Encoder(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, symbols + 1)

    def forward(self, frames_BTM: Tensor) -> Tensor:
        """Log probabilities (B, S, K)."""
        x_BHT = F.gelu(self.first(frames_BTM.transpose(1, 2)))
        x_BSH = F.gelu(self.second(x_BHT)).transpose(1, 2) + self.positions
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits_BSK: Tensor = self.head(self.norm(x_BSH))
        return F.log_softmax(logits_BSK, dim=-1)


def shortened(time: int) -> int:
    """Steps after one of the convolutions."""
    return (time + 2 - KERNEL) // STRIDE + 1
