"""Which transport serves which ranks best, as far as their numbers and devices tell.

Owns: the rule, which the plan and the choice at run time share. Must not know: MPI, torch, whether this machine can
share memory (``comm.choice`` tries that).
"""

from __future__ import annotations

from typing import Literal

Named = Literal["flat", "hierarchical", "window", "ipc"]


def fastest_transport(
    local_size: int,
    nodes: int,
    *,
    on_host: bool = True,
    rectangular: bool = True,
    shares: bool = True,
) -> Named:
    """The transport that ``auto`` means.

    Args:
        local_size: ranks of a node.
        nodes: number of nodes.
        on_host: whether what is sent lies in the memory of the host, not of devices.
        rectangular: whether all nodes have the same number of ranks.
        shares: whether ranks of a node see each other's memory.
    """
    if not rectangular:
        return "window" if on_host and shares else "hierarchical"
    if local_size > 1 and shares:
        return "window" if on_host else "ipc"
    return "hierarchical" if nodes > 1 else "flat"
