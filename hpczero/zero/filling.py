"""Filling: the first values of a unit.

Owns: where they come from, and the check that ranks agree on them. Must not know: plans, hooks, optimizers.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hpczero.comm import Collectives
from hpczero.errors import PlanError
from hpczero.zero.units.unit import Unit

Initializer = Callable[[str, Tensor], None]


def filler(
    unit: Unit, collectives: Collectives, initialize: Initializer | None
) -> Callable[[Tensor], None]:
    """How one unit gets its values: rank 0's, or ``initialize``'s after a check that all ranks agree."""
    layout = unit.spec.layout

    def from_rank_0(values: Tensor) -> None:
        with torch.no_grad():
            for parameter, slot in zip(unit.parameters, layout.slots, strict=True):
                values[slot.offset : slot.stop].view(slot.shape).copy_(parameter)
        collectives.broadcast(values, root=0, name=unit.spec.name).wait()

    def from_initialize(values: Tensor) -> None:
        assert initialize is not None, "chosen below"
        with collectives.group.agreed(f"initialise unit {unit.spec.name!r}"), torch.no_grad():
            for slot in layout.slots:
                initialize(slot.name, values[slot.offset : slot.stop].view(slot.shape))
        mine = np.array([_checksum(values)], dtype=np.uint32).view(np.uint8)
        agreed = collectives.agree(np.concatenate([mine, ~mine]), name=unit.spec.name)
        if not np.array_equal(agreed[:4], ~agreed[4:]):
            error = PlanError(
                f"initialize gave different values for unit {unit.spec.name!r} on different ranks; draw from a "
                "generator keyed by (seed, name), not from the global one"
            )
            error.agreed = True
            raise error

    return from_rank_0 if initialize is None else from_initialize


def _checksum(values: Tensor) -> int:
    # Not through values.numpy(): torch then refuses to give the storage back.
    return zlib.crc32((ctypes.c_ubyte * values.nbytes).from_address(values.data_ptr()))
