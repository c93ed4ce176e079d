"""AwayShard: a rank's shard of one unit on a tier, and what is on its way from there.

Nothing here is collective.

    window 0 of the unit   [ values | gradient | state a | state b ... ]   each part in a place of its own, fp32
    window 1               [ values | gradient | ...                   ]   but for a mirror of values, if there is one

[Note: Ahead]
Reads that nobody waits for yet hold blocks of staging. A read that is needed now takes those back before it could find
none, so reading ahead can be wrong, or too much, and nothing stops.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, Mark
from hpczero.errors import TierError
from hpczero.memory.buffers import Memory, lasting
from hpczero.plan.offloaded import ITEM
from hpczero.tier import Fetch, Place, Record, Staged, Tier, Traffic

# Rest: where what this rank keeps of one unit, values and mean gradient, lies between uses.
#
# A unit asks for its values in four ways: it copies them out, replaces them, works on them where they are, and says
# ahead of time that it will want them. Only the tier knows where they lie meanwhile. A gradient is
# made in backward, and gone after the step.


class UnitStorage:
    """The values of one unit on this rank, in a tensor that is always at hand. Subclasses have them elsewhere.

    Attributes:
        tensor: (numel,) what views are made of; only inside ``at_hand`` they can be read.
    """

    def __init__(self, tensor: Tensor) -> None:
        """``tensor``: (numel,), which may be a part of the buffer that whole parameters are views of."""
        self.tensor = tensor

    def start(self) -> None:
        """Begin to bring the values, which will be read soon; ``read`` brings them too."""

    def read(self, into: Tensor) -> None:
        """Copy the values to ``into``, (numel,) of any floating dtype; nothing where that is where they are."""
        if not same_place(self.tensor, into):
            with torch.no_grad():
                into.copy_(self.tensor)

    def write(self, values: Tensor) -> None:
        """Replace the values by ``values``, (numel,) of any floating dtype."""
        if not same_place(self.tensor, values):
            with torch.no_grad():
                self.tensor.copy_(values)

    @contextmanager
    def at_hand(self, *, changes: bool = False, anew: bool = False) -> Iterator[Tensor]:
        """The values in memory, (numel,), to be read inside, and written with ``changes``.

        With ``anew`` all of them are written inside; before that they may be zero.
        """
        yield self.tensor


class GradientRest:
    """The mean gradient of one unit on this rank, in memory that is taken anew for every step.

    Whoever still points at an old one keeps it. A subclass has it elsewhere between uses.

    Attributes:
        resident: it has memory all the time.
        squares: sums of squares of its parts, as ``norm.squares`` has them, where they are known; None elsewhere.
        failure: why it is not what was reduced, on this rank alone; None where it is.
    """

    resident = True
    squares: list[float] | None = None
    failure: TierError | None = None

    def __init__(self, numel: int, *, memory: Memory, device: torch.device) -> None:
        """Not held: while activations are at their most, in forward, there are no gradients yet."""
        self._numel, self._memory, self._device = numel, memory, device
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        """(numel,) fp32; has memory from ``take`` to ``put_away``, and inside ``at_hand``."""
        assert self._tensor is not None, "held"
        return self._tensor

    @property
    def version(self) -> int:
        """Another number where the gradient may have changed."""
        return self.tensor._version

    def take(self) -> None:
        """Memory for it; a gradient that was put away is in it again, else the content is undefined."""
        if self._tensor is None:
            self._tensor = lasting(self._numel, torch.float32, self._device)
            self._memory.add("gradients", self._tensor.nbytes)

    def put_away(self) -> None:
        """Nobody works on it before the next ``take`` or ``at_hand``."""

    def drop(self) -> None:
        """Forget it."""
        if self._tensor is not None:
            self._memory.add("gradients", -self._tensor.nbytes)
            self._tensor = None

    def scale(self, factor: float) -> None:
        """Multiply what was put away."""
        self.tensor.mul_(factor)

    @contextmanager
    def at_hand(self, *, changes: bool = False) -> Iterator[Tensor]:
        """``tensor`` in memory, to be read inside, and written with ``changes``."""
        yield self.tensor


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two flat tensors begin at the same element of the same storage, whether or not it has memory now."""
    alias: bool = torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]
    return alias and one.storage_offset() == other.storage_offset()


SENT = "near"  # what moves, as traffic has it


class Ascent:
    """The way of updated parameters from memory of the host up to the device; of one rank.

    Attributes:
        accelerator: of the device.
        lane: of its own.
        traffic: where the bytes are counted.
    """

    def __init__(self, accelerator: Accelerator, traffic: Traffic) -> None:
        self.accelerator, self.traffic = accelerator, traffic
        self.lane = accelerator.lane()


