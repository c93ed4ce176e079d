"""Away: values and gradients of a unit that rest on a tier between uses.

Owns: the cut of a rank's shard into records of the tier, and what is brought ahead of its use. Must not know: units'
verbs, optimizers, media, MPI. Nothing here is collective.

    window 0 of the unit   [ values | gradient | state a | state b ... ]   each part fp32, in a place of its own
    window 1               [ values | gradient | ...                   ]

[Note: Ahead]
Reads that nobody waits for yet hold blocks of staging. A read that is needed now takes those back before it could find
none, so reading ahead can be wrong, or too much, and nothing stops.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from hpczero.errors import StepError, TierError
from hpczero.kernels.norm import squares
from hpczero.memory.buffers import Memory
from hpczero.plan.windows import ITEM
from hpczero.tier import Fetch, Place, Record, Staged, Tier
from hpczero.zero.units.rest import same_place

VALUES, GRADIENT = "values", "gradient"
SPARE = 2  # blocks that reading ahead leaves alone: one to work in, one that is being written


class Store:
    """The tier of one model on this rank, and what is on its way from there.

    Attributes:
        tier: where everything rests.
        blocks: of its staging.
        window_nbytes: of one of them.
        device: where they lie.
    """

    def __init__(
        self, tier: Tier, *, blocks: int, window_nbytes: int, device: torch.device
    ) -> None:
        """For the arguments see the attributes."""
        self.tier, self.blocks, self.window_nbytes = tier, blocks, window_nbytes
        self.device = device
        self._ahead: dict[tuple[Place, str], Fetch] = {}

    def start(self, place: Place, part: str) -> bool:
        """Begin to read ``part``, if a block can be spared; whether it is on its way now. See [Note: Ahead]."""
        if (place, part) not in self._ahead:
            if len(self._ahead) + SPARE >= self.blocks:
                return False
            self._ahead[place, part] = self.tier.fetch(place, [part])
        return True

    def fetch(self, place: Place, parts: Sequence[str], *, fresh: Iterable[str] = ()) -> Fetch:
        """As of the tier; what was begun ahead is used, or makes room."""
        begun = self._ahead.pop((place, parts[0]), None) if len(parts) == 1 else None
        if begun is not None:
            return begun
        return self.tier.fetch(place, parts, fresh=fresh)

    def make_room(self, blocks: int) -> None:
        """Give up what was begun last until ``blocks`` are free for other reads."""
        while self._ahead and len(self._ahead) + blocks > self.blocks:
            _, fetch = self._ahead.popitem()
            self.tier.evict(fetch.wait(), [])

    def forget(self, places: Iterable[Place]) -> None:
        """What was begun ahead of these places will not be right any more."""
        wanted = set(places)
        for key in [key for key in self._ahead if key[0] in wanted]:
            self.tier.evict(self._ahead.pop(key).wait(), [])


class AwayShard:
    """A rank's shard of one unit, on the tier.

    Attributes:
        windows: elements of the shard in each record, ascending.
        places: of them.
        parts: what each record keeps.
        near: whether the parameters stay in memory besides, in their own dtype.
        store: of the rank.
    """

    def __init__(
        self,
        name: str,
        windows: Sequence[range],
        *,
        store: Store,
        parts: Sequence[str],
        near: bool,
    ) -> None:
        """Reserves room.

        Args:
            name: of the unit.
            windows: see the attribute; one of all parts fits into a block of staging.
            store: of the rank.
            parts: what is kept of every element, fp32 each.
            near: see the attribute.

        Raises:
            TierError: there is no such room.
        """
        self.store, self.parts, self.near = store, tuple(parts), near
        self.windows = list(windows)
        self.places = [
            store.tier.reserve(Record(f"{name} window {i}", {p: ITEM * len(w) for p in parts}))
            for i, w in enumerate(self.windows)
        ]

    def has(self, part: str) -> bool:
        """Whether ``part`` of any window was written."""
        return any(part in place.known for place in self.places)

    def start(self, part: str) -> None:
        """Begin to read ``part`` of all windows, as far as there is room."""
        for place in self.places:
            if not self.store.start(place, part):
                return

    def read(self, part: str, into: Tensor) -> None:
        """Copy ``part`` of the shard to ``into``, (numel,); zero for windows of which it was never written."""
        known = [part in place.known for place in self.places]
        for window, there in zip(self.windows, known, strict=True):
            if not there:
                into[window.start : window.stop].zero_()
        for window, staged in self._staged(part, known):
            with torch.no_grad():
                into[window.start : window.stop].copy_(floats(staged, part))
            self.store.tier.evict(staged, [])

    def write(self, part: str, values: Tensor) -> None:
        """Replace ``part`` of the shard by ``values``, (numel,); returns before they are written."""
        self.store.forget(self.places)
        self.store.make_room(SPARE)
        for window, place in zip(self.windows, self.places, strict=True):
            staged = self.store.tier.fetch(place, [], fresh=[part]).wait()
            with torch.no_grad():
                floats(staged, part).copy_(values[window.start : window.stop])
            self.store.tier.evict(staged, [part])

    def drop(self, parts: Iterable[str]) -> None:
        """Forget these parts of the shard, and what went wrong with them."""
        self.store.forget(self.places)
        for place in self.places:
            self.store.tier.forget(place, parts)

    def _staged(self, part: str, wanted: Sequence[bool]) -> Iterator[tuple[range, Staged]]:
        """Each window that is wanted with its part in memory; the next one is on its way meanwhile."""
        self.store.make_room(SPARE)
        on_its_way: deque[tuple[range, Fetch]] = deque()
        todo = itertools.compress(zip(self.windows, self.places, strict=True), wanted)
        try:
            while True:
                for window, place in itertools.islice(todo, SPARE - len(on_its_way)):
                    on_its_way.append((window, self.store.fetch(place, [part])))
                if not on_its_way:
                    return
                before, fetch = on_its_way.popleft()
                yield before, fetch.wait()
        finally:
            for _, fetch in on_its_way:
                with suppress(TierError):
                    self.store.tier.evict(fetch.wait(), [])


class Away:
    """All of one model on this rank that rests on a tier.

    Attributes:
        shards: of each trainable unit, by its name; empty where nothing is offloaded.
        store: where; None then.
        read_ahead: units whose parameters are read before they are used.
    """

    def __init__(
        self, shards: Mapping[str, AwayShard], store: Store | None, read_ahead: int = 0
    ) -> None:
        """For the arguments see the attributes."""
        self.shards, self.store, self.read_ahead = shards, store, read_ahead

    def close(self) -> None:
        """What rests there is lost."""
        if self.store is not None:
            self.store.tier.close()


NOTHING_AWAY = Away({}, None)


def floats(staged: Staged, part: str) -> Tensor:
    """(elements,) fp32: ``part`` as it lies in staging."""
    return staged[part].view(torch.float32)


def empty(tensor: Tensor) -> None:
    """Take the memory from under ``tensor``, a whole storage, whose views stay what they are."""
    tensor.untyped_storage().resize_(0)


class AwayRest:
    """Values that rest on the tier; a Rest.

    Attributes:
        tensor: (numel,) fp32, without memory between uses.
        shard: on the tier.
    """

    def __init__(
        self, tensor: Tensor, shard: AwayShard, *, memory: Memory, near: Tensor | None = None
    ) -> None:
        """Not collective; ``tensor`` is emptied.

        Args:
            tensor: (numel,) fp32, a whole storage, of which views may have been made.
            shard: with a part for values.
            memory: ledger of what is held for a while.
            near: (numel,) in the parameter dtype: a copy that stays in memory, from which gathers read.
        """
        self.tensor, self.shard, self._near = tensor, shard, near
        self._memory = memory
        self._numel, self._depth = tensor.numel(), 0
        empty(tensor)

    def start(self) -> None:
        """As of any Rest."""
        if self._near is None:
            self.shard.start(VALUES)

    def read(self, into: Tensor) -> None:
        """From the copy in memory, where there is one and ``into`` has its dtype."""
        if self._near is not None and into.dtype is self._near.dtype:
            if not same_place(self._near, into):
                with torch.no_grad():
                    into.copy_(self._near)
        else:
            self.shard.read(VALUES, into)

    def write(self, values: Tensor) -> None:
        """As of any Rest."""
        self.shard.write(VALUES, values)
        if self._near is not None:
            with torch.no_grad():
                self._near.copy_(values)

    def updated(self, window: range, values: Tensor) -> None:
        """The optimizer has made ``values`` of a window, which its caller writes to the tier."""
        if self._near is not None:
            with torch.no_grad():
                self._near[window.start : window.stop].copy_(values)

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
    """A mean gradient that rests on the tier from its reduction to the step; a GradientRest."""

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
            self._shard.read(GRADIENT, self._tensor.data)
            for window in self._shard.windows:
                for factor in self.factors(window):
                    self._tensor.data[window.start : window.stop].mul_(factor)

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
        self._kept, self._squares = False, None
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
