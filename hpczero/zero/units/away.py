"""Away: values and gradients of a unit that rest on a tier between uses.

Owns: when they have memory. Must not know: units' verbs, optimizers, windows, media, MPI. Nothing here is collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError, TierError
from hpczero.kernels.norm import squares
from hpczero.memory.buffers import DTYPES, Memory, lasting
from hpczero.plan import Stage
from hpczero.plan.layout import ShardLayout
from hpczero.plan.offloaded import ITEM
from hpczero.plan.precision import Precision
from hpczero.tier import Staged
from hpczero.zero.units.away_shard import (
    GRADIENT,
    MIRROR,
    SPARE,
    VALUES,
    AwayShard,
    GradientRest,
    Near,
    ResidentGradient,
    ResidentRest,
    SentNear,
    UnitStorage,
    floats,
    same_place,
)
from hpczero.zero.units.whole import WholeParameters


def empty(tensor: Tensor) -> None:
    """Take the memory from under ``tensor``, a whole storage, whose views stay what they are."""
    tensor.untyped_storage().resize_(0)


class AwayRest:
    """Values that rest on the tier; a Rest.

    Attributes:
        tensor: (numel,) fp32, without memory between uses.
        shard: on the tier.
        near: a copy in the parameter dtype that stays where the model computes; None: there is none.
    """

    def __init__(
        self, tensor: Tensor, shard: AwayShard, *, memory: Memory, near: Near | None = None
    ) -> None:
        """Not collective; ``tensor`` is emptied.

        Args:
            tensor: (numel,) fp32, a whole storage, of which views may have been made.
            shard: with a part for values.
            memory: ledger of what is held for a while.
            near: (numel,), see the attribute.
        """
        self.tensor, self.shard, self.near = tensor, shard, near
        self._memory = memory
        self._numel, self._depth = tensor.numel(), 0
        empty(tensor)

    def start(self) -> None:
        """As of any Rest."""
        if self.near is None:
            self.shard.start(VALUES)

    def read(self, into: Tensor) -> None:
        """From the copy in memory, where there is one and ``into`` has its dtype."""
        near = self.near
        if near is not None and into.dtype is near.tensor.dtype:
            near.settle()
            if not same_place(near.tensor, into):
                with torch.no_grad():
                    into.copy_(near.tensor)
        else:
            self.shard.read(VALUES, into)

    def write(self, values: Tensor) -> None:
        """As of any Rest."""
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


class AwayGradient:
    """A mean gradient that rests on the tier from its reduction to the step; a GradientRest.

    Attributes:
        failure: why it could not be read on this rank; None where it could.
    """

    resident = False

    def __init__(self, tensor: Tensor, shard: AwayShard, owned: int, *, memory: Memory) -> None:
        """Not collective; ``tensor`` is emptied.

        Args:
            tensor: (numel,) fp32, a whole storage.
            shard: with a part for the gradient.
            owned: elements that are no padding.
            memory: ledger.
        """
        self._tensor, self._shard, self._owned, self._memory = tensor, shard, owned, memory
        self._numel = tensor.numel()
        self._here = self._kept = False  # in memory; on the tier
        # What is on the tier will be multiplied by these; how many are in it already, by the begin of a window.
        self._factors: list[float] = []
        self._applied: dict[int, int] = {}
        self._squares: list[float] | None = None
        self.failure: TierError | None = None
        self.version = 0
        empty(tensor)

    @property
    def tensor(self) -> Tensor:
        """(numel,), what views are made of; it has memory from ``take`` to ``put_away``, and inside ``at_hand``."""
        return self._tensor

    def factors(self, window: range) -> Sequence[float]:
        """What a window of the gradient on the tier has to be multiplied by, one after the other."""
        return self._factors[self._applied.get(window.start, 0) :]

    def changed(self, window: range) -> None:
        """A window, multiplied by its factors, was changed by the optimizer, and its caller writes it to the tier."""
        self._applied[window.start] = len(self._factors)
        self._squares, self.version = None, self.version + 1

    @property
    def squares(self) -> list[float] | None:
        """Sums of squares of its parts, fp64, as ``norm.squares`` has them; None: to be computed."""
        return self._squares

    def take(self) -> None:
        """Memory for the gradient; what was put away is brought back into it."""
        if self._here:
            return
        self._tensor.untyped_storage().resize_(self._numel * ITEM)
        self._memory.add("gradients", self._numel * ITEM)
        self._here = True
        if self._kept:
            self._bring()
            for window in self._shard.windows:
                for factor in self.factors(window):
                    self._tensor.data[window.start : window.stop].mul_(factor)

    def _bring(self) -> None:
        """In backward nobody can raise: peers wait. What cannot be read is NaN until the step, which tells it."""
        try:
            self._shard.read(GRADIENT, self._tensor.data)
        except TierError as error:
            self.failure = error
            self._tensor.data.fill_(math.nan)

    def put_away(self) -> None:
        """The reduction has ended, or a change: the gradient goes to the tier, and its norm is noted on the way."""
        self._squares = squares([self._tensor.data[: self._owned]])
        self._shard.write(GRADIENT, self._tensor.data)
        self._kept = True
        self._factors.clear()
        self._applied.clear()
        self.version += 1
        self._empty()

    def drop(self) -> None:
        """Forget it."""
        self._empty()
        if self._kept:
            self._shard.drop([GRADIENT])
        self._kept, self._squares, self.failure = False, None, None
        self._factors.clear()
        self._applied.clear()
        self.version += 1

    def _empty(self) -> None:
        if self._here:
            empty(self._tensor)
            self._memory.add("gradients", -self._numel * ITEM)
            self._here = False

    def scale(self, factor: float) -> None:
        """Multiply what was put away, when it is brought back: no byte moves for it."""
        self._factors.append(factor)
        self._squares, self.version = None, self.version + 1

    @contextmanager
    def at_hand(self, *, changes: bool = False) -> Iterator[Tensor]:
        """In memory for the time of the block."""
        here = self._here
        self.take()
        try:
            yield self._tensor.data
        finally:
            if not here and changes:
                self.put_away()
            elif not here:
                self._empty()


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


# Mirrored: values in half precision that rest on a tier beside the fp32 ones, so that passes read half of the bytes.
#
#     pass    [ mirror ]                            where fp32 values would be read and cast
#     step    [ values | gradient | state ] in, [ values | state | mirror ] out
#
# The copy is what a cast of a window's values gives, bit for bit. It leaves memory in the same write as they do: either
# both are new or the write has failed for both.


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


def new_master(
    numel: int, owned: slice, whole: WholeParameters, precision: Precision, comm: Collectives
) -> Tensor:
    """(numel,) fp32 in memory: what is optimised where it does not rest elsewhere.

    Args:
        numel: elements of ``owned``.
        owned: of the whole buffer.
        whole: in fp32 the master is a part of its buffer where that lasts.
        precision: whether there are masters beside the parameters.
        comm: the transport, for memory.
    """
    if precision.has_masters or not whole.lasts:
        category = "master" if precision.has_masters else "parameters"
        return comm.allocate(numel, torch.float32, category=category).tensor
    return whole.flat[owned]


def keeps_values(away: AwayShard | None) -> bool:
    """Whether masters are on the tier."""
    return away is not None and VALUES in away.parts


def rest_of_values(
    master: Tensor,
    away: AwayShard | None,
    whole: WholeParameters,
    precision: Precision,
    comm: Collectives,
) -> UnitStorage:
    """Where ``master`` rests; it is emptied where that is not in memory."""
    if away is None or not keeps_values(away):
        return ResidentRest(master)
    if isinstance(away, MirroredShard):
        return MirroredRest(master, away, memory=comm.memory)
    copy = None
    if whole.lasts:
        copy = whole.flat[whole.mine]
    elif away.near:
        dtype = DTYPES[precision.param]
        copy = comm.allocate(master.numel(), dtype, category="parameters").tensor
    near = None
    if copy is not None:
        ascent = away.store.ascent
        near = Near(copy) if ascent is None else SentNear(copy, ascent)
    return AwayRest(master, away, memory=comm.memory, near=near)


def rest_of_gradient(
    layout: ShardLayout, away: AwayShard | None, stage: Stage, comm: Collectives
) -> GradientRest:
    """Where the mean gradient of a unit rests."""
    if away is not None and GRADIENT in away.parts:
        landing = lasting(layout.shard_numel, torch.float32, comm.device)
        owned = len(layout.shard_range(comm.group.index))
        return AwayGradient(landing, away, owned, memory=comm.memory)
    numel = layout.shard_numel if stage.shards_optimizer else layout.padded_numel
    return ResidentGradient(numel, memory=comm.memory, device=comm.device)