class Near:
    """Values in the dtype of the parameters where the model computes. Whoever makes new ones brings them here.

    Attributes:
        tensor: (numel,) where the model computes.
        sent: behind the last of what the host has sent; None where all has arrived.
    """

    def __init__(self, tensor: Tensor, ascent: Ascent | None) -> None:
        """``ascent``: where the host makes new values, which are sent beside other work."""
        self.tensor, self._ascent = tensor, ascent
        self.sent: Mark | None = None

    def settle(self) -> None:
        """Return when all that was sent has arrived: what is started on the device afterwards may read at once."""
        if self.sent is not None:
            self.sent.wait()
            self.sent = None

    def updated(self, window: range, values: Tensor) -> None:
        """Elements of ``window`` are ``values`` now, wherever those are; they may change when this returns."""
        self.settle()
        with torch.no_grad():
            self.tensor[window.start : window.stop].copy_(values)

    def send(self, window: range, values: Tensor) -> None:
        """Start to bring elements of ``window``; nobody may change ``values`` before ``settle``.

        ``values``: (elements,) in the dtype of the parameters, in memory that the device copies from.
        """
        ascent = self._ascent
        assert ascent is not None, "the host steps"
        ascent.lane.after(ascent.accelerator.mark())  # the device may still read what was there
        with torch.no_grad():
            ascent.lane.copy(self.tensor[window.start : window.stop], values)
        self.sent = ascent.lane.mark()
        ascent.traffic.read({SENT: values.nbytes})


VALUES, GRADIENT = "values", "gradient"
MIRROR = "mirror"  # values in the dtype of the parameters: passes read it, or the host sends it
SPARE = 2  # blocks that reading ahead leaves alone: one to work in, one that is being written


@dataclass(eq=False)
class UnitStore:
    """The tier of one model on this rank, and what is on its way from there.

    Attributes:
        tier: where everything rests.
        blocks: of its staging.
        window_nbytes: of one of them.
        device: where they lie.
        ascent: the way of values up to the device, where the host steps on what rests there; None: the device steps.
        delayed: whether the host does so while the next batch is computed.
    """

    tier: Tier
    blocks: int
    window_nbytes: int
    device: torch.device
    ascent: Ascent | None = None
    delayed: bool = False
    _ahead: dict[tuple[Place, str], Fetch] = field(default_factory=dict)

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
            return _Begun(begun, self.tier, place, parts)
        return self.tier.fetch(place, parts, fresh=fresh)

    def make_room(self, blocks: int) -> None:
        """Give up what was begun last until ``blocks`` are free for other reads."""
        while self._ahead and len(self._ahead) + blocks > self.blocks:
            _, fetch = self._ahead.popitem()
            self.give_up(fetch)

    def forget(self, places: Iterable[Place]) -> None:
        """What was begun ahead of these places will not be right any more."""
        wanted = set(places)
        for key in [key for key in self._ahead if key[0] in wanted]:
            self.give_up(self._ahead.pop(key))

    def keep(self, places: Collection[Place]) -> None:
        """Give up what was begun ahead of other places, if ``places`` could not all be read ahead otherwise."""
        if len(self._ahead) + len(places) + SPARE > self.blocks:
            self.forget({place for place, _ in self._ahead}.difference(places))

    def give_up(self, fetch: Fetch) -> None:
        """Its block goes back. That it could not be read is told to whoever wants it."""
        with suppress(TierError):
            self.tier.evict(fetch.wait(), [])


class _Begun(Fetch):
    """A read that was begun ahead. It may have failed long ago, so whoever wants it now is told of a new one."""

    def __init__(self, fetch: Fetch, tier: Tier, place: Place, parts: Sequence[str]) -> None:
        self.name = fetch.name
        self._fetch, self._tier, self._place, self._parts = fetch, tier, place, parts

    @override
    def wait(self) -> Staged:
        try:
            return self._fetch.wait()
        except TierError:
            self._fetch = self._tier.fetch(self._place, self._parts)
            return self._fetch.wait()


# [Note: Mirror]
# Values in half precision rest beside the fp32 ones, so that passes read half of the bytes.
#
#     pass    [ mirror ]                            where fp32 values would be read and cast
#     step    [ values | gradient | state ] in, [ values | state | mirror ] out
#
# The copy is what a cast of a window's values gives, bit for bit. It leaves memory in the same write as they do: either
# both are new or the write has failed for both.


