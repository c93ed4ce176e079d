"""UnitSpec: one communicated group of parameters, as the plan describes it.

Owns: what is said of a unit. Must not know: torch, how units are found, buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.plan.codec import Codec
from hpczero.plan.layout import ShardLayout


@dataclass(frozen=True)
class UnitSpec:
    """One communicated group of parameters.

    Attributes:
        name: the first module's name, or ``root`` for what belongs to no other unit. `` (frozen)`` marks a frozen part.
        modules: names of the modules whose calls need the parameters; ``""`` is the model itself.
        layout: parameters (qualified names) in registration order, divided over the shard group.
        groups: optimizer group of each slot; -1 for frozen parameters.
        trainable: whether gradients, masters and optimizer state exist.
        uncounted: slots that another rank counts in norms, because it holds the same (``Placement.counted``).
        partial: slots of whose gradients every tensor rank has a part of the sum (``Placement.partial``).
        kept: slots that every tensor rank holds whole, where the model is a part of one.
        codec: form in which the values rest and travel, if that is not their own.
    """

    name: str
    modules: tuple[str, ...]
    layout: ShardLayout
    groups: tuple[int, ...]
    trainable: bool
    uncounted: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    codec: Codec | None = None

    @property
    def rest_nbytes(self) -> int | None:
        """Bytes of a shard in the form of ``codec``; None without one."""
        return None if self.codec is None else self.codec.nbytes(self.layout.shard_numel)

    @property
    def is_root(self) -> bool:
        """Whether the unit lives from the start of the model's forward to its end."""
        return self.modules == ("",)
