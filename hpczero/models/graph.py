"""Graph networks: a GCN and a GraphSAGE that name the nodes of one graph, which they hold as buffers.

Owns: the networks. Must not know: ranks, shards, hpczero. The graph is data: it is no parameter, and not part of
the state.

Shape suffixes: N nodes, B nodes of a batch, F features, H hidden, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GCNLayer(nn.Module):
    """D^-1/2 (A + I) D^-1/2 x W.

    Source: Kipf and Welling, arXiv 1609.02907, eq. 2.
    """

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(wide_in, wide_out)

    @staticmethod
    def spread(adjacency_NN: Tensor) -> Tensor:
        """The matrix that features are multiplied by."""
        own = adjacency_NN + torch.eye(len(adjacency_NN), device=adjacency_NN.device)
        root = own.sum(dim=1).rsqrt()
        return root[:, None] * own * root[None, :]

    def forward(self, x_NF: Tensor, spread_NN: Tensor) -> Tensor:
        """(N, F) to (N, H)."""
        own_NH: Tensor = self.linear(x_NF)
        return spread_NN @ own_NH


class SAGELayer(nn.Module):
    """W x + U mean of x over neighbours.

    Source: Hamilton et al., arXiv 1706.02216, algorithm 1 with the mean aggregator.
    """

    def __init__(self, wide_in: int, wide_out: int) -> None:
        super().__init__()
        self.own = nn.Linear(wide_in, wide_out)
        self.neighbours = nn.Linear(wide_in, wide_out, bias=False)

    @staticmethod
    def spread(adjacency_NN: Tensor) -> Tensor:
        """The matrix that takes the mean over neighbours; of a node without any it is 0."""
        return adjacency_NN / adjacency_NN.sum(dim=1, keepdim=True).clamp(min=1.0)

    def forward(self, x_NF: Tensor, spread_NN: Tensor) -> Tensor:
        """(N, F) to (N, H)."""
        out_NH: Tensor = self.own(x_NF) + self.neighbours(spread_NN @ x_NF)
        return out_NH


class GraphNetwork(nn.Module):
    """Two layers over the whole graph; a batch asks for some nodes.

    Args:
        layer: ``GCNLayer`` or ``SAGELayer``.
        features: Of each node, fp32 (N, F).
        adjacency: 1 where two nodes are joined, else 0; fp32 (N, N).
        hidden: Width between the layers.
        classes: Number of labels.
    """

    features: Tensor
    spread: Tensor

    def __init__(
        self,
        layer: type[GCNLayer] | type[SAGELayer],
        *,
        features: Tensor,
        adjacency: Tensor,
        hidden: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.register_buffer("features", features, persistent=False)
        self.register_buffer("spread", layer.spread(adjacency), persistent=False)
        self.first = layer(features.shape[1], hidden)
        self.second = layer(hidden, classes)

    def forward(self, nodes_B: Tensor) -> Tensor:
        """Logits (B, K) of some nodes, int64 (B)."""
        x_NH = F.relu(self.first(self.features, self.spread))
        logits_NK: Tensor = self.second(x_NH, self.spread)
        return logits_NK[nodes_B]
