"""Line: the calls of one process group, one behind the other, beside the program; and what torch sees of a call.

MPI matches the calls of a communicator by their order. torch's programs start calls and wait later. Calls of several
groups may overtake each other. Each group therefore has a thread of its own, which makes its calls in the order in
which they were started. A call that is waited for at once, while nothing is under way, is made where it is started.

[Note: Calls of a callback]
A callback of a future (PowerSGD's) may start calls, and wait for them and for others of its group. Where the call of
the future had ended, it runs in the program, where its future is asked for. Where the call was still under way, it runs
on the group's thread, later: there the program has gone on, by a number of calls that differs from rank to rank.

    program     start 1    start 2    future 3 of 1, whose callback starts a call    start 4
    made           1          2                  what it starts                         4

So calls and futures are numbered in the order of the program. The thread makes what a callback starts at once, after
all calls that came before its future, and after what callbacks of futures before it start. A callback that waits for a
call that is still queued has the thread make all calls up to that one. All ranks have one order then, if a callback is
added to a future before the next call of the group is started.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from typing_extensions import override

from hpczero.errors import CommError, HpcZeroError
from hpczero.job.watchdog import Watchdog

# Of a future its number, what completes it, and the call.
Ending = tuple[int, Future[Any], str]


def until(done: Callable[[], bool], limit_s: float = math.inf, *, nap_s: float = 1e-3) -> bool:
    """Look every ``nap_s`` seconds; whether ``done`` was true within ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(nap_s)
    return True


class BridgeWork(dist.Work):
    """What a call that was started has in common with a message under way.

    ``what`` names it, ``result`` is what it fills.
    """

    def __init__(self, what: str, result: Any) -> None:
        super().__init__()
        self._what, self._result = what, result
        self._error: BaseException | None = None

    def future(self, trigger: Future[Any]) -> Future[Any]:
        """A future of ``result``, which is looked at when ``trigger`` is set.

        An exception that is set on a future is seen by Python alone. One that a callback raises is seen by C++ too.
        """
        return trigger.then(lambda _: self.result())

    @override
    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    @override
    def exception(self) -> BaseException | None:
        return self._error

    @override
    def result(self) -> Any:
        self.wait()
        return self._result

    @override
    def synchronize(self) -> None:
        self.wait()


