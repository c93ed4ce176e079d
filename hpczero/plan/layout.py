"""ShardLayout: which element of a unit lives on which rank.

Owns: the place of every parameter in a unit's flat buffer and the cut of that buffer into equal shards. Must not know:
MPI, torch, dtypes, modules. Unit views, checkpoints, memory prediction and resharding all ask here.

    parameters, end to end      [ wte ......... | wpe .. | ln | padding ]      numel, then padded_numel
    shards, equal               [ s = 0 | s = 1 | s = 2 | s = 3         ]      shard_numel each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

# Shards start on cache-line and NIC-friendly boundaries: 64 elements are 256 bytes in fp32, 128 in bf16.
DEFAULT_ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """Place of one parameter in the flat buffer; ``offset`` and ``numel`` count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        """First element after the parameter."""
        return self.offset + self.numel


@dataclass(frozen=True)
class ShardLayout:
    """Where each parameter lies in a unit's flat buffer and which shard owns which range.

    ``rank`` counts shards in buffer order everywhere in this class. The topology decides which process holds which
    shard (rail-major ownership).

    Attributes:
        slots: parameters in buffer order, without gaps.
        num_shards: ranks that share the buffer.
        align: every shard is a multiple of this many elements.
    """

    slots: tuple[Slot, ...]
    num_shards: int
    align: int = DEFAULT_ALIGN
    _by_name: dict[str, Slot] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.align < 1:
            raise ValueError(
                f"num_shards and align must be at least 1, got {self.num_shards} and {self.align}"
            )
        by_name = {slot.name: slot for slot in self.slots}
        if len(by_name) != len(self.slots):
            raise ValueError("parameter names of one layout must be distinct")
        object.__setattr__(self, "_by_name", by_name)

    @classmethod
    def pack(
        cls,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        num_shards: int,
        *,
        align: int = DEFAULT_ALIGN,
    ) -> ShardLayout:
        """Lay parameters end to end in the given order.

        Args:
            shapes: (name, shape) of each parameter; empty and zero-size parameters are fine.
            num_shards: ranks that share the buffer.
            align: elements every shard is rounded up to.

        Raises:
            ValueError: a name comes twice, or a count is below 1.
        """
        slots = []
        offset = 0
        for name, shape in shapes:
            slots.append(Slot(name, tuple(shape), offset, prod(shape)))
            offset += slots[-1].numel
        return cls(tuple(slots), num_shards, align)

    @cached_property  # a search over layouts asks millions of times
    def numel(self) -> int:
        """Elements of all parameters, padding excluded."""
        return self.slots[-1].stop if self.slots else 0

    @cached_property
    def shard_numel(self) -> int:
        """Elements of each shard, padding included; equal on every rank."""
        per_shard = -(-self.numel // self.num_shards)
        return -(-per_shard // self.align) * self.align

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.shard_numel * self.num_shards

    def shard_range(self, rank: int) -> range:
        """Elements that ``rank`` stores, padding excluded; may be empty on the last ranks."""
        start = min(rank * self.shard_numel, self.numel)
        return range(start, min(start + self.shard_numel, self.numel))

    def slot(self, name: str) -> Slot:
        """The slot of parameter ``name``.

        Raises:
            KeyError: the parameter is not in this layout.
        """
        return self._by_name[name]

    def overlap(self, rank: int, name: str) -> range:
        """Elements of parameter ``name``, counted inside that parameter, that ``rank`` stores."""
        slot = self._by_name[name]
        mine = self.shard_range(rank)
        start = max(mine.start - slot.offset, 0)
        return range(start, max(min(mine.stop - slot.offset, slot.numel), start))
