"""Line: the calls of one process group, one behind the other, beside the program.

Owns: the order of calls, the thread that makes them, and what torch sees of a call that was started. Must not know:
what the calls do.

MPI matches the calls of a communicator by their order. torch's programs start calls and wait later. Calls of several
groups may overtake each other. Each group therefore has a thread of its own, which makes its calls in the order in
which they were started. A call that is waited for at once, while nothing is under way, is made where it is started.

[Note: Calls of a callback]
A callback of a future (PowerSGD's) starts a call and waits for it. It runs on the group's thread where the first call
was still under way, and in the program where it had ended. A thread that queued the call would wait for itself. It
makes the call at once instead: before whatever else is in the queue, as the program does on a rank where nothing was.
So all ranks have one order.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from typing_extensions import override

from hpczero.errors import CommError, HpcZeroError
from hpczero.job.watchdog import Watchdog


class Started(dist.Work):
    """A call that was started: what ``async_op=True`` returns."""

    def __init__(self, what: str, result: Any, limit_s: float | None = None) -> None:
        """Not collective.

        Args:
            what: names the call in messages.
            result: what the call fills, for ``result`` and the future.
            limit_s: seconds that ``wait`` waits; None waits until the group's watchdog ends the job.
        """
        super().__init__()
        self._what, self._result, self._limit_s = what, result, limit_s
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._futures: list[Future[Any]] = []

    def settle(self, error: BaseException | None) -> None:
        """The call has ended."""
        with self._lock:
            self._error = error
            self._done.set()
            waiting, self._futures = self._futures, []
        for future in waiting:
            future.set_result(None)

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the call has ended.

        Args:
            timeout: how long to wait; zero or less waits for as long as the group's timeout allows.

        Raises:
            CommError: the call has not ended in time.
            Exception: what the call raised.
        """
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

        # An exception that is set on a future is seen by Python alone. One that a callback raises is seen by C++ too.
        def result(_: Future[Any]) -> Any:
            if self._error is not None:
                raise self._error
            return self._result

        future = trigger.then(result)
        with self._lock:
            pending = not self._done.is_set()
            if pending:
                self._futures.append(trigger)
        if not pending:
            trigger.set_result(None)
        return future

    @override
    def is_completed(self) -> bool:
        return self._done.is_set()

    @override
    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

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


class Line:
    """The calls of one group, in order."""

    def __init__(self, watchdog: Watchdog, name: str) -> None:
        """Not collective.

        Args:
            watchdog: looks at every call while it runs. A call that waits for its turn is not late.
            name: of the group, for messages.
        """
        self._watchdog, self._name = watchdog, name
        self._queue: queue.SimpleQueue[tuple[Started, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._running = threading.Lock()  # around each call
        self._waiting = 0  # calls in the queue, and the one that the thread makes
        self._count = threading.Lock()  # around the number
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None

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
        started = Started(what, result, limit_s)
        if threading.current_thread() is self._thread:  # see [Note: Calls of a callback]
            self._make(started, call)
            return started
        with self._count:
            here = not later and limit_s is None and self._waiting == 0
            if not (here and self._running.acquire(blocking=False)):
                here = False
                self._waiting += 1
                self._queue.put((started, call))
                self._awake()
        if here:
            try:
                self._make(started, call)
            finally:
                self._running.release()
        return started

    def drain(self, limit_s: float) -> bool:
        """Whether all that was started has ended within ``limit_s`` seconds. Not collective."""
        deadline = time.monotonic() + limit_s
        while self._waiting:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def close(self) -> None:
        """End the thread, after what was started."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _awake(self) -> None:
        if self._thread is None:
            # Daemon: a job that ends in an error must not wait for a call that never ends.
            self._thread = threading.Thread(
                target=self._work, name=f"hpczero-bridge-{self._name}", daemon=True
            )
            self._thread.start()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            started, call = item
            with self._running:
                self._make(started, call, from_queue=True)
            del item, started, call  # they hold tensors

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
                    self._broken = failure
        if from_queue:
            with self._count:
                self._waiting -= 1
        with contextlib.suppress(RuntimeError):  # of a callback of the program's
            started.settle(error)
