"""What measurements inside one MPI job share: a common clock, and the name of the placement.

Owns: the start of a timing on all ranks, and whose time counts. Must not know: what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hpczero.topology import Topology


def seconds(topology: Topology, call: Callable[[], object]) -> float:
    """Of the slowest rank, from a common start to its own return. Collective; the same on every rank."""
    topology.barrier()
    start = time.perf_counter()
    call()
    return max(topology.gather(time.perf_counter() - start))


def placement(topology: Topology) -> str:
    """``4x2-block``, ``4x2-cyclic``, ``1x2``, or the sizes of uneven nodes: how ranks lie on nodes."""
    nodes = topology.nodes
    if not topology.is_rectangular:
        return "+".join(str(len(ranks)) for ranks in nodes)
    shape = f"{len(nodes)}x{len(nodes[0])}"
    if len(nodes) == 1 or len(nodes[0]) == 1:
        return shape
    if all(ranks == tuple(range(ranks[0], ranks[0] + len(ranks))) for ranks in nodes):
        return f"{shape}-block"
    if all(ranks == tuple(range(ranks[0], topology.size, len(nodes))) for ranks in nodes):
        return f"{shape}-cyclic"
    return f"{shape}-mixed"
