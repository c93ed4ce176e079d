"""Graphs: a GCN and a GraphSAGE that name the community of each node.

Owns: the graph, drawn with a seed. Must not know: ranks. Every rank holds the whole graph; a sample is a node.

    python -m hpczero.train --model.factory examples.graph:gcn
    python -m hpczero.train --model.factory examples.graph:graphsage
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

# Graph networks: a GCN and a GraphSAGE that name the nodes of one graph, which they hold as buffers.
#
# Shape suffixes: N nodes, B nodes of a batch, F features, H hidden, K classes.


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


COMMUNITIES, FEATURES = 4, 8
JOINED_INSIDE, JOINED_BETWEEN = 0.08, 0.01
NOISE = 1.5


@dataclass(frozen=True)
class Communities(Adapter):
    """Nodes of 4 communities, with features under so much noise that neighbours must help.

    Args:
        network: "gcn" or "graphsage".
        nodes: of the graph; two thirds are trained on.
        hidden: width between the two layers.

    Raises:
        ValueError: a size is below 1.
    """

    network: Literal["gcn", "graphsage"]
    nodes: int = 600
    hidden: int = 16

    metric_name = "accuracy"
    unit = "node"

    def __post_init__(self) -> None:
        check_sizes("Communities", nodes=self.nodes, hidden=self.hidden)

    def graph(self) -> tuple[Tensor, Tensor, Tensor]:
        """Features, fp32 (N, 8), adjacency, fp32 (N, N), and labels, int64 (N); always the same."""
        with torch.device("cpu"):
            generator = torch.Generator().manual_seed(4)
            labels = torch.randint(COMMUNITIES, (self.nodes,), generator=generator)
            same = labels[:, None] == labels[None, :]
            chance = torch.where(same, JOINED_INSIDE, JOINED_BETWEEN)
            above = (
                torch.rand(self.nodes, self.nodes, generator=generator).lt(chance).float().triu(1)
            )
            centres = torch.randn(COMMUNITIES, FEATURES, generator=generator)
            noise = torch.randn(self.nodes, FEATURES, generator=generator)
            return centres[labels] + NOISE * noise, above + above.T, labels

    def build(self) -> nn.Module:
        """The network, with the graph in it."""

        features, adjacency, _ = self.graph()
        layer = GCNLayer if self.network == "gcn" else SAGELayer
        return GraphNetwork(
            layer,
            features=features,
            adjacency=adjacency,
            hidden=self.hidden,
            classes=COMMUNITIES,
        )

    def samples(self) -> tuple[Any, Any]:
        """Numbers of nodes and their labels, int64."""
        _, _, labels = self.graph()
        numbers, first = torch.arange(self.nodes), self.nodes * 2 // 3
        return (numbers[:first], labels[:first]), (numbers[first:], labels[first:])

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean cross entropy in nats."""
        nodes, labels = batch
        return F.cross_entropy(model(nodes), labels)

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Share of nodes that are named right."""
        nodes, labels = batch
        right: Tensor = (model(nodes).argmax(dim=1) == labels).float().mean()
        return right


def gcn(nodes: int = 600, hidden: int = 16) -> Communities:
    """A GCN; for the arguments see ``Communities``."""
    return Communities("gcn", nodes, hidden)


def graphsage(nodes: int = 600, hidden: int = 16) -> Communities:
    """A GraphSAGE; for the arguments see ``Communities``."""
    return Communities("graphsage", nodes, hidden)
