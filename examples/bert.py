"""Masked language modelling: a BERT-like encoder that puts missing letters into the words of a made-up language.

Owns: the language, drawn with a seed, which letters are masked, and the calls. Must not know: ranks.

    python -m hpczero.train --model.factory examples.bert:build
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

# A BERT-like encoder with a masked language model's head, whose weight is that of the token embedding.
#
# Source: Devlin et al., BERT, arXiv 1810.04805, sec. 3; its code for the order of norms and the head.
#
# Shape suffixes: B batch, T time, H hidden, M masked positions, V vocabulary.


class PostNormBlock(nn.Module):
    """Attention over all positions and an MLP, each followed by a residual and a norm.

    Args:
        hidden: Width; ``heads`` divides it.
        heads: Attention heads.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.expansion = nn.Linear(hidden, 4 * hidden)
        self.contraction = nn.Linear(4 * hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """(B, T, H) to (B, T, H)."""
        batch, time, hidden = x_BTH.shape
        q, k, v = (
            part.view(batch, time, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(x_BTH).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x_BTH.shape)
        x_BTH = self.attention_norm(x_BTH + self.projection(seen))
        made = self.contraction(F.gelu(self.expansion(x_BTH)))
        out_BTH: Tensor = self.mlp_norm(x_BTH + made)
        return out_BTH


class BERT(nn.Module):
    """Embeddings with a norm, blocks, and a head for the masked positions alone.

    Args:
        vocab_size: Number of token ids, the mask's among them.
        context: Tokens in a sequence.
        hidden: Width.
        heads: Attention heads of a block.
        layers: Number of blocks.

    Raises:
        ValueError: ``heads`` does not divide ``hidden``.
    """

    def __init__(
        self, *, vocab_size: int, context: int, hidden: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(
                f"BERT: hidden is {hidden}, expected a multiple of heads, which is {heads}"
            )
        self.tokens = nn.Embedding(vocab_size, hidden)
        self.positions = nn.Embedding(context, hidden)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.embedding_norm = nn.LayerNorm(hidden)
        self.blocks = nn.ModuleList(PostNormBlock(hidden, heads) for _ in range(layers))
        self.transform = nn.Linear(hidden, hidden)
        self.head_norm = nn.LayerNorm(hidden)
        self.decoder = nn.Linear(hidden, vocab_size)
        self.decoder.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor, places_BM: Tensor) -> Tensor:
        """Logits (B, M, V) at ``places_BM``, int64, of the sequences."""
        time = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTH = self.embedding_norm(self.tokens(tokens_BT) + self.positions(time))
        for block in self.blocks:
            x_BTH = block(x_BTH)
        index = places_BM.unsqueeze(-1).expand(-1, -1, x_BTH.shape[-1])
        masked_BMH = F.gelu(self.transform(x_BTH.gather(1, index)))
        logits_BMV: Tensor = self.decoder(self.head_norm(masked_BMH))
        return logits_BMV


LETTERS, WORDS, LENGTH = 26, 32, 6  # of the language, and of each word
MASK = LETTERS
MASKED = 0.15


@dataclass(frozen=True)
class MaskedWords(Adapter):
    """Words without spaces, of whose letters 15 % in each sample are masked and named.

    Each sample has as many masked letters, so that the mean over them is a mean over samples that weigh the same. Which
    ones they are depends on the sample alone.

    Args:
        hidden: width.
        heads: attention heads of a block.
        layers: blocks.
        words: in a sample.
        rows: samples to train on; a tenth as many are held out.

    Raises:
        ValueError: a size is below 1.
    """

    hidden: int = 64
    heads: int = 2
    layers: int = 2
    words: int = 3
    rows: int = 10_000

    metric_name = "accuracy"
    unit = "token"

    def __post_init__(self) -> None:
        check_sizes(
            "MaskedWords",
            hidden=self.hidden,
            heads=self.heads,
            layers=self.layers,
            words=self.words,
            rows=self.rows,
        )

    @property
    def context(self) -> int:
        """Letters in a sample."""
        return self.words * LENGTH

    def build(self) -> nn.Module:
        """The network."""

        return BERT(
            vocab_size=LETTERS + 1,
            context=self.context,
            hidden=self.hidden,
            heads=self.heads,
            layers=self.layers,
        )

    def samples(self) -> tuple[Any, Any]:
        """Letters with masks, int64 (context), places of the masks, int64 (m), and what stood there, int64 (m)."""
        generator = torch.Generator().manual_seed(15)
        words = torch.randint(LETTERS, (WORDS, LENGTH), generator=generator)
        total = self.rows + max(1, self.rows // 10)
        chosen = torch.randint(WORDS, (total, self.words), generator=generator)
        whole = words[chosen].flatten(1)
        masked = max(1, round(MASKED * self.context))
        order = torch.rand(whole.shape, generator=generator).argsort(dim=1)
        places = order[:, :masked].sort(dim=1).values
        rows = (whole.scatter(1, places, MASK), places, whole.gather(1, places))
        first = tuple(part[: self.rows] for part in rows)
        return first, tuple(part[self.rows :] for part in rows)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean cross entropy over masked letters, in nats."""
        tokens, places, targets = batch
        logits = model(tokens, places)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Share of masked letters that are named right."""
        tokens, places, targets = batch
        right: Tensor = (model(tokens, places).argmax(dim=-1) == targets).float().mean()
        return right


def build(
    hidden: int = 64, heads: int = 2, layers: int = 2, words: int = 3, rows: int = 10_000
) -> MaskedWords:
    """The adapter; for the arguments see ``MaskedWords``."""
    return MaskedWords(hidden, heads, layers, words, rows)
