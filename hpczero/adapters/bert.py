"""Masked language modelling: a BERT-like encoder over the bytes of Python sources that every installation has.

Owns: the text, which bytes are masked, and the calls. Must not know: ranks.

    python -m hpczero.train --model.factory hpczero.adapters.bert:build
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

MASK, VOCAB_SIZE = 256, 257
MASKED = 0.15
SOURCES = ("argparse", "textwrap", "shutil", "tarfile", "zipfile", "inspect", "subprocess")


@dataclass(frozen=True)
class MaskedBytes(Adapter):
    """Bytes of text, of which 15 % in each sample are masked and named.

    Each sample has as many masked bytes, so that the mean over them is a mean over samples that weigh the same. Which
    ones they are depends on the sample alone.

    Args:
        hidden: width.
        heads: attention heads of a block.
        layers: blocks.
        context: bytes in a sample.
        rows: samples at most; a tenth of those that there are is held out.

    Raises:
        ValueError: a size is below 1.
    """

    hidden: int = 64
    heads: int = 2
    layers: int = 2
    context_size: int = 48
    rows: int = 10_000

    metric_name = "accuracy"
    unit = "token"

    def __post_init__(self) -> None:
        check_sizes(
            "MaskedBytes",
            hidden=self.hidden,
            heads=self.heads,
            layers=self.layers,
            context=self.context_size,
            rows=self.rows,
        )

    @property
    def context(self) -> int:
        """Bytes in a sample."""
        return self.context_size

    def build(self) -> nn.Module:
        """The network."""
        from hpczero.models.bert import BERT

        return BERT(
            vocab_size=VOCAB_SIZE,
            context=self.context_size,
            hidden=self.hidden,
            heads=self.heads,
            layers=self.layers,
        )

    def samples(self) -> tuple[Any, Any]:
        """Bytes with masks, int64 (context), places of the masks, int64 (m), and what stood there, int64 (m)."""
        import torch

        tokens = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
        count = min(self.rows, len(tokens) // self.context_size)
        whole = tokens[: count * self.context_size].view(count, self.context_size)
        generator = torch.Generator().manual_seed(15)
        masked = max(1, round(MASKED * self.context_size))
        order = torch.rand(count, self.context_size, generator=generator).argsort(dim=1)
        places = order[:, :masked].sort(dim=1).values
        hidden = whole.scatter(1, places, MASK)
        rows = (hidden, places, whole.gather(1, places))
        held_out = torch.arange(count) % 10 == 9
        return tuple(part[~held_out] for part in rows), tuple(part[held_out] for part in rows)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean cross entropy over masked bytes, in nats."""
        from torch.nn import functional

        tokens, places, targets = batch
        logits = model(tokens, places)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Share of masked bytes that are named right."""
        tokens, places, targets = batch
        right: Tensor = (model(tokens, places).argmax(dim=-1) == targets).float().mean()
        return right


def text() -> bytes:
    """The sources, one after the other. Another version of Python has others."""
    import importlib.util
    from pathlib import Path

    found = []
    for name in SOURCES:
        spec = importlib.util.find_spec(name)
        assert spec is not None, f"{name} is part of every Python"
        assert spec.origin is not None, f"{name} is a file"
        found.append(Path(spec.origin).read_bytes())
    return b"\n".join(found)


def build(
    hidden: int = 64, heads: int = 2, layers: int = 2, context: int = 48, rows: int = 10_000
) -> MaskedBytes:
    """The adapter; for the arguments see ``MaskedBytes``."""
    return MaskedBytes(hidden, heads, layers, context, rows)
