"""Away: values and gradients of a unit that rest on a tier between uses.

Nothing here is collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError, TierError
from hpczero.kernels.norm import squares
from hpczero.memory.buffers import Buffer, Memory
from hpczero.plan import Stage
from hpczero.plan.layout import ShardLayout
from hpczero.plan.offloaded import ITEM
from hpczero.plan.precision import Precision
from hpczero.tier import Staged
from hpczero.zero.units.away_shard import (
    GRADIENT,
    MIRROR,
    VALUES,
    AwayShard,
    GradientRest,
    Near,
    UnitStorage,
    floats,
    same_place,
)
from hpczero.zero.units.whole import WholeParameters


def empty(tensor: Tensor) -> None:
    """Take the memory from under ``tensor``, a whole storage, whose views stay what they are."""
    tensor.untyped_storage().resize_(0)


class AwayRest(UnitStorage):
    """Values that rest on the tier, (numel,) fp32; ``tensor`` has no memory between uses.

    Attributes:
        shard: on the tier.
        near: a copy in the parameter dtype that stays where the model computes; None: there is none.
    """

    def __init__(
        self, tensor: Tensor, shard: AwayShard, *, memory: Memory, near: Near | None = None
    ) -> None:
        """Empties ``tensor``, a whole storage of which views may have been made. ``memory``: ledger."""
        super().__init__(tensor)
        self.shard, self.near = shard, near
        self._memory = memory
        self._numel, self._depth = tensor.numel(), 0
        empty(tensor)

    def start(self) -> None:
        """Begin to read."""
        if self.near is None:
            self.shard.start(MIRROR if self.shard.mirrored else VALUES)

    def read(self, into: Tensor) -> None:
        """From the copy in memory or from the mirror, where there is one and ``into`` has its dtype."""
        near = self.near
        if near is not None and into.dtype is near.tensor.dtype:
            near.settle()
            if not same_place(near.tensor, into):
                with torch.no_grad():
                    into.copy_(near.tensor)
        else:
            mirror = self.shard.mirrored and into.dtype is self.shard.mirror
            self.shard.read(MIRROR if mirror else VALUES, into)

    def write(self, values: Tensor) -> None:
        """To the tier, and to the copy in memory."""
        if self.near is not None:
            self.near.settle()  # it may be sent from where they rest
        self.shard.write(VALUES, values)
        if self.near is not None:
            self.near.updated(range(self._numel), values)

    def updated(self, window: range, values: Tensor) -> None:
        """There are new ``values`` of a window, which its caller writes to the tier; not before this returns."""
        if self.near is not None:
            self.near.updated(window, values)

    def stepped(self, window: range, staged: Staged) -> list[str]:
        """A step has left new values of a window in staging; returns parts that were made from them there."""
        if self.shard.mirrored:
            self.shard.renew_mirror(staged)
            return [MIRROR]
        self.updated(window, floats(staged, VALUES))
        return []

    @contextmanager
    def at_hand(self, *, changes: bool = False, anew: bool = False) -> Iterator[Tensor]:
        """Brought into memory for the time of the block; ``anew`` reads nothing, so it is the way out of a bad read."""
        # A program's views of it have versions; bringing values is no change.
        values = self.tensor.data
        if not self._depth:
            values.untyped_storage().resize_(self._numel * ITEM)
            self._memory.add("at hand", self._numel * ITEM)
        self._depth += 1
        try:
            if self._depth == 1:
                if anew:
                    values.zero_()
                else:
                    self.shard.read(VALUES, values)
            yield values
            if changes:
                self.write(values)
        finally:
            self._depth -= 1
            if not self._depth:
                empty(values)
                self._memory.add("at hand", -self._numel * ITEM)


class AwayGradient(GradientRest):
    """A mean gradient that rests on the tier from its reduction to the step."""

    resident = False

    def __init__(
        self, numel: int, shard: AwayShard, owned: int, *, memory: Memory, device: torch.device
    ) -> None:
        """``owned``: elements that are no padding."""
        self._buffer = Buffer(
            numel, torch.float32, memory=memory, category="gradients", device=device
        )
        self._buffer.release()
        self._shard, self._owned = shard, owned
        self._kept = False  # on the tier
        # What is on the tier will be multiplied by these; how many are in it already, by the begin of a window.
        self._factors: list[float] = []
        self._applied: dict[int, int] = {}
        self._changes = 0

    @property
    @override
    def tensor(self) -> Tensor:
        return self._buffer.tensor

    @property
    @override
    def version(self) -> int:
        return self._changes

    def factors(self, window: range) -> Sequence[float]:
        """What a window of the gradient on the tier has to be multiplied by, one after the other."""
        return self._factors[self._applied.get(window.start, 0) :]

    def changed(self, window: range) -> None:
        """A window, multiplied by its factors, was changed by the optimizer, and its caller writes it to the tier."""
        self._applied[window.start] = len(self._factors)
        self._note(None)

    def _note(self, squares: list[float] | None) -> None:
        """The gradient is another one, with these sums of squares."""
        self.squares = squares
        self._changes += 1

    @override
    def take(self) -> None:
        if self._buffer.held:
            return
        self._buffer.take()
        if not self._kept:
            return
        values = self.tensor.data
        try:
            self._shard.read(GRADIENT, values)
        except TierError as error:
            # In backward nobody can raise: peers wait. What cannot be read is NaN until the step, which tells it.
            self.failure = error
            values.fill_(math.nan)
        for window in self._shard.windows:
            for factor in self.factors(window):
                values[window.start : window.stop].mul_(factor)

    @override
    def put_away(self) -> None:
        """The reduction has ended, or a change: the gradient goes to the tier, and its norm is noted on the way."""
        values = self.tensor.data
        found = squares([values[: self._owned]])
        self._shard.write(GRADIENT, values)
        self._kept = True
        self._forget_factors()
        self._note(found)
        self._buffer.release()

    @override
    def drop(self) -> None:
        self._buffer.release()
        if self._kept:
            self._shard.drop([GRADIENT])
        self._kept, self.failure = False, None
        self._forget_factors()
        self._note(None)

    def _forget_factors(self) -> None:
        self._factors.clear()
        self._applied.clear()

    @override
    def scale(self, factor: float) -> None:
        """No byte moves for it: it is done when the gradient is brought back."""
        self._factors.append(factor)
        self._note(None)

    @override
    @contextmanager
    def at_hand(self, *, changes: bool = False) -> Iterator[Tensor]:
        here = self._buffer.held
        self.take()
        try:
            yield self.tensor.data
        finally:
            if not here and changes:
                self.put_away()
            elif not here:
                self._buffer.release()


def check_at_hand(piece: Tensor) -> None:
    """Refuse to read or write memory that is not there.

    Raises:
        StepError: says where the values are.
    """
    with torch._C.DisableTorchFunctionSubclass():
        here = not piece.numel() or piece.untyped_storage().nbytes()
    if not here:
        raise StepError(
            "a parameter or gradient in optimizer.param_groups rests on a memory tier (offload), and is not in memory "
            "between steps. Norms and clipping work through hpczero.clip_grad_norm_; values are whole inside "
            "`with hpczero.gathered(model):`; or leave it on the device"
        )


def new_master(
    numel: int, owned: slice, whole: WholeParameters, precision: Precision, comm: Collectives
) -> Tensor:
    """(numel,) fp32 in memory, of the ``owned`` elements: what is optimised where it does not rest elsewhere.

    In fp32 the master is a part of the whole buffer where that lasts.
    """
    if precision.has_masters or not whole.lasts:
        category = "master" if precision.has_masters else "parameters"
        return comm.allocate(numel, torch.float32, category=category).tensor
    return whole.flat[owned]


def keeps_values(away: AwayShard | None) -> bool:
    """Whether masters are on the tier."""
    return away is not None and VALUES in away.parts


def rest_of_values(
    master: Tensor, away: AwayShard | None, whole: WholeParameters, comm: Collectives
) -> UnitStorage:
    """Where ``master`` rests; it is emptied where that is not in memory."""
    if away is None or not keeps_values(away):
        return UnitStorage(master)
    near = None
    if whole.lasts and not away.mirrored:
        near = Near(whole.flat[whole.mine], away.store.ascent)
    elif away.near:
        copy = comm.allocate(master.numel(), whole.flat.dtype, category="parameters")
        near = Near(copy.tensor, away.store.ascent)
    return AwayRest(master, away, memory=comm.memory, near=near)


def rest_of_gradient(
    layout: ShardLayout, away: AwayShard | None, stage: Stage, comm: Collectives
) -> GradientRest:
    """Where the mean gradient of a unit rests."""
    if away is not None and GRADIENT in away.parts:
        owned = len(layout.shard_range(comm.group.index))
        return AwayGradient(layout.shard_numel, away, owned, memory=comm.memory, device=comm.device)
    numel = layout.shard_numel if stage.shards_optimizer else layout.padded_numel
    return GradientRest(numel, memory=comm.memory, device=comm.device)
