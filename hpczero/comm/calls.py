"""Calls: what a rank has called of a transport, in order: counted, timed, watched, compared with other ranks."""

from __future__ import annotations

import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hpczero.accelerator import Accelerator, Span
from hpczero.errors import CommError
from hpczero.job.group import Group, told_all
from hpczero.job.messages import is_same_number


class Work:
    """A started operation. ``wait`` returns when its buffers may be used again; it may be called twice."""

    def __init__(self, name: str, finish: Callable[[], None] | None = None) -> None:
        """Not collective. ``finish`` does what is left; it is called again if a signal handler has raised in it."""
        self.name = name
        self._finish = finish

    def wait(self) -> None:
        """Block until the operation is complete on this rank. Raises CommError if it failed."""
        if self._finish is not None:
            self._finish()
            self._finish = None


@dataclass
class CommStats:
    """Accounts of one transport on this rank, by operation.

    ``sent_nbytes`` counts the bytes that leave the rank, by the algorithm's own arithmetic. ``seconds`` is time in
    calls.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_nbytes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def reset(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.sent_nbytes.clear()
        self.seconds = 0.0


# Order: every rank makes the same calls, so that no rank takes one unit's values for another's.
#
# [Note: Calls that are known]
# MPI pairs collectives by their order alone. A rank that calls another unit's gather gets the other unit's values where
# sizes are equal. Where they differ, an MPI library may write past the buffer (Open MPI 4.1.4 reads a large message
# whole before it compares lengths). So ranks compare a call before they make it, unless it is known: after the same two
# calls it came the last time, on all ranks. What is not compared follows from what has been, so no two ranks make
# different calls.
#
# A rank that departs from what is known is the one that compares, and waits for the others. They come along and all go
# on; or they depart elsewhere and all ranks raise; or they are in another call and the watchdog ends the job. Nobody
# has got a wrong value. Where another call comes than the last time, as after a forward that a backward or an
# evaluation follows, ranks compare AGAIN times more there, so that a rank that departs alone is named at once. A
# training loop compares in its first steps only (docs/decisions/0035-known-calls.md).

RECORD_NBYTES = 192
AGAIN = 16  # comparisons where another call has come than the last time


class Order:
    """Order of the calls of one transport, and the number of ``comparisons``. See [Note: Calls that are known]."""

    def __init__(self, ranks: Group, *, strict: bool) -> None:
        """Not collective. ``ranks``, which are borrowed, make the same calls.

        With ``strict`` (``HPCZERO_STRICT=1``) ranks compare every call. A rank that stays on the known way while others
        leave it is then named at once, and by the watchdog otherwise.
        """
        self._ranks = ranks
        self._strict = strict
        self._before, self._last = "", ""
        # By the two calls before: the call that came the last time, and the comparisons that are left to make there.
        self._followed: dict[tuple[str, str], tuple[str, int]] = {}
        self.comparisons = 0

    def check(self, record: str, fingerprint: int, step: int) -> None:
        """Return when it is certain that all ranks make the call ``record`` now. Collective where it is not known.

        ``fingerprint`` is of the calls so far, this one included; ``step`` is for messages.

        Raises:
            CommError: on every rank; one of them is about to make another call. The message names each rank that
                differs from the majority, and both calls.
        """
        place = self._before, self._last
        known, due = self._followed.get(place, ("", 0))
        if self._strict or due or known != record:
            self._compare(record, fingerprint, step)
            again = AGAIN if known else 0
            self._followed[place] = record, (max(due - 1, 0) if known == record else again)
        self._before, self._last = self._last, record

    def _compare(self, record: str, fingerprint: int, step: int) -> None:
        self.comparisons += 1
        ranks = self._ranks
        last = f" after {self._last!r}" if self._last else ""
        with ranks.watchdog.collective(f"the comparison of ranks before {record!r}{last}"):
            if is_same_number(ranks, fingerprint):
                return
            raise told_all(CommError(self._differing(f"{record}, step {step}")), ranks.comm)

    def _differing(self, record: str) -> str:
        """What the error says. Collective: every rank has found that they differ."""
        mine = np.zeros(RECORD_NBYTES, dtype=np.uint8)
        encoded = record.encode()[:RECORD_NBYTES]
        mine[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        found = np.empty((self._ranks.size, RECORD_NBYTES), dtype=np.uint8)
        self._ranks.comm.Allgather(mine, found)
        calls = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in found]
        usual, votes = Counter(calls).most_common(1)[0]
        odd = [f"rank {rank}: {call}" for rank, call in enumerate(calls) if call != usual]
        more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
        there = f"{votes} of {len(calls)} rank(s) start {usual}; {'; '.join(odd[:8])}{more}"
        if not odd:
            there = f"all start {usual}, and have made other calls before, as after an exception that left a forward"
        return (
            f"ranks disagree about their next collective: {there}. Every rank must run the same modules in the same "
            "order; look for a branch on rank or data before this call. To leave a block out on some ranks, run it on "
            "all and choose afterwards: x = torch.where(keep, block(x), x)"
        )


# Exposed communication on a device: how long its lane of computation stood still for collectives.
#
# The host's clock cannot measure it. The host runs ahead of the device, so the device may still compute while the host
# waits for a collective. What counts is the time between the last kernel before a collective and the end of the wait
# for it, on the lane that computes. The host does not wait for any of this until somebody asks for the sum.


class Exposed:
    """Spans of one transport. Only the thread that computes may use them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seconds = 0.0
        self._spans: deque[Span] = deque()

    def begin(self) -> Span | None:
        """Begin a span; None on the host, whose own clock measures it."""
        return None if self._accelerator.is_host else self._accelerator.span()

    def end(self, span: Span | None) -> None:
        """End a span: the collective, or the wait for it, is over."""
        if span is None:
            return
        span.end()
        self._spans.append(span)
        while self._spans and self._spans[0].passed():  # nobody may ever ask
            self._seconds += self._spans.popleft().seconds()

    def seconds(self) -> float | None:
        """Seconds of all spans so far; None on the host. Waits until the device has worked through them."""
        if self._accelerator.is_host:
            return None
        while self._spans:
            self._seconds += self._spans.popleft().seconds()
        return self._seconds


