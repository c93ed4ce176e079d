"""What a transport needs between nodes.

Owns: the contract of a level between nodes. Must not know: how the ranks of a node share, the order of messages, units.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.comm.between.selection import Selection
from hpczero.comm.inside.level import Parts


class BetweenLevel(ABC):
    """This rank's part in what goes between nodes. The other ranks of its node do theirs at the same time.

    Attributes:
        comm: ranks that it exchanges with; borrowed. It carries nothing else while bytes move.
        selection: which algorithm serves which size.
    """

    comm: MPI.Intracomm
    selection: Selection

    @abstractmethod
    def select(self, selection: Selection) -> None:
        """Use other algorithms from now on. Equal on all ranks; not collective.

        Raises:
            ConfigError: an algorithm does not work between these nodes.
        """

    @abstractmethod
    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of partial sums of ``dtype`` on the network."""

    @abstractmethod
    def describe(self) -> str:
        """Part of a line for a run header."""

    @property
    @abstractmethod
    def messages(self) -> tuple[int, int]:
        """Messages that this rank has sent for gathers and for reductions; the library's own do not count."""

    @abstractmethod
    def gather(self, full: Tensor, shard_numel: int) -> None:
        """Bring the shards of other nodes to this node, in place. Collective over all ranks of the group.

        Args:
            full: (num_shards * shard_numel,), this rank's shard in its slice. Afterwards each element of it is on a
                rank of this node.
            shard_numel: elements of one rank's shard.
        """

    @abstractmethod
    def reduce(
        self,
        parts: Parts,
        out: Tensor,
        dtype: torch.dtype,
        scale: float,
        accumulate: bool,
        *,
        spans: bool = True,
    ) -> None:
        """Sum over the ranks of each node and then over nodes. Collective over all ranks of the group.

        Args:
            parts: every local rank's elements. All ranks of a node make as many calls.
            out: (shard_numel,) fp32, this rank's shard.
            dtype: dtype of the parts.
            scale: multiplies the sum.
            accumulate: whether to add to ``out`` instead of replacing it.
            spans: whether ``parts`` are views, so that what lies between the elements in question costs nothing.
        """

    @abstractmethod
    def close(self) -> None:
        """Free datatypes and scratch. Not collective."""
