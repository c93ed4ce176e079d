"""Graphs: a GCN and a GraphSAGE that name the community of each node.

Owns: the graph, drawn with a seed. Must not know: ranks. Every rank holds the whole graph; a sample is a node.

    python -m hpczero.train --model.factory hpczero.adapters.graph:gcn
    python -m hpczero.train --model.factory hpczero.adapters.graph:graphsage
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

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
        import torch

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
        from hpczero.models.graph import GCNLayer, GraphNetwork, SAGELayer

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
        import torch

        _, _, labels = self.graph()
        numbers, first = torch.arange(self.nodes), self.nodes * 2 // 3
        return (numbers[:first], labels[:first]), (numbers[first:], labels[first:])

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean cross entropy in nats."""
        from torch.nn import functional

        nodes, labels = batch
        return functional.cross_entropy(model(nodes), labels)

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
