"""Speech: which tones were played, by an encoder with CTC.

Owns: the utterances, drawn with a seed, and the way from log probabilities to symbols. Must not know: ranks.

    python -m hpczero.train --model.factory examples.speech:build
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.vision import Encoder
from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

# A small speech encoder: convolutions that shorten time, transformer blocks, log probabilities of symbols for CTC.
#
# Source: of the loss that it is made for: Graves et al., Connectionist Temporal Classification, ICML 2006.
#
# Shape suffixes: B batch, T frames, S shorter time, M bands of a frame, H hidden, K symbols and the blank.

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


SYMBOLS, BANDS, BLANK = 5, 12, 0
LEAST, MOST = 2, 4  # symbols in an utterance
FRAMES_EACH = 14  # at most, of one symbol with the silence after it


@dataclass(frozen=True)
class Tones(Adapter):
    """Utterances of 2 to 4 tones of unknown lengths, with silence between them, under noise.

    Args:
        hidden: width.
        layers: blocks.
        rows: utterances to train on; an eighth as many are held out.
        noise: standard deviation of the noise, where tones are of amplitude 1.

    Raises:
        ValueError: a size is below 1.
    """

    hidden: int = 32
    layers: int = 2
    rows: int = 2000
    noise: float = 0.3

    metric_name = "symbol accuracy"

    def __post_init__(self) -> None:
        check_sizes("Tones", hidden=self.hidden, layers=self.layers, rows=self.rows)

    @property
    def frames(self) -> int:
        """Of each utterance."""
        return MOST * FRAMES_EACH

    @property
    def flops_per_token(self) -> float:
        """Of convolutions, blocks and head; torch cannot count a forward with CTC on the meta device."""

        half, short = shortened(self.frames), shortened(shortened(self.frames))
        convolutions = KERNEL * self.hidden * (half * BANDS + short * self.hidden)
        blocks = self.layers * short * (12 * self.hidden**2 + 2 * short * self.hidden)
        return 6.0 * (convolutions + blocks + short * self.hidden * (SYMBOLS + 1))

    def build(self) -> nn.Module:
        """The network."""

        return SpeechEncoder(
            bands=BANDS,
            frames=self.frames,
            symbols=SYMBOLS,
            hidden=self.hidden,
            heads=2,
            layers=self.layers,
        )

    def samples(self) -> tuple[Any, Any]:
        """Frames, fp32 (T, 12), symbols, int64 (4), from 1 on and then 0, and how many they are, int64."""
        generator = torch.Generator().manual_seed(5)
        total = self.rows + max(1, self.rows // 8)
        tones = torch.rand(SYMBOLS + 1, BANDS, generator=generator).round()
        tones[BLANK] = 0.0
        counts = torch.randint(LEAST, MOST + 1, (total,), generator=generator)
        symbols = torch.randint(1, SYMBOLS + 1, (total, MOST), generator=generator)
        symbols[torch.arange(MOST)[None, :] >= counts[:, None]] = 0
        lasting = torch.randint(6, FRAMES_EACH - 3, (total, MOST), generator=generator)
        frame = torch.arange(FRAMES_EACH)
        sounds = frame[None, None, :] < lasting[:, :, None]
        played = torch.where(sounds, symbols[:, :, None], BLANK).flatten(1)
        frames = tones[played] + self.noise * torch.randn(
            total, self.frames, BANDS, generator=generator
        )
        rows = (frames, symbols, counts)
        first = tuple(part[: self.rows] for part in rows)
        return first, tuple(part[self.rows :] for part in rows)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean over utterances of the CTC loss for each symbol, in nats."""
        frames, symbols, counts = batch
        chances = model(frames).transpose(0, 1)
        lengths = counts.new_full((chances.shape[1],), chances.shape[0])
        return F.ctc_loss(chances, symbols, lengths, counts, blank=BLANK)

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """1 - errors / symbols, the mean over utterances, by the likeliest symbol of each stretch."""
        frames, symbols, counts = batch
        found = [
            [symbol for symbol, _ in groupby(row) if symbol != BLANK]
            for row in model(frames).argmax(dim=-1).tolist()
        ]
        wanted = [row[:count] for row, count in zip(symbols.tolist(), counts.tolist(), strict=True)]
        right = [
            1 - errors(one, other) / len(other) for one, other in zip(found, wanted, strict=True)
        ]
        return torch.tensor(right).mean()


def errors(found: Sequence[int], wanted: Sequence[int]) -> int:
    """Fewest symbols to put in, take out or exchange.

    Source: Wagner and Fischer, JACM 21 (1974).
    """
    row = list(range(len(wanted) + 1))
    for index, symbol in enumerate(found, 1):
        before, row = row, [index]
        for place, other in enumerate(wanted, 1):
            row.append(min(row[-1] + 1, before[place] + 1, before[place - 1] + (symbol != other)))
    return row[-1]


def build(hidden: int = 32, layers: int = 2, rows: int = 2000, noise: float = 0.3) -> Tones:
    """The adapter; for the arguments see ``Tones``."""
    return Tones(hidden, layers, rows, noise)
