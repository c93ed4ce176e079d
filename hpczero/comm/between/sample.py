"""A sample of the nodes of a job, which measure what goes between all of them.

Owns: which nodes measure together, in which memory, and which numbers of nodes share one measurement. Must not know:
the candidates' times, what is kept of them.

[Note: Sample]
Many nodes are measured in samples of at most MOST_NODES, all at once, so every connection is busy as it will be. A
sample has every k-th node, because neighbours in a job often hang on one switch. Time and memory then stop to grow with
the number of nodes. By pairs and in the ring a call on more nodes is more messages of the same kind. What was measured
serves all numbers of nodes of one bucket, if the same algorithms work on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from mpi4py import MPI

from hpczero.comm.algorithms import Exchange, Gather
from hpczero.comm.between.rails import Rails
from hpczero.comm.between.selection import Choice, Selection
from hpczero.comm.devices.access import Reach
from hpczero.job.group import Group
from hpczero.memory.buffers import Memory
from hpczero.plan.rounds import DEVICE_ROUND_BYTES

MOST_NODES = 16  # of a sample

Trial = Callable[[], None]


def bucket(nodes: int) -> int:
    """The largest number of nodes, of those measured at all, that shares its measurement with ``nodes``."""
    return int(min(1 << (nodes - 1).bit_length(), MOST_NODES))


@dataclass(frozen=True)
class Sample:
    """Nodes that measure together.

    Attributes:
        comm: one rank of each; whoever made the sample frees it.
        nodes: number of all nodes, of which these are some.
        local_size: ranks of each node.
        reach: where the buffers are.
    """

    comm: MPI.Intracomm
    nodes: int
    local_size: int
    reach: Reach

    @classmethod
    def create(cls, group: Group, reach: Reach) -> Sample:
        """The sample of this rank. Collective over the group. See [Note: Sample]."""
        assert group.rail is not None, "nodes of equal size"
        samples = -(-group.num_nodes // MOST_NODES)
        comm = group.rail.Split(group.node_index % samples, group.node_index)
        assert isinstance(comm, MPI.Intracomm), "split from an intracommunicator"
        return cls(comm, group.num_nodes, group.local_size, reach)

    def fits(self, kind: type[Gather] | type[Exchange]) -> bool:
        """Whether an algorithm works on all nodes and in all samples, whose sizes may differ by one."""
        samples = -(-self.nodes // MOST_NODES)
        sizes = (self.nodes, self.nodes // samples, -(-self.nodes // samples))
        return all(map(kind.fits, sizes))

    def rails(self, node_dtype: torch.dtype, selection: Selection) -> Rails:
        """Rails between these nodes, for buffers of one rail alone. Not collective."""
        return Rails(
            self.comm,
            Memory(),
            local_size=self.local_size,
            local_rank=0,
            node_dtype=node_dtype,
            selection=selection,
            reach=self.reach,
        )

    def ones(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) where the buffers will be."""
        return torch.ones(numel, dtype=dtype, device=self.reach.accelerator.device)

    def until_done(self, operation: Trial) -> None:
        """Run it, and wait until a device has done its part."""
        operation()
        self.reach.accelerator.finish()

    def candidates(self, default: Choice, kinds: Sequence[Choice]) -> tuple[Choice, ...]:
        """The default and all others that differ, in rounds as long as this memory wants them."""
        least = 1 if self.reach.accelerator.is_host else DEVICE_ROUND_BYTES
        every = [
            replace(choice, chunk_nbytes=max(choice.chunk_nbytes, least))
            for choice in (default, *kinds)
        ]
        return tuple(dict.fromkeys(every))
