"""Marks: how a rank whose medium has failed tells its peers so through a gather.

Owns: the mark, and the search for it. Must not know: tiers' media, units' verbs, MPI. Nothing here is collective.

A rank cannot raise where its peers wait for its part of a collective: they would wait for ever. It takes part with a
mark in the place of its values, a NaN of bits that no arithmetic makes, and all ranks raise once the gather has ended.
No message more is sent for it (issue 18).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpczero.errors import TierError

# Quiet NaNs: by the bytes of an element, and for half types with both exponents.
BITS = {4: (torch.int32, 0x7FD1BAD5), 2: (torch.int16, 0x7FD1)}


class Marks:
    """Of the gathers of one unit, one at a time."""

    def __init__(self, name: str, *, rank: int, shards: int, is_job: bool) -> None:
        """For messages the unit's name and this rank; ``shards`` ranks, perhaps all of the job, give a part each."""
        self._is_job = is_job
        self._name, self._rank, self._shards = name, rank, shards
        self._error: TierError | None = None

    def read(self, read: Callable[[Tensor], None], into: Tensor) -> None:
        """Call ``read`` with ``into``, (shard_numel,), which is marked where that fails."""
        self._error = None
        try:
            read(into)
        except TierError as error:
            self._error = error
            kind, bits = BITS[into.element_size()]
            with torch.no_grad():
                into.view(kind).fill_(bits)

    def found(self, flat: Tensor) -> TierError | None:
        """What all ranks are to raise, if one of them has marked its part of ``flat``, (padded_numel,)."""
        kind, bits = BITS[flat.element_size()]
        firsts = flat.detach().view(kind).view(self._shards, -1)[:, :1]
        ranks = [rank for rank, first in enumerate(firsts.flatten().tolist()) if first == bits]
        if not ranks:
            return None
        if self._error is not None:
            error = TierError(
                f"rank {self._rank}: parameters of unit {self._name!r}: {self._error}"
            )
        else:
            error = TierError(
                f"rank {self._rank}: parameters of unit {self._name!r} could not be read from the memory tier of "
                f"rank(s) {ranks}, which say why"
            )
        error.agreed = self._is_job
        return error
