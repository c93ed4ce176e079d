"""Lanes: threads that move bytes, and the Transfer that somebody waits for.

[Note: No circle of waits]
Pieces leave the queue in the order in which they were started. Before it begins, a piece waits only for transfers that
were started before its own, so all of their pieces have left the queue: they run on other lanes, or have ended. The
oldest that runs waits for nobody. One lane is therefore enough, and no number of lanes can block itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from hpczero.errors import TierError
from hpczero.memory.pages import padded


class Transfer:
    """A started movement of bytes.

    Attributes:
        name: what moves, for messages.
        pieces: each ends by itself.
        has_failed: whether some of them have, up to now.
    """

    def __init__(
        self,
        name: str,
        pieces: Iterable[Future[None]] = (),
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Ended once all ``pieces`` are; ``waited`` is told the seconds of each ``wait``."""
        self.name = name
        self.pieces = list(pieces)
        self.has_failed = False
        self._waited = waited

    def wait(self) -> None:
        """Return when all bytes are there. Any thread, any number of times.

        Raises:
            TierError: they are not: names the medium, the place, and what the system said.
        """
        if not self.has_ended:
            began = time.perf_counter()
            self.settle()
            self._waited(time.perf_counter() - began)
        self.check()

    def settle(self) -> None:
        """Return when it has ended, well or not; counts as nobody's wait."""
        for piece in self.pieces:
            with suppress(CancelledError):
                piece.exception()

    @property
    def has_ended(self) -> bool:
        """Whether it has, well or not."""
        return all(piece.done() for piece in self.pieces)

    def check(self) -> None:
        """After its end.

        Raises:
            TierError: it failed.
        """
        for piece in self.pieces:
            if piece.cancelled():
                raise TierError("the tier was closed before these bytes had moved; drain it first")
            error = piece.exception()
            if isinstance(error, TierError):
                raise TierError(str(error)) from error
            if error is not None:
                raise TierError(f"{self.name}: {type(error).__name__}: {error}") from error

    def run(self, before: Callable[[], None], piece: Callable[[], None]) -> None:
        """Do one piece, unless another one has failed."""
        if self.has_failed:
            return
        try:
            before()
            piece()
        except BaseException:
            self.has_failed = True
            raise  # told where the result is waited for


class Lanes:
    """A fixed number of threads; whatever is started goes to the next that is free."""

    def __init__(self, count: int, *, enter: Callable[[], None] = lambda: None) -> None:
        """At most ``count`` threads, each of which calls ``enter`` first."""
        self._pool = ThreadPoolExecutor(count, "hpczero-tier", enter)

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
        transfer = Transfer(name, waited=waited)
        for piece in pieces:
            transfer.pieces.append(self._pool.submit(transfer.run, before, piece))
        return transfer

    def close(self) -> None:
        """Fail what has not begun, wait for what has, and end the threads. Twice is harmless."""
        self._pool.shutdown(cancel_futures=True)


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