class Calls:
    """Calls of one transport, or of two that work as one. One thread at a time.

    Attributes:
        stats: the accounts.
        exposed: seconds in which a device stood still for calls.
        fingerprint: of the sequence so far.
        order: None where there is one rank.
        step: of the optimizer, for messages.
    """

    def __init__(self, ranks: Group, accelerator: Accelerator, *, strict: bool) -> None:
        """Not collective. ``ranks`` make the same calls; ``accelerator`` computes meanwhile; ``strict``: of Order."""
        self.stats = CommStats()
        self.exposed = Exposed(accelerator)
        self.fingerprint = self.step = 0
        self.order = Order(ranks, strict=strict) if ranks.size > 1 else None
        self._watchdog = ranks.watchdog
        self._depth = 0

    def issue(
        self, operation: str, name: str, sent: int, key: int | None = None
    ) -> AbstractContextManager[object]:
        """Context around one call that sends ``sent`` bytes: all ranks make it; remember, count, watch and time it.

        Collective where the call is not known (comm/calls.py: [Note: Calls that are known]).

        Args:
            operation: its verb.
            name: of the unit.
            sent: bytes that leave this rank.
            key: the call's size, equal on all ranks; None where all send the same; -1 where sizes differ by rank.

        Raises:
            CommError: on every rank; they are about to make different calls.
        """
        nbytes = sent if key is None else key
        size = "sizes differ by rank" if nbytes < 0 else f"{nbytes:,} bytes"
        record = f"{operation} of {name!r} ({size})"
        # Rolling: equal on every rank as long as every rank has made the same calls.
        self.fingerprint = zlib.crc32(record.encode(), self.fingerprint)
        if self.order is not None:
            # A comparison waits for the slowest rank, as the call itself would.
            with self.timed(None):
                self.order.check(record, self.fingerprint, self.step)
        self.count(operation, sent)
        return self.timed(f"{record[:-1]}, step {self.step})")

    def count(self, operation: str, sent: int) -> None:
        """One more ``operation``, which sends ``sent`` bytes. Not collective."""
        self.stats.calls[operation] += 1
        self.stats.sent_nbytes[operation] += sent

    @contextmanager
    def timed(self, what: str | None) -> Iterator[None]:
        """Context around a call, which the watchdog looks at, or around a wait for one where ``what`` is None.

        Its seconds are counted. Not collective by itself.
        """
        with nullcontext() if what is None else self._watchdog.collective(what):
            start = time.perf_counter()
            span = None if self._depth else self.exposed.begin()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:  # one call may have to finish an earlier one
                    self.stats.seconds += time.perf_counter() - start
                    self.exposed.end(span)

    def later(self, operation: str, name: str, finish: Callable[[], None]) -> Work:
        """Work that ``finish`` does when somebody waits for it."""
        what = f"the rest of {operation} of {name!r} (step {self.step})"
        return Work(name, partial(self._within, what, finish))

    def elsewhere(self, name: str, wait: Callable[[], None]) -> Work:
        """Work of another thread, which ``wait`` waits for and the watchdog looks at. The wait is time in calls."""
        return Work(name, partial(self._within, None, wait))

    def _within(self, what: str | None, act: Callable[[], None]) -> None:
        with self.timed(what):
            act()
