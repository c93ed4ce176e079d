"""Recommendation: who clicks on what, by a DLRM.

Owns: the clicks, drawn with a seed from hidden tastes. Must not know: ranks.

    python -m hpczero.train --model.factory examples.recommender:dlrm
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

# A recommendation model: dense features through an MLP, categories through tables, products of all pairs.
#
# Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv
# 1906.00091, sec. 2.
#
# Shape suffixes: B batch, D dense features, S categories, E width of an embedding, F features that are multiplied.


def mlp(widths: Sequence[int], *, last: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last one if ``last``."""
    layers: list[nn.Module] = []
    for index, (wide_in, wide_out) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(wide_in, wide_out))
        if last or index < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Whether someone clicks, as a logit.

    Args:
        dense: Number of dense features.
        tables: Number of rows of each table.
        width: Of an embedding.
        hidden: Width of both MLPs.
    """

    def __init__(
        self, *, dense: int, tables: Sequence[int], width: int = 8, hidden: int = 32
    ) -> None:
        super().__init__()
        self.bottom = mlp((dense, hidden, width), last=True)
        made = [nn.Embedding(rows, width) for rows in tables]
        for table in made:
            nn.init.normal_(table.weight, std=0.1)
        self.tables = nn.ModuleList(made)
        features = len(tables) + 1
        first, second = torch.triu_indices(features, features, offset=1, device="cpu").tolist()
        self.pairs = (first, second)
        self.top = mlp((width + len(first), hidden, 1), last=False)

    def forward(self, dense_BD: Tensor, categories_BS: Tensor) -> Tensor:
        """Logits (B). Categories are int64, each below the rows of its table."""
        dense_BE = self.bottom(dense_BD)
        found = [table(categories_BS[:, index]) for index, table in enumerate(self.tables)]
        features_BFE = torch.stack([dense_BE, *found], dim=1)
        products_BFF = features_BFE @ features_BFE.transpose(1, 2)
        pairs = products_BFF[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([dense_BE, pairs], dim=1)).squeeze(1)
        return logits


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

        return DLRM(dense=DENSE, tables=self.tables, width=self.width, hidden=self.hidden)

    def samples(self) -> tuple[Any, Any]:
        """Dense features, fp32 (4), categories, int64 (3), and clicks, fp32, 0 or 1."""
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
        dense, categories, clicks = batch
        return F.binary_cross_entropy_with_logits(model(dense, categories), clicks)

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Share of clicks and of others that are predicted."""
        dense, categories, clicks = batch
        right: Tensor = ((model(dense, categories) > 0) == (clicks > 0.5)).float().mean()
        return right

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Matrices of the MLPs, not the tables, of which a step sees few rows."""
        return parameter.dim() >= 2 and not name.startswith("tables.")


def dlrm(users: int = 150, width: int = 8, hidden: int = 32, rows: int = 20_000) -> Clicks:
    """The adapter; for the arguments see ``Clicks``."""
    return Clicks(users, width, hidden, rows)
