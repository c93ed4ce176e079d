"""From options to what rests where.

Owns: the translation. Must not know: tiers, torch, MPI.
"""

from __future__ import annotations

from hpczero.options.config import OffloadOptions
from hpczero.plan.offload import MIB, Offload


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
