"""Replicas: values and gradients that every rank holds whole and updates by itself, which must stay the same bits.

Owns: how they are compared, and what is said where they differ. Must not know: optimizers, what changed them, when.

At stage 0 nothing brings ranks together again after an update. Noise drawn with a seed of its own on each rank, in the
optimizer or in what a loop adds to a gradient, would let them drift apart for ever. One pass over memory per step finds
it (see bits).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError
from hpczero.kernels.bits import sum_of_bits
from hpczero.zero.units.unit import Unit


class Replicas:
    """Of the trainable units of one model. Where the optimizer is sharded there are none."""

    def __init__(self, units: Sequence[Unit], comm: Collectives) -> None:
        """Not collective."""
        self._units = list(units)
        self._comm = comm

    def word(self) -> int:
        """A uint32 that is equal on all ranks where all they hold is; not collective. One transfer from a device."""
        return zlib.crc32(np.array(self._sums(), dtype=np.int64).tobytes())

    def check(self) -> None:
        """Raise if ranks hold different replicas. Collective over world.

        Raises:
            StepError: on every rank; where a rank differs from rank 0, of the first unit in which it does.
        """
        mine = np.array(self._sums(), dtype=np.int64)
        if not len(mine) or self._comm.everybody.size == 1:
            return
        # Bytes as numbers: those of an int64 may be a NaN, which equals nothing, or more than an fp64 tells apart.
        everybody = self._comm.share(
            mine.view(np.uint8).astype(np.float64), name="replicas", replicas=True
        )
        with self._comm.everybody.agreed("compare what ranks have updated"):
            differ = (everybody[self._comm.everybody.rank] != everybody[0]).reshape(-1, 2, 8)
            of_units = differ.any(axis=2)
            if of_units.any():
                first = int(of_units.any(axis=1).argmax())
                what = "parameters" if of_units[first, 0] else "gradients"
                raise StepError(
                    f"rank {self._comm.rank}, step {self._comm.calls.step}: the {what} of unit "
                    f"{self._units[first].spec.name!r} that the optimizer holds are not those of rank 0, and at stage "
                    "0 every rank updates all of them by itself (random numbers with a seed of each rank's own, in "
                    "the optimizer or in what is done to optimizer.param_groups?). Use stage=1, which costs nothing "
                    "more, or draw the same random numbers on all ranks"
                )

    def _sums(self) -> list[int]:
        """(units * 2,) of the values and of the gradients of each."""
        if self._comm.everybody.size == 1:
            return []
        held = list(itertools.chain.from_iterable(unit.replicas for unit in self._units))
        if not held:
            return []
        return [int(total) for total in torch.stack([sum_of_bits(t) for t in held]).tolist()]
