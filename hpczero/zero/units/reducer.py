"""Reducer: how the gradients of all ranks become the mean that a rank keeps its part of.

Owns: the contract, and the exact way. Must not know: units, stages, what becomes of the mean (issue 17, seam S7).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from hpczero.comm.collectives import Collectives, Work


class Reducer(Protocol):
    """One for each model; units call it in the same order on every rank."""

    def reduce(
        self, local: Tensor, into: Tensor, *, scale: float, accumulate: bool, name: str
    ) -> Work:
        """Start ``into (+)= scale *`` this rank's part of the sum of every rank's ``local``. Collective.

        Args:
            local: (num_shards * shard_numel,) fp32, bf16 or fp16; not changed, and kept until the work is done.
            into: (shard_numel,) fp32.
            scale: multiplies the sum.
            accumulate: add to ``into`` instead of replacing it.
            name: of the unit; what a reducer keeps from one step to the next, it keeps by this name.
        """
        ...


class ExactReducer:
    """The sum of the transport: fp32, in one order, whatever the ranks and nodes."""

    def __init__(self, comm: Collectives) -> None:
        """Not collective; ``comm`` is borrowed."""
        self._comm = comm

    def reduce(
        self, local: Tensor, into: Tensor, *, scale: float, accumulate: bool, name: str
    ) -> Work:
        """The transport's own ``reduce_scatter``."""
        comm = self._comm
        return comm.reduce_scatter(local, into, scale=scale, accumulate=accumulate, name=name)
