"""Ranks that have built different things, found before a collective would mix up their buffers.

Owns: the comparison, and the words that say what differs. Must not know: how a plan is made, or what is done with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from torch import nn

from hpczero.errors import PlanError
from hpczero.job.mesh import DATA_SEQUENCE
from hpczero.job.topology import Topology
from hpczero.plan import Plan
from hpczero.zero.units.module_buffers import persistent_buffers
from hpczero.zero.update.optimizer_set import OptimizerSet

COMMON = 4  # the first decisions, which tensor ranks and stages have in common too


def check_equal_plans(
    plan: Plan,
    model: nn.Module,
    optimizers: OptimizerSet,
    topology: Topology,
    away: Sequence[str],
    way: str,
) -> None:
    """All ranks must have built the same, or later collectives would mix up buffers and masters would drift apart.

    Parts of a model differ between tensor ranks and stages; they have the stage and the precision in common, and the
    way to first values.
    """
    buffers = [(tuple(buffer.shape), buffer.dtype) for buffer in persistent_buffers(model).values()]
    decisions = {
        "the stage": plan.stage,
        "the precision": plan.precision,
        "the number of optimizers": len(optimizers),
        "initialize": way,
        "parameters, their order, or the units that a rule makes of them": plan.units,
        "buffers": buffers,
        "the optimizer or its groups": optimizers.describe(),
        "offload": away,
    }
    mine = np.array([float(zlib.crc32(repr(value).encode())) for value in decisions.values()])
    plans = topology.data_sequence.share(mine)
    ranks = topology.mesh.members(topology.rank, *DATA_SEQUENCE)
    odd = {rank for rank, other in zip(ranks, plans, strict=True) if (other != plans[0]).any()}
    parts = topology.world.share(mine[:COMMON])
    odd |= {rank for rank, other in enumerate(parts) if (other != parts[0]).any()}
    unequal = (plans != plans[0]).any(axis=0)
    unequal[:COMMON] |= (parts != parts[0]).any(axis=0)
    with topology.agreed("agree on the plan"):
        if odd:
            names = [name for name, differs in zip(decisions, unequal, strict=True) if differs]
            raise PlanError(
                f"rank(s) {sorted(odd)[:8]} built another model, optimizer, stage or precision than rank {ranks[0]}, "
                f"or has another kind of initialize. What differs: {'; '.join(names) or 'see the other ranks'}. Every "
                "rank must build the same"
            )
