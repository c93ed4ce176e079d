"""Lanes: threads that move bytes, and the Transfer that somebody waits for.

[Note: No circle of waits]
Pieces leave the queue in the order in which they were started. Before it begins, a piece waits only for transfers that
were started before its own, so all of their pieces have left the queue: they run on other lanes, or have ended. The
oldest that runs waits for nobody. One lane is therefore enough, and no number of lanes can block itself.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from hpczero.errors import TierError
from hpczero.memory.pages import padded


def _untold(seconds: float) -> None:
    return


class Transfer:
    """A started movement of bytes.

    Attributes:
        name: what moves, for messages.
    """

    def __init__(
        self, name: str, pieces: int = 0, waited: Callable[[float], None] = _untold
    ) -> None:
        """Ended once ``pieces`` pieces are; ``waited`` is told the seconds of each ``wait``."""
        self.name = name
        self._left = pieces
        self._waited = waited
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        if not pieces:
            self._ended.set()

    def wait(self) -> None:
        """Return when all bytes are there. Any thread, any number of times.

        Raises:
            TierError: they are not: names the medium, the place, and what the system said.
        """
        if not self._ended.is_set():
            began = time.perf_counter()
            self._ended.wait()
            self._waited(time.perf_counter() - began)
        self.check()

    def settle(self) -> None:
        """Return when it has ended, well or not; counts as nobody's wait."""
        self._ended.wait()

    @property
    def has_ended(self) -> bool:
        """Whether it has, well or not."""
        return self._ended.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether some of it has, up to now."""
        return self._error is not None

    def check(self) -> None:
        """After its end.

        Raises:
            TierError: it failed.
        """
        if isinstance(self._error, TierError):
            raise TierError(str(self._error)) from self._error
        if self._error is not None:
            kind = type(self._error).__name__
            raise TierError(f"{self.name}: {kind}: {self._error}") from self._error

    def run(self, before: Callable[[], None], piece: Callable[[], None]) -> None:
        """Do one piece, unless another one has failed; errors are kept for ``wait``."""
        try:
            if self._error is None:
                before()
                piece()
        except BaseException as error:  # told where the result is waited for
            self.fail(error)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._ended.set()

    def fail(self, error: BaseException) -> None:
        """Keep the first error."""
        with self._lock:
            self._error = self._error or error


_Job = tuple[Transfer, Callable[[], None], Callable[[], None]]


def _closed() -> None:
    raise TierError("the tier was closed before these bytes had moved; drain it first")


def _work(
    jobs: SimpleQueue[_Job | None], closing: threading.Event, enter: Callable[[], None]
) -> None:
    enter()
    while True:
        job = jobs.get()
        if job is None:
            return
        transfer, before, piece = job
        transfer.run(_closed if closing.is_set() else before, piece)
        del job, transfer, before, piece  # a lane that waits for work keeps no memory


def _shut(
    jobs: SimpleQueue[_Job | None], closing: threading.Event, threads: Sequence[threading.Thread]
) -> None:
    closing.set()
    for _ in threads:
        jobs.put(None)


class Lanes:
    """A fixed number of threads; whatever is started goes to the next that is free."""

    def __init__(self, count: int, *, enter: Callable[[], None] = lambda: None) -> None:
        """Start ``count`` threads, each of which calls ``enter`` first."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(
                target=_work,
                args=(self._jobs, self._closing, enter),
                name=f"hpczero-tier-{lane}",
                daemon=True,  # whoever forgets to close it can still leave
            )
            for lane in range(count)
        ]
        for thread in self._threads:
            thread.start()
        self._forgotten = weakref.finalize(self, _shut, self._jobs, self._closing, self._threads)

    def start(
        self,
        name: str,
        pieces: Sequence[Callable[[], None]],
        *,
        before: Callable[[], None],
        waited: Callable[[float], None],
    ) -> Transfer:
        """Have all pieces done, in any order and side by side; returns at once.

        A piece moves some bytes, and raises what goes wrong. ``before`` returns when a piece may begin; it is called on
        the lane, once for each piece.
        """
        transfer = Transfer(name, len(pieces), waited)
        for piece in pieces:
            self._jobs.put((transfer, before, piece))
        return transfer

    def close(self) -> None:
        """Fail what has not begun, wait for what has, and end the threads. Twice is harmless."""
        self._forgotten()
        for thread in self._threads:
            thread.join()


MOST_PARTS = 16  # of a record: a block of staging has so many ends of pages to spare


@dataclass(frozen=True)
class Record:
    """What is reserved at once.

    Attributes:
        name: for messages, such as ``blocks.3 window 0``.
        parts: bytes of each part, by its name; their order is that on the medium. A part may be empty.
    """

    name: str
    parts: Mapping[str, int]

    def __post_init__(self) -> None:
        if not 0 < len(self.parts) <= MOST_PARTS:
            raise TierError(
                f"record {self.name!r} has {len(self.parts)} parts, expected 1 to {MOST_PARTS}"
            )
        for part, nbytes in self.parts.items():
            if nbytes < 0:
                raise TierError(
                    f"part {part!r} of record {self.name!r} has {nbytes} bytes, expected 0 or more"
                )

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())


class Place:
    """Where one record rests in one tier; made by ``Tier.reserve``, and of use to that tier alone.

    Attributes:
        record: what rests there.
        begin: offset of its first part in the tier.
        end: offset behind its last one.
        offsets: of each part in the tier, at multiples of the tier's alignment.
        known: parts that have been evicted and can be fetched.
        writes: the last write of each part, which may have failed.
        reads: reads that nobody has waited for yet.
        before: reads and writes of what had this room before, which a write comes after.
    """

    def __init__(
        self, record: Record, begin: int, alignment: int, before: Iterable[Transfer] = ()
    ) -> None:
        self.record = record
        self.begin = begin
        self.offsets: dict[str, int] = {}
        for part, nbytes in record.parts.items():
            self.offsets[part] = begin
            begin += padded(nbytes, alignment)
        self.end = begin
        self.known: set[str] = set()
        self.writes: dict[str, Transfer] = {}
        self.reads: set[Transfer] = set()
        self.before = frozenset(before)

    def sizes(self, parts: Iterable[str]) -> dict[str, int]:
        """Bytes of these parts, in the order of the record.

        Raises:
            TierError: one of them is none of the record, or is named twice.
        """
        names = list(parts)
        of = self.record.parts
        strange = [name for name in names if name not in of]
        if strange or len(set(names)) < len(names):
            raise TierError(
                f"record {self.record.name!r}: got parts {names}, expected each at most once and of {list(of)}"
            )
        return {name: of[name] for name in of if name in names}
