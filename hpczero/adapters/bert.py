"""Masked language modelling: a BERT-like encoder that puts missing letters into the words of a made-up language.

Owns: the language, drawn with a seed, which letters are masked, and the calls. Must not know: ranks.

    python -m hpczero.train --model.factory hpczero.adapters.bert:build
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

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
        from hpczero.models.bert import BERT

        return BERT(
            vocab_size=LETTERS + 1,
            context=self.context,
            hidden=self.hidden,
            heads=self.heads,
            layers=self.layers,
        )

    def samples(self) -> tuple[Any, Any]:
        """Letters with masks, int64 (context), places of the masks, int64 (m), and what stood there, int64 (m)."""
        import torch

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
        from torch.nn import functional

        tokens, places, targets = batch
        logits = model(tokens, places)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

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
