"""Offloading: what of a model rests on a memory tier, and the tier.

Owns: which parts of which units go there, and the choice of the medium. Must not know: how anything is moved, steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hpczero.accelerator import Accelerator
from hpczero.errors import PlanError
from hpczero.job.topology import Topology
from hpczero.memory.buffers import CPU, DTYPES
from hpczero.plan import Plan
from hpczero.plan.offload import Offload
from hpczero.plan.offloaded import ITEM, OffloadedPlan, windows_of
from hpczero.tier import DiskTier, HostTier, InPlaceTier, Tier
from hpczero.zero.units.away import MirroredShard
from hpczero.zero.units.away_shard import GRADIENT, VALUES, Ascent, Away, AwayShard, Store
from hpczero.zero.update.away_states import state_names
from hpczero.zero.update.host_update import leaves_choice
from hpczero.zero.update.optimizers import OptimizerSet
from hpczero.zero.update.parts import method_behind


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


logger = logging.getLogger("hpczero.offload")


def parts_of(offload: Offload, plan: Plan, optimizers: OptimizerSet) -> list[str]:
    """What of every element rests on the tier, fp32 each; empty where nothing is offloaded.

    Raises:
        PlanError: what is asked for does not go together, or saves nothing.
    """
    offload.check(plan.stage)
    if not offload.any:
        return []
    if not len(optimizers):
        raise PlanError(
            "offload: got a model without an optimizer, expected one: what is offloaded is what training keeps"
        )
    if offload.delayed and len(optimizers) > 1:
        raise PlanError(
            f"offload: got delayed=True and {len(optimizers)} optimizers, expected one: their updates would be of "
            "different batches"
        )
    for index, optimizer in enumerate(optimizers):
        if method_behind(optimizer) is None:
            raise PlanError(
                f"offload: {optimizers.name(index)} is a {type(optimizer).__name__}, expected one of torch's own "
                "elementwise optimizers with its own step, which can be taken window by window; leave it on the device"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise PlanError(
                f"offload: {optimizers.name(index)} has differentiable=True, expected False: state that rests "
                "elsewhere has no graph"
            )
        if offload.on_host and any(group.get("capturable") for group in optimizer.param_groups):
            raise PlanError(
                f"offload: {optimizers.name(index)} has capturable=True, expected False: the host takes its step, "
                "which no graph of a device can hold; or let the device step"
            )
    planned = OffloadedPlan(plan, offload)
    values, gradient = planned.values, planned.gradients
    names = dict.fromkeys(name for optimizer in optimizers for name in state_names(optimizer))
    parts = [*([VALUES] if values else []), *([GRADIENT] if gradient else []), *names]
    leaves = plan.precision.has_masters or planned.parameters or gradient or names
    if not leaves:
        raise PlanError(
            f"offload: optimizer on {offload.optimizer} saves nothing: {', '.join(optimizers.classes)} keeps no "
            "state of every element, and in fp32 the parameters are their own masters; leave it on the device"
        )
    return parts


def tell(offload: Offload, optimizers: OptimizerSet) -> None:
    """Say what an offload does that a program does not ask for in so many words; on one rank."""
    if offload.delayed:
        logger.warning(
            "offload: the update of each step is taken while the next batch is computed, so parameters are one step "
            "late; this changes the result (delayed=True)"
        )
    unchosen = [i for i, optimizer in enumerate(optimizers) if leaves_choice(optimizer)]
    if offload.on_host and unchosen:
        names = ", ".join(optimizers.name(i) for i in unchosen)
        logger.info(
            "offload: the host steps with the fused implementation of %s, which names none; fused=False or "
            "foreach=True names another",
            names,
        )


def open_away(
    offload: Offload, plan: Plan, parts: Sequence[str], accelerator: Accelerator, rank: int
) -> Away:
    """The tier of this rank, with room for its shard of every unit that rests there; not collective.

    Args:
        offload: checked.
        plan: the units.
        parts: of ``parts_of``.
        accelerator: that computes.
        rank: whose shards.

    Raises:
        TierError, ConfigError, OutOfMemory: it cannot be had, or there is not so much room.
    """
    blocks, nbytes = offload.buffers, offload.window
    tier: Tier
    planned = OffloadedPlan(plan, offload)
    ascent = None
    if offload.medium == "host":
        kind = InPlaceTier if offload.on_host else HostTier
        tier = kind(blocks=blocks, block_nbytes=nbytes, accelerator=accelerator)
        device = accelerator.device
        ascent = Ascent(accelerator, tier.traffic) if offload.on_host else None
    else:
        assert offload.folder is not None, "checked"
        tier = DiskTier(
            Path(offload.folder), blocks=blocks, block_nbytes=nbytes, accelerator=accelerator
        )
        device = CPU
    store = Store(
        tier,
        blocks=blocks,
        window_nbytes=nbytes,
        device=device,
        ascent=ascent,
        delayed=offload.delayed,
    )
    near = offload.parameters == "device"
    shard_of = MirroredShard if planned.mirror and not near else AwayShard
    element_nbytes = ITEM * len(parts) + planned.mirror
    try:
        shards = {
            spec.name: shard_of(
                spec.name,
                windows_of(spec.layout, spec.groups, rank, nbytes, element_nbytes),
                store=store,
                parts=parts,
                near=near,
                mirror=DTYPES[plan.precision.param] if planned.mirror else None,
            )
            for spec in planned.away
        }
    except BaseException:
        tier.close()
        raise
    return Away(shards, store, 0 if near else offload.ahead)
