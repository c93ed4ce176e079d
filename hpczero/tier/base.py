"""The contract of a tier: where this rank's shards rest.

Nothing here is collective: a tier fails on one rank alone, and its caller tells the others.

    place = tier.reserve(record)                          # before training
    fetch = tier.fetch(place, ["master"], fresh=["new"])  # starts to read
    staged = fetch.wait()                                 # staged["master"], staged["new"]: flat uint8 tensors
    tier.evict(staged, ["master", "new"])                 # starts to write; the tensors are the tier's again
    tier.drain()                                          # everything is written
    tier.release(place)                                   # its room is for what is reserved next
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import add, sub

from torch import Tensor
from typing_extensions import override

from hpczero.errors import TierError
from hpczero.files.regular import Closing
from hpczero.tier.lanes import Place, Record, Transfer


@dataclass(frozen=True)
class Flow:
    """Of one part, or of all of them, since the tier was made.

    Attributes:
        read_nbytes: fetched from the medium.
        written_nbytes: evicted to it.
        waited_s: seconds in which a caller stood still for them.
    """

    read_nbytes: int = 0
    written_nbytes: int = 0
    waited_s: float = 0.0

    def __add__(self, other: Flow) -> Flow:
        return Flow(*map(add, vars(self).values(), vars(other).values()))

    def __sub__(self, earlier: Flow) -> Flow:
        return Flow(*map(sub, vars(self).values(), vars(earlier).values()))


class Traffic:
    """Flows by the name of the part, over all records."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._lock = threading.Lock()  # results are waited for on any thread

    def __getitem__(self, part: str) -> Flow:
        """Nothing, of a part that never moved."""
        with self._lock:
            return self._flows.get(part, Flow())

    @property
    def parts(self) -> Mapping[str, Flow]:
        """All that moved, as of now."""
        with self._lock:
            return dict(self._flows)

    @property
    def total(self) -> Flow:
        """Over all parts."""
        return sum(self.parts.values(), Flow())

    def read(self, sizes: Mapping[str, int]) -> None:
        """Count parts, by name and bytes, whose reading starts."""
        for part, nbytes in sizes.items():
            self._add(part, Flow(read_nbytes=nbytes))

    def written(self, sizes: Mapping[str, int]) -> None:
        """Count parts whose writing starts."""
        for part, nbytes in sizes.items():
            self._add(part, Flow(written_nbytes=nbytes))

    def waited(self, sizes: Mapping[str, int], seconds: float) -> None:
        """Count a wait for several parts at once: each takes its share by bytes."""
        whole = sum(sizes.values())
        for part, nbytes in sizes.items():
            share = nbytes / whole if whole else 1 / len(sizes)
            self._add(part, Flow(waited_s=seconds * share))

    def _add(self, part: str, flow: Flow) -> None:
        with self._lock:
            self._flows[part] = self._flows.get(part, Flow()) + flow


class Staged(Mapping[str, Tensor]):
    """Parts of one record in memory, by name, until they are evicted: (nbytes,) uint8 each, at a page's begin.

    ``staged["master"].view(torch.float32)`` is a window into the tier's own memory. Keep no such tensor longer: after
    ``evict`` other records lie there.

    Attributes:
        place: where the record rests.
        in_place: whether they are the resting memory itself, so that nothing moves.
    """

    in_place = False

    def __init__(self, place: Place, parts: Mapping[str, Tensor]) -> None:
        self.place = place
        self._parts: Mapping[str, Tensor] | None = parts

    @property
    def held(self) -> bool:
        """Whether it has not been evicted yet."""
        return self._parts is not None

    def surrender(self) -> Mapping[str, Tensor]:
        """The parts, once; for tiers alone."""
        parts, self._parts = self._held(), None
        return parts

    @override
    def __getitem__(self, part: str) -> Tensor:
        return self._held()[part]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._held())

    @override
    def __len__(self) -> int:
        return len(self._held())

    def _held(self) -> Mapping[str, Tensor]:
        if self._parts is None:
            raise TierError(
                f"parts of {self.place.record.name!r} were used after they were evicted: other bytes lie there by "
                "now; fetch them again"
            )
        return self._parts


class Fetch(ABC):
    """A started read.

    Attributes:
        name: what is read, for messages.
    """

    name: str

    @abstractmethod
    def wait(self) -> Staged:
        """The parts, once they are there; the same object every time. Any thread.

        Raises:
            TierError: they could not be read; names medium, place, bytes got and expected, and what the system said.
        """


