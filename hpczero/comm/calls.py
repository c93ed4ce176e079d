"""Calls: what a rank has called of a transport, in order: counted, timed, watched, and held against the other ranks'.

Owns: the accounts (calls, bytes, seconds), and the fingerprint of the sequence. Must not know: what a call moves,
buffers, how a transport works.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from hpczero.accelerator import Accelerator, Span
from hpczero.comm.accounts import CommStats
from hpczero.comm.devices.exposed import Exposed
from hpczero.comm.order import Order
from hpczero.comm.work import Work
from hpczero.job.group import Group


class Calls:
    """Of one transport, or of two that work as one. One thread at a time.

    Attributes:
        stats: the accounts.
        exposed: seconds in which a device stood still for calls.
        fingerprint: of the sequence so far.
        order: that all ranks make the same calls; None where there is one rank.
        step: of the optimizer, for messages.
    """

    def __init__(self, ranks: Group, accelerator: Accelerator, *, strict: bool) -> None:
        """Not collective.

        Args:
            ranks: that make the same calls.
            accelerator: that computes beside the calls.
            strict: whether ranks compare every call before they make it (``Order``).
        """
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

        Collective where the call is not known (comm/order.py: [Note: Calls that are known]).

        Args:
            operation: its verb.
            name: of the unit.
            sent: bytes that leave this rank.
            key: the call's size, equal on all ranks; None where all send the same.

        Raises:
            CommError: on every rank; they are about to make different calls.
        """
        nbytes = sent if key is None else key
        record = f"{operation} of {name!r} ({nbytes:,} bytes)"
        # Rolling: equal on every rank as long as every rank has made the same calls.
        self.fingerprint = zlib.crc32(record.encode(), self.fingerprint)
        if self.order is not None:
            self.order.check(record, self.fingerprint, self.step)
        self.count(operation, sent)
        return self.timed(f"{record[:-1]}, step {self.step})")

    def count(self, operation: str, sent: int) -> None:
        """One more ``operation``, which sends ``sent`` bytes. Not collective."""
        self.stats.calls[operation] += 1
        self.stats.sent_nbytes[operation] += sent

    def timed(self, what: str | None) -> AbstractContextManager[object]:
        """Context around a call, which the watchdog looks at, or around a wait for one where ``what`` is None.

        Its seconds are counted. Not collective by itself.
        """
        return _Timed(self, nullcontext() if what is None else self._watchdog.collective(what))

    def later(self, operation: str, name: str, finish: Callable[[], None]) -> Work:
        """Work that ``finish`` does when somebody waits for it."""

        def watched() -> None:
            with self.timed(f"the rest of {operation} of {name!r} (step {self.step})"):
                finish()

        return Work(name, watched)

    def elsewhere(self, name: str, wait: Callable[[], None]) -> Work:
        """Work that another thread does, watched by the watchdog. Waiting for it counts as time in calls."""

        def timed() -> None:
            with self.timed(None):
                wait()

        return Work(name, timed, elsewhere=True)


class _Timed:
    """One call, or the wait for it, on the clock of the accounts."""

    def __init__(self, calls: Calls, watch: AbstractContextManager[object]) -> None:
        self._calls, self._watch = calls, watch
        self._start = 0.0
        self._span: Span | None = None

    def __enter__(self) -> None:
        self._watch.__enter__()
        try:
            self._start = time.perf_counter()
            if not self._calls._depth:
                self._span = self._calls.exposed.begin()
            self._calls._depth += 1
        except BaseException as cut:  # a signal handler's: ``__exit__`` is not called
            self._watch.__exit__(type(cut), cut, cut.__traceback__)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._calls._depth -= 1
            if not self._calls._depth:  # one call may have to finish an earlier one
                self._calls.stats.seconds += time.perf_counter() - self._start
                self._calls.exposed.end(self._span)
        except BaseException as cut:  # a signal handler's
            kind, error, trace = type(cut), cut, cut.__traceback__
            raise
        finally:
            self._watch.__exit__(kind, error, trace)
