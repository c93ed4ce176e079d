"""Offloading: what of a model rests on a memory tier, and the tier.

Owns: which parts of which units go there, and the choice of the medium. Must not know: how anything is moved, steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpczero.accelerator import Accelerator
from hpczero.errors import PlanError
from hpczero.memory.buffers import CPU
from hpczero.plan import Plan
from hpczero.plan.offload import Offload
from hpczero.plan.windows import windows_of
from hpczero.tier import DiskTier, HostTier, Tier
from hpczero.zero.units.away_shard import GRADIENT, VALUES, Away, AwayShard, Store
from hpczero.zero.update.away_states import state_names
from hpczero.zero.update.optimizer_set import OptimizerSet
from hpczero.zero.update.parts import method_behind


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
    values = plan.precision.has_masters or offload.parameters != "device"
    gradient = offload.gradients != "device"
    names = dict.fromkeys(name for optimizer in optimizers for name in state_names(optimizer))
    parts = [*([VALUES] if values else []), *([GRADIENT] if gradient else []), *names]
    if not parts:
        raise PlanError(
            f"offload: optimizer on {offload.optimizer} saves nothing: {', '.join(optimizers.classes)} keeps no "
            "state of every element, and in fp32 the parameters are their own masters; leave it on the device"
        )
    return parts


def open_away(
    offload: Offload, plan: Plan, parts: Sequence[str], accelerator: Accelerator, rank: int
) -> Away:
    """The tier of this rank, with room for its shard of every trainable unit; not collective.

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
    if offload.medium == "host":
        tier = HostTier(blocks=blocks, block_nbytes=nbytes, accelerator=accelerator)
        device = accelerator.device
    else:
        assert offload.folder is not None, "checked"
        tier = DiskTier(
            Path(offload.folder), blocks=blocks, block_nbytes=nbytes, accelerator=accelerator
        )
        device = CPU
    store = Store(tier, blocks=blocks, window_nbytes=nbytes, device=device)
    near = offload.parameters == "device"
    try:
        shards = {
            spec.name: AwayShard(
                spec.name,
                windows_of(spec.layout, spec.groups, rank, nbytes, len(parts)),
                store=store,
                parts=parts,
                near=near,
            )
            for spec in plan.trainable_units
        }
    except BaseException:
        tier.close()
        raise
    return Away(shards, store, 0 if near else offload.ahead)
