"""From options to what rests where.

Owns: the translation. Must not know: tiers, torch, MPI.
"""

from __future__ import annotations

from hpczero.errors import ConfigError
from hpczero.options.config import OffloadOptions, RunConfig
from hpczero.plan.offload import MIB, Activations, Offload


def offload_of(options: OffloadOptions) -> Offload:
    """What ``zeroify`` takes; not checked against a stage."""
    return Offload(
        optimizer=options.optimizer,
        gradients=options.gradients,
        parameters=options.parameters,
        folder=options.folder,
        window=options.window * MIB,
        buffers=options.buffers,
        ahead=options.ahead,
        fraction=options.fraction,
        step=options.step,
        delayed=options.delayed,
    )


def activations_of(config: RunConfig) -> Activations:
    """What is computed again, and where inputs of blocks rest; not checked against a device.

    Raises:
        ConfigError: two options ask for different things.
    """
    asked, kind = config.activations, config.activations.checkpointing
    if config.model.checkpoint_activations:
        if kind == "selective":
            raise ConfigError(
                "activations.checkpointing: got selective beside model.checkpoint_activations true, which is block; "
                "leave model.checkpoint_activations out"
            )
        kind = "block"
    folder = asked.folder or config.offload.folder
    return Activations(kind, asked.rest, folder, buffers=asked.buffers)