class Tier(Closing, ABC):
    """Where shards rest. One thread at a time calls it; what it returns may be waited for on any.

    Attributes:
        traffic: bytes moved and seconds waited, by part.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._places: set[Place] = set()
        self._closed = False

    @abstractmethod
    def describe(self) -> str:
        """One line for a run header: the medium, and how it is used."""

    @property
    @abstractmethod
    def staging_nbytes(self) -> int:
        """Bytes of memory that the tier holds for what passes through; the same however much rests in it."""

    def reserve(self, record: Record) -> Place:
        """Room for ``record``, kept until ``release`` or ``close``. Its parts have no content yet.

        Raises:
            TierError: there is not so much room; says how much is asked for, and where.
        """
        self._check_open(f"reserve {record.name!r}")
        place = self._reserve(record)
        self._places.add(place)
        return place

    def fetch(self, place: Place, parts: Iterable[str], *, fresh: Iterable[str] = ()) -> Fetch:
        """Start to read ``parts`` into a staging block; may wait for the oldest write to get one.

        A place that is still being written is read after that.

        Args:
            place: of this tier.
            parts: to be read; none is fine.
            fresh: parts to lie beside them that are not read, content undefined: whoever fills them evicts them. Until
                then they cannot be fetched.

        Raises:
            TierError: a part was never evicted, or was taken fresh since; all of them need more than a block; no
                block can become free.
        """
        read, new = self._checked(place, parts, fresh, f"fetch of {place.record.name!r}")
        fetch = self._fetch(place, read, new)
        place.known -= new.keys()
        self.traffic.read(read)
        return fetch

    def evict(self, staged: Staged, parts: Iterable[str]) -> Transfer:
        """Start to write ``parts`` and give all of ``staged`` back. Nobody may touch its tensors from then on.

        Args:
            staged: of this tier.
            parts: of it, to be kept as they are now. The others keep what was kept before, if they were fetched and not
                changed; what was changed and is not named here is undefined.

        Returns:
            The started write; waiting for it is optional, since ``drain`` and later fetches tell of its errors too.

        Raises:
            TierError: a part is not staged, or ``staged`` has been evicted.
        """
        place = staged.place
        what = f"evict of {place.record.name!r}"
        self._check_place(place, what)
        written = place.sizes(parts)
        if strange := [part for part in written if part not in staged]:
            raise TierError(
                f"{what}: got {strange}, expected some of what is staged: {list(staged)}"
            )
        transfer = self._evict(staged, written)
        place.known |= written.keys()
        self.traffic.written({} if staged.in_place else written)
        return transfer

    def forget(self, place: Place, parts: Iterable[str]) -> None:
        """These parts have no content any more, and what went wrong when they were written does not matter.

        Raises:
            TierError: ``place`` is not of this tier, or has no such part.
        """
        self._check_place(place, f"forget parts of {place.record.name!r}")
        for part in place.sizes(parts):
            place.known.discard(part)
            write = place.writes.get(part)
            if write is not None and write.has_failed:
                del place.writes[part]

    def release(self, place: Place) -> None:
        """The room of ``place`` is for what is reserved next; what rests there is lost. Does not wait.

        Nothing of it may be staged: whatever was fetched is waited for and evicted. Writes may be in progress, and what
        went wrong with them does not matter any more.

        Raises:
            TierError: ``place`` is not of this tier, or was released.
        """
        self._check_place(place, f"release {place.record.name!r}")
        self._places.discard(place)
        self._release_room(place)

    def drain(self) -> None:
        """Return when every write has ended.

        Raises:
            TierError: one has failed, be it long ago, unless its parts have been written again since.
        """
        self._check_open("drain")
        failed = None
        for write in {write for place in self._places for write in place.writes.values()}:
            try:
                write.wait()
            except TierError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Give everything back: what rests here is lost. Waits for calls in progress; twice is harmless."""
        if not self._closed:
            self._closed = True
            self._close()
            self._places.clear()

    # --- what a medium writes

    @abstractmethod
    def _reserve(self, record: Record) -> Place: ...

    @abstractmethod
    def _release_room(self, place: Place) -> None:
        """Nobody uses ``place`` from now on."""

    @abstractmethod
    def _fetch(self, place: Place, read: Mapping[str, int], fresh: Mapping[str, int]) -> Fetch:
        """Both by name and bytes, checked."""

    @abstractmethod
    def _evict(self, staged: Staged, written: Mapping[str, int]) -> Transfer:
        """As ``_fetch``; takes the parts with ``staged.surrender()``."""

    @abstractmethod
    def _close(self) -> None: ...

    # --- checks

    def _checked(
        self, place: Place, parts: Iterable[str], fresh: Iterable[str], what: str
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of the parts to be read, and of the fresh ones."""
        self._check_place(place, what)
        read, new = place.sizes(parts), place.sizes(fresh)
        if both := sorted(read.keys() & new.keys()):
            raise TierError(f"{what}: {both} are both to be read and fresh; name each part once")
        if lost := [part for part in read if part not in place.known]:
            raise TierError(
                f"{what}: {lost} have no content: they were never evicted, or were taken fresh and not evicted since"
            )
        return read, new

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise TierError(f"{what}: the tier is closed, and what rested there is gone")

    def _check_place(self, place: Place, what: str) -> None:
        self._check_open(what)
        if place not in self._places:
            raise TierError(
                f"{what}: its place was reserved in another tier, or was released; each tier takes its own"
            )