class AwayShard:
    """A rank's shard of one unit, on the tier.

    Attributes:
        windows: elements of the shard in each record, ascending.
        places: of them.
        parts: what each record keeps of every element, fp32 each.
        near: whether the parameters stay in memory besides, in their own dtype.
        store: of the rank.
        mirror: dtype of ``MIRROR``; None: there is none.
        mirrored: whether passes read the mirror: see [Note: Mirror].
    """

    def __init__(
        self,
        name: str,
        windows: Sequence[range],
        *,
        store: UnitStore,
        parts: Sequence[str],
        near: bool,
        mirror: torch.dtype | None = None,
    ) -> None:
        """Reserves room. All parts of one window fit into a block of staging.

        Raises:
            TierError: there is no such room.
        """
        self.store, self.parts, self.near = store, tuple(parts), near
        self.mirror, self.mirrored = mirror, mirror is not None and not near
        self.windows = list(windows)
        self.places = []
        for index, window in enumerate(self.windows):
            sizes = {part: ITEM * len(window) for part in parts}
            if mirror is not None:
                sizes[MIRROR] = mirror.itemsize * len(window)
            self.places.append(store.tier.reserve(Record(f"{name} window {index}", sizes)))

    def has(self, part: str) -> bool:
        """Whether ``part`` of any window was written."""
        return any(part in place.known for place in self.places)

    def dtype_of(self, part: str) -> torch.dtype:
        """Of its numbers on the tier."""
        return self.mirror if part == MIRROR and self.mirror is not None else torch.float32

    def of_step(self, index: int) -> tuple[list[str], list[str]]:
        """Parts of a window that a step reads, and those that it makes, of which one is the mirror."""
        known = self.places[index].known
        fresh = [part for part in self.parts if part not in known]
        made = [] if self.mirror is None else [MIRROR]
        return [part for part in self.parts if part in known], fresh + made

    def start(self, part: str) -> None:
        """Begin to read ``part`` of all windows, as far as there is room; not where it was never written."""
        for place in self.places:
            if part in place.known and not self.store.start(place, part):
                return

    def read(self, part: str, into: Tensor) -> None:
        """Copy ``part`` of the shard to ``into``, (numel,); zero for windows of which it was never written."""
        # A step that was cut off has windows whose values have no mirror any more; then values are read.
        if part == MIRROR and any(
            VALUES in place.known and MIRROR not in place.known for place in self.places
        ):
            part = VALUES
        known = [part in place.known for place in self.places]
        for window, there in zip(self.windows, known, strict=True):
            if not there:
                into[window.start : window.stop].zero_()
        for window, staged in self._staged(part, known):
            with torch.no_grad():
                into[window.start : window.stop].copy_(staged[part].view(self.dtype_of(part)))
            self.store.tier.evict(staged, [])

    def window_of(self, element: int) -> int:
        """Index of the window that has this element of the shard."""
        return bisect_right(self.windows, element, key=lambda window: window.start) - 1

    def start_window(self, index: int, part: str) -> None:
        """Begin to read ``part`` of a window, if it was ever written and there is room."""
        if part in self.places[index].known:
            self.store.start(self.places[index], part)

    def read_window(self, index: int, part: str) -> Tensor:
        """(elements of the window,) fp32 copy of ``part`` on the host; zero where it was never written."""
        place = self.places[index]
        found = torch.zeros(len(self.windows[index]), dtype=torch.float32, device="cpu")
        if part in place.known:
            self.store.make_room(SPARE)
            try:
                staged = self.store.fetch(place, [part]).wait()
            except TierError:
                self.store.forget(self.places)  # what was begun then may have failed too
                raise
            with torch.no_grad():
                found.copy_(floats(staged, part))
            self.store.tier.evict(staged, [])
        return found

    def write_window(self, index: int, part: str, values: Tensor) -> None:
        """Replace ``part`` of a window by ``values``, (elements of the window,); returns before they are written."""
        self.store.forget([self.places[index]])
        self.store.make_room(SPARE)
        made = [part, MIRROR] if part == VALUES and self.mirrored else [part]
        staged = self.store.tier.fetch(self.places[index], [], fresh=made).wait()
        with torch.no_grad():
            floats(staged, part).copy_(values)
        if MIRROR in made:
            self.renew_mirror(staged)
        self.store.tier.evict(staged, made)

    def write(self, part: str, values: Tensor) -> None:
        """Replace ``part`` of the shard by ``values``, (numel,); returns before they are written."""
        for index, window in enumerate(self.windows):
            self.write_window(index, part, values[window.start : window.stop])

    def settle(self, part: str) -> None:
        """Return when ``part`` of every window is written.

        Raises:
            TierError: one could not be.
        """
        for place in self.places:
            if part in place.writes:
                place.writes[part].wait()

    def drop(self, parts: Iterable[str]) -> None:
        """Forget these parts of the shard, and what went wrong with them; a mirror goes with its values."""
        dropped = list(parts)
        if VALUES in dropped and self.mirrored:
            dropped.append(MIRROR)
        self.store.forget(self.places)
        for place in self.places:
            self.store.tier.forget(place, dropped)

    def renew_mirror(self, staged: Staged) -> Tensor:
        """(elements,) ``MIRROR`` of what is staged, made from its values."""
        mirror = staged[MIRROR].view(self.dtype_of(MIRROR))
        with torch.no_grad():
            mirror.copy_(floats(staged, VALUES))
        return mirror

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
                self.store.give_up(fetch)


@dataclass(frozen=True)
class Away:
    """All of one model on this rank that rests on a tier.

    Attributes:
        shards: of each trainable unit, by its name; empty where nothing is offloaded.
        store: where; None then.
        read_ahead: units whose parameters are read before they are used.
    """

    shards: Mapping[str, AwayShard]
    store: UnitStore | None
    read_ahead: int = 0

    def close(self) -> None:
        """What rests there is lost."""
        if self.store is not None:
            self.store.tier.close()


NOTHING_AWAY = Away({}, None)


def floats(staged: Staged, part: str) -> Tensor:
    """(elements,) fp32: ``part`` as it lies in staging."""
    return staged[part].view(torch.float32)