class Started(BridgeWork):
    """A call that was started: what ``async_op=True`` returns."""

    def __init__(
        self, what: str, result: Any, line: Line, number: int, limit_s: float | None = None
    ) -> None:
        """Not collective. ``wait`` waits ``limit_s`` seconds; None: until the group's watchdog ends the job."""
        super().__init__(what, result)
        self._line, self._number, self._limit_s = line, number, limit_s
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._futures: list[Ending] = []

    def settle(self, error: BaseException | None) -> list[Ending]:
        """The call has ended; returns what ends with it."""
        with self._lock:
            self._error = error
            self._done.set()
            waiting, self._futures = self._futures, []
        return waiting

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the call has ended.

        Args:
            timeout: how long to wait; zero or less waits for as long as the group's timeout allows.

        Raises:
            CommError: the call has not ended in time.
            Exception: what the call raised.
        """
        self._come_to_turn()
        given_s = timeout.total_seconds()
        limit_s = given_s if given_s > 0 else self._limit_s
        if not self._done.wait(limit_s):
            raise CommError(
                f"{self._what} has not ended within {limit_s:g} s: a peer has not come, or still works; give a longer "
                "timeout, or find out where the other ranks are"
            )
        if self._error is not None:
            raise self._error
        return True

    @override
    def get_future(self) -> Future[Any]:
        """A future of the call, which fails where the call does."""
        trigger: Future[Any] = Future()
        future = self.future(trigger)
        self._come_to_turn()
        with self._lock:
            pending = not self._done.is_set()
            if pending:
                self._futures.append((self._line.next_number(), trigger, self._what))
        if not pending:
            trigger.set_result(None)
        return future

    def _come_to_turn(self) -> None:
        """In a callback, on the thread that makes the calls, nobody else would make this one."""
        if not self._done.is_set():
            self._line.reach(self._number)

    @override
    def is_completed(self) -> bool:
        return self._done.is_set()


class Line:
    """The calls of one group, in order."""

    def __init__(self, watchdog: Watchdog, name: str) -> None:
        """Not collective. The watchdog looks at every call while it runs.

        A call that waits for its turn is not late.
        """
        self._watchdog, self._name = watchdog, name
        self._queue: deque[tuple[int, Started, Callable[[], None]] | None] = deque()
        self._running = threading.Lock()  # around each call
        self._waiting = 0  # calls in the queue, and the one that the thread makes
        self._count = threading.Condition()  # around the queue and the number
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._numbers = itertools.count()
        # Of the thread alone: futures of calls that have ended, and the one whose callbacks run.
        self._ended: list[Ending] = []
        self._place = 0

    def next_number(self) -> int:
        """In the order of the program."""
        return next(self._numbers)

    def start(
        self,
        what: str,
        call: Callable[[], None],
        result: Any,
        *,
        later: bool,
        limit_s: float | None = None,
    ) -> Started:
        """Make ``call`` when its turn has come.

        Args:
            what: names it.
            call: touches nothing that the caller changes before it has waited.
            result: what it fills.
            later: whether the caller goes on meanwhile; without, it waits at once.
            limit_s: as ``Started``.
        """
        if threading.current_thread() is self._thread:  # see [Note: Calls of a callback]
            self._reach(self._place)
            started = Started(what, result, self, self.next_number(), limit_s)
            self._make(started, call)
            return started
        with self._count:
            number = self.next_number()
            started = Started(what, result, self, number, limit_s)
            here = not later and limit_s is None and self._waiting == 0
            if not (here and self._running.acquire(blocking=False)):
                here = False
                self._waiting += 1
                self._queue.append((number, started, call))
                self._awake()
        if here:
            try:
                self._make(started, call)
            finally:
                self._running.release()
        return started

    def reach(self, number: int) -> None:
        """On the thread: make all calls up to this one; elsewhere nothing. See [Note: Calls of a callback]."""
        if threading.current_thread() is self._thread:
            self._reach(number + 1)

    def drain(self, limit_s: float) -> bool:
        """Whether all that was started has ended within ``limit_s`` seconds. Not collective."""
        return until(lambda: not self._waiting, limit_s)

    def close(self) -> None:
        """End the thread, after what was started."""
        if self._thread is not None:
            with self._count:
                self._queue.append(None)
                self._count.notify()
            self._thread.join()
            self._thread = None

    def _awake(self) -> None:
        self._count.notify()
        if self._thread is None:
            # Daemon: a job that ends in an error must not wait for a call that never ends.
            self._thread = threading.Thread(
                target=self._work, name=f"hpczero-bridge-{self._name}", daemon=True
            )
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._count:
                self._count.wait_for(lambda: self._queue)
                if self._queue[0] is None:
                    return
            with self._running:
                self._make_next()
                while self._ended:
                    self._complete(*heapq.heappop(self._ended))

    def _reach(self, limit: int) -> None:
        """In a callback: make the calls before ``limit``, and complete the futures there, in their order."""
        while True:
            first = self._queue[0] if self._queue else None  # nobody else takes any out
            call = math.inf if first is None else first[0]
            future = self._ended[0][0] if self._ended else math.inf
            if min(call, future) >= limit:
                return
            if future < call:
                self._complete(*heapq.heappop(self._ended))
            else:
                self._make_next()

    def _make_next(self) -> None:
        with self._count:
            item = self._queue.popleft()
        assert item is not None, "looked at before"
        _, started, call = item
        self._make(started, call, from_queue=True)

    def _complete(self, number: int, future: Future[Any], what: str) -> None:
        before, self._place = self._place, number
        with self._watchdog.watch(f"a callback of a future of {what}"), suppress(RuntimeError):
            future.set_result(None)  # whose callbacks are the program's, and may raise
        self._place = before

    def _make(
        self, started: Started, call: Callable[[], None], *, from_queue: bool = False
    ) -> None:
        error: BaseException | None = None
        if self._broken is not None:
            error = CommError(
                f"{started._what}: an earlier call of process group {self._name} has failed ({self._broken}); ranks "
                "may be in different calls since, so no more are made"
            )
        else:
            try:
                with torch.no_grad(), self._watchdog.watch(started._what):
                    call()
            except BaseException as failure:
                error = failure
                if not (isinstance(failure, HpcZeroError) and failure.agreed):
                    # Its traceback keeps what MPI may still read and write
                    self._broken = failure
        if from_queue:
            with self._count:
                self._waiting -= 1
        for each in started.settle(error):  # none where the program makes the call
            heapq.heappush(self._ended, each)
