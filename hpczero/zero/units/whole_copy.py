"""Whole fp32 copies of what lies in shards.

Owns: putting the shards of all ranks together. Must not know: what they are shards of, units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpczero.comm.collectives import Collectives
from hpczero.plan.layout import ShardLayout


def whole_copy(values: Tensor, layout: ShardLayout, comm: Collectives, *, name: str) -> Tensor:
    """(layout.numel,) fp32 copy. Collective where ``values`` are a shard.

    Args:
        values: (padded_numel,), equal on all ranks, or (shard_numel,), this rank's.
        layout: of the whole.
        comm: the transport.
        name: for its messages.
    """
    if values.numel() == layout.padded_numel:
        return values[: layout.numel].detach().to(torch.float32, copy=True)
    full = torch.empty(layout.padded_numel, dtype=torch.float32, device=comm.device)
    index = comm.group.index
    full[index * layout.shard_numel : (index + 1) * layout.shard_numel].copy_(values.detach())
    comm.all_gather(full, name=name).wait()
    return full[: layout.numel]
