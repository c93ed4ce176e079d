"""Which transport serves which ranks best, as far as their numbers and devices say.

Owns: that rule, which the plan and the choice at run time share. Must not know: MPI, torch, whether memory of this very
machine can be shared (``comm.choice`` tries).
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
    """What ``auto`` means.

    Args:
        local_size: ranks of a node.
        nodes: how many.
        on_host: whether what is sent lies in the memory of the host, not of devices.
        rectangular: whether all nodes have as many ranks.
        shares: whether ranks of a node see each other's memory.
    """
    if not rectangular:
        return "flat"
    if local_size > 1 and shares:
        return "window" if on_host else "ipc"
    return "hierarchical" if nodes > 1 else "flat"
