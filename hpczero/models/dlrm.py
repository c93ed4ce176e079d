"""A recommendation model: dense features through an MLP, categories through tables, products of all pairs.

Owns: the network. Must not know: ranks, shards, hpczero.

Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems,
arXiv 1906.00091, sec. 2.

Shape suffixes: B batch, D dense features, S categories, E width of an embedding, F features that are multiplied.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
