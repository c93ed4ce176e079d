"""Resting: which Rest the values and the gradient of a unit get.

Owns: the choice between memory and tier. Must not know: units' verbs, what either does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpczero.comm.collectives import Collectives
from hpczero.memory.buffers import DTYPES, lasting
from hpczero.plan import Stage
from hpczero.plan.layout import ShardLayout
from hpczero.plan.precision import Precision
from hpczero.zero.units.away import AwayGradient, AwayRest
from hpczero.zero.units.away_shard import GRADIENT, VALUES, AwayShard
from hpczero.zero.units.mirrored import MirroredRest, MirroredShard
from hpczero.zero.units.near import Near, SentNear
from hpczero.zero.units.rest import GradientRest, ResidentGradient, ResidentRest, Rest
from hpczero.zero.units.whole import WholeParameters


def new_master(
    numel: int, owned: slice, whole: WholeParameters, precision: Precision, comm: Collectives
) -> Tensor:
    """(numel,) fp32 in memory: what is optimised where it does not rest elsewhere.

    Args:
        numel: elements of ``owned``.
        owned: of the whole buffer.
        whole: in fp32 the master is a part of its buffer where that lasts.
        precision: whether there are masters beside the parameters.
        comm: the transport, for memory.
    """
    if precision.has_masters or not whole.lasts:
        category = "master" if precision.has_masters else "parameters"
        return comm.allocate(numel, torch.float32, category=category).tensor
    return whole.flat[owned]


def keeps_values(away: AwayShard | None) -> bool:
    """Whether masters are on the tier."""
    return away is not None and VALUES in away.parts


def rest_of_values(
    master: Tensor,
    away: AwayShard | None,
    whole: WholeParameters,
    precision: Precision,
    comm: Collectives,
) -> Rest:
    """Where ``master`` rests; it is emptied where that is not in memory."""
    if away is None or not keeps_values(away):
        return ResidentRest(master)
    if isinstance(away, MirroredShard):
        return MirroredRest(master, away, memory=comm.memory)
    copy = None
    if whole.lasts:
        copy = whole.flat[whole.mine]
    elif away.near:
        dtype = DTYPES[precision.param]
        copy = comm.allocate(master.numel(), dtype, category="parameters").tensor
    near = None
    if copy is not None:
        ascent = away.store.ascent
        near = Near(copy) if ascent is None else SentNear(copy, ascent)
    return AwayRest(master, away, memory=comm.memory, near=near)


def rest_of_gradient(
    layout: ShardLayout, away: AwayShard | None, stage: Stage, comm: Collectives
) -> GradientRest:
    """Where the mean gradient of a unit rests."""
    if away is not None and GRADIENT in away.parts:
        landing = lasting(layout.shard_numel, torch.float32, comm.device)
        owned = len(layout.shard_range(comm.group.index))
        return AwayGradient(landing, away, owned, memory=comm.memory)
    numel = layout.shard_numel if stage.shards_optimizer else layout.padded_numel
    return ResidentGradient(numel, memory=comm.memory, device=comm.device)
