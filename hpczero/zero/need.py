"""Need: what a plan takes, in words, for a program whose memory runs out.

Owns: the text. Must not know: how bytes are counted.
"""

from __future__ import annotations

from hpczero.job.topology import Topology
from hpczero.plan.offloaded import OffloadedPlan


def need(offloaded: OffloadedPlan, topology: Topology) -> str:
    """What the plan takes, for a program whose memory runs out; without what its transport lets ranks share."""
    plan, memory = offloaded.plan, offloaded.memory()
    held, buffers = memory.states / 1e9, (memory.unsharded + memory.exchange) / 1e9
    return (
        f"{plan.numel:,} parameters at stage {int(plan.stage)} on {topology.size} rank(s) take {held:,.2f} GB per rank "
        f"with Adam, {buffers:,.2f} GB of buffers in a step, and the activations of the model; take a higher stage, "
        "more ranks on more nodes or smaller batches: `python -m hpczero.plan --memory GB_OF_A_RANK --ranks "
        f"{topology.size} --ranks-per-node {topology.local_size} --precision {plan.precision.param} --layers ... "
        "--hidden ...` says what fits"
    )
