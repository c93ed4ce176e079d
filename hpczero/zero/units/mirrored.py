"""Mirrored: values in half precision that rest on a tier beside the fp32 ones, so that passes read half of the bytes.

Owns: when that copy is made, read and forgotten. Must not know: units' verbs, optimizers, windows, media, MPI. Nothing
here is collective.

    pass    [ mirror ]                            where fp32 values would be read and cast
    step    [ values | gradient | state ] in, [ values | state | mirror ] out

The copy is what a cast of a window's values gives, bit for bit. It leaves memory in the same write as they do: either
both are new or the write has failed for both.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.memory.buffers import Memory
from hpczero.tier import Staged
from hpczero.zero.units.away import AwayRest
from hpczero.zero.units.away_shard import MIRROR, SPARE, VALUES, AwayShard, floats


class MirroredShard(AwayShard):
    """A shard whose mirror is made anew with its values, and forgotten with them."""

    @override
    def write_window(self, index: int, part: str, values: Tensor) -> None:
        if part != VALUES:
            super().write_window(index, part, values)
            return
        place, tier = self.places[index], self.store.tier
        self.store.forget([place])
        self.store.make_room(SPARE)
        staged = tier.fetch(place, [], fresh=[VALUES, MIRROR]).wait()
        with torch.no_grad():
            floats(staged, VALUES).copy_(values)
        mirrored(staged, self.dtype_of(MIRROR))
        tier.evict(staged, [VALUES, MIRROR])

    @override
    def read(self, part: str, into: Tensor) -> None:
        """A step that was cut off has windows whose values have no mirror any more; then values are read."""
        bare = any(VALUES in place.known and MIRROR not in place.known for place in self.places)
        super().read(VALUES if part == MIRROR and bare else part, into)

    @override
    def drop(self, parts: Iterable[str]) -> None:
        dropped = list(parts)
        super().drop([*dropped, *([MIRROR] if VALUES in dropped else [])])


class MirroredRest(AwayRest):
    """Values that rest on the tier, and are read in the dtype of the parameters; a Rest."""

    def __init__(self, tensor: Tensor, shard: MirroredShard, *, memory: Memory) -> None:
        """As of ``AwayRest``, without a copy in memory."""
        super().__init__(tensor, shard, memory=memory)

    @override
    def start(self) -> None:
        self.shard.start(MIRROR)

    @override
    def read(self, into: Tensor) -> None:
        """From the mirror where ``into`` has its dtype."""
        self.shard.read(MIRROR if into.dtype is self.shard.mirror else VALUES, into)

    @override
    def stepped(self, window: range, staged: Staged) -> list[str]:
        mirrored(staged, self.shard.dtype_of(MIRROR))
        return [MIRROR]


def mirrored(staged: Staged, dtype: torch.dtype) -> Tensor:
    """(elements,) ``MIRROR`` of what is staged, made from its values."""
    mirror = staged[MIRROR].view(dtype)
    with torch.no_grad():
        mirror.copy_(floats(staged, VALUES))
    return mirror
