"""From options to calls of blocks that backward computes again.

Owns: how they come into the model of a run. Must not know: tiers, what a block is.
"""

from __future__ import annotations

from torch import nn

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.activations import Checkpointing, keep_products
from hpczero.adapters.base import Adapter
from hpczero.errors import ConfigError
from hpczero.options.config import RunConfig
from hpczero.run.starting.offloading import activations_of
from hpczero.run.starting.room_check import RoomCheck


def recompute_blocks(
    config: RunConfig,
    adapter: Adapter,
    model: nn.Module,
    accelerator: Accelerator,
    room: RoomCheck,
) -> Checkpointing | None:
    """Have the blocks of a zeroified model computed again in backward, as the options say. Collective.

    Args:
        config: the options.
        adapter: of the model.
        model: zeroified.
        accelerator: that computes.
        room: has checked the run, if it is one that can be counted.

    Returns:
        What calls them, which its user closes; None where nothing is computed again.

    Raises:
        TierError, ConfigError, OutOfMemory: the tier cannot be had; on every rank.
        PlanError: the adapter knows of no blocks; on every rank.
    """
    asked = activations_of(config)
    if asked.checkpointing == "none":
        return None
    if room.run is None and asked.away:
        raise ConfigError(
            f"activations.rest: got {asked.rest}, and of {config.model.title} nobody knows how large the inputs of its "
            "blocks are; leave them on the device"
        )
    input_nbytes = room.run.input_nbytes if room.run is not None else 1
    with hpczero.sharding(model).topology.agreed("open the memory tier of block inputs"):
        checkpointing = Checkpointing.create(
            asked.rest,
            folder=asked.folder,
            policy=keep_products if asked.checkpointing == "selective" else None,
            device=accelerator,
            window=asked.block_nbytes(input_nbytes),
            buffers=asked.buffers,
        )
        adapter.call_blocks_by(model, checkpointing)
    checkpointing.join(model)
    return checkpointing
