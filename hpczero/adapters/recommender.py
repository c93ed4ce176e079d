"""Recommendation: who clicks on what, by a DLRM.

Owns: the clicks, drawn with a seed from hidden tastes. Must not know: ranks.

    python -m hpczero.train --model.factory hpczero.adapters.recommender:dlrm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

DENSE = 4
TASTES = 3  # hidden numbers of a user, an item or a place


@dataclass(frozen=True)
class Clicks(Adapter):
    """Users, items and places with hidden tastes; who agrees clicks.

    Args:
        users: rows of the first table; a third as many are items, and 11 places.
        width: of an embedding.
        hidden: width of the MLPs.
        rows: samples to train on; a quarter as many are held out.

    Raises:
        ValueError: a size is below 1.
    """

    users: int = 150
    width: int = 8
    hidden: int = 32
    rows: int = 20_000

    metric_name = "accuracy"

    def __post_init__(self) -> None:
        check_sizes(
            "Clicks", users=self.users, width=self.width, hidden=self.hidden, rows=self.rows
        )

    @property
    def tables(self) -> tuple[int, int, int]:
        """Rows of each table."""
        return self.users, self.users // 3 + 1, 11

    def build(self) -> nn.Module:
        """The network."""
        from hpczero.models.dlrm import DLRM

        return DLRM(dense=DENSE, tables=self.tables, width=self.width, hidden=self.hidden)

    def samples(self) -> tuple[Any, Any]:
        """Dense features, fp32 (4), categories, int64 (3), and clicks, fp32, 0 or 1."""
        import torch

        generator = torch.Generator().manual_seed(13)
        total = self.rows + max(1, self.rows // 4)
        hidden = [torch.randn(size, TASTES, generator=generator) for size in self.tables]
        chosen = [torch.randint(size, (total,), generator=generator) for size in self.tables]
        user, item, place = (taste[index] for taste, index in zip(hidden, chosen, strict=True))
        dense = torch.randn(total, DENSE, generator=generator)
        score = (user * item).sum(1) + (item * place).sum(1) + dense[:, 0] - 0.5 * dense[:, 1]
        clicks = (torch.rand(total, generator=generator) < torch.sigmoid(3 * score)).float()
        rows = (dense, torch.stack(chosen, dim=1), clicks)
        first = tuple(part[: self.rows] for part in rows)
        return first, tuple(part[self.rows :] for part in rows)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean binary cross entropy in nats."""
        from torch.nn import functional

        dense, categories, clicks = batch
        return functional.binary_cross_entropy_with_logits(model(dense, categories), clicks)

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Share of clicks and of others that are foretold."""
        dense, categories, clicks = batch
        right: Tensor = ((model(dense, categories) > 0) == (clicks > 0.5)).float().mean()
        return right

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Matrices of the MLPs, not the tables, of which a step sees few rows."""
        return parameter.dim() >= 2 and not name.startswith("tables.")


def dlrm(users: int = 150, width: int = 8, hidden: int = 32, rows: int = 20_000) -> Clicks:
    """The adapter; for the arguments see ``Clicks``."""
    return Clicks(users, width, hidden, rows)
