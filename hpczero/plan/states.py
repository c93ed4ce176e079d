"""StateBytes: what an optimizer keeps of each element, between steps and while it steps on a unit.

Owns: the bytes of the optimizers that the plan command knows. Must not know: torch, how a step is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpczero.plan.layout import ShardLayout

ADAM_STATE_BYTES = 8


@dataclass(frozen=True)
class StateBytes:
    """Of one kind of optimizer.

    Attributes:
        element: bytes of an element between steps.
        blocks: whether they are codes in whole blocks, which the padding of a unit has too.
        decoded: bytes of an element of the one unit that is stepped on.
    """

    element: float
    blocks: bool = False
    decoded: int = 0

    @classmethod
    def of(cls, given: float | StateBytes) -> StateBytes:
        """A number is bytes of an element, without codes."""
        return given if isinstance(given, StateBytes) else cls(given)

    def held(self, layouts: Sequence[ShardLayout], *, sharded: bool) -> int:
        """Bytes between steps of the first rank, which has the least padding.

        Args:
            layouts: of trained units.
            sharded: whether each rank has state of its own shards alone.
        """
        if self.blocks:
            sizes = (each.shard_numel if sharded else each.padded_numel for each in layouts)
        else:
            sizes = (len(each.shard_range(0)) if sharded else each.numel for each in layouts)
        return int(self.element * sum(sizes))

    def stepping(self, layouts: Sequence[ShardLayout], *, sharded: bool) -> int:
        """Bytes beside them while the largest unit is stepped on."""
        sizes = (each.shard_numel if sharded else each.padded_numel for each in layouts)
        return self.decoded * max(sizes, default=0)


# By the name that the plan command has for an optimizer.
STATE_BYTES = {
    "adamw": StateBytes(ADAM_STATE_BYTES),
    "adamw8bit": StateBytes(17 / 8, blocks=True, decoded=8),
}
STATE_TITLES = {"adamw": "optimizer (Adam)", "adamw8bit": "optimizer (8 bits)"}
