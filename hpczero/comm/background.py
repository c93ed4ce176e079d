"""Operations in the background: they run while the model computes, one after the other, on a thread of their own.

MPI matches the calls of a communicator by their order. One thread therefore makes all calls on the communicators of the
operations. This needs an MPI that lets two threads call it at a time.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import torch
from mpi4py import MPI

from hpczero.accelerator import Accelerator, Lane, Mark
from hpczero.job.watchdog import Watchdog

_Operation = tuple[str, Mark, Callable[[], None], "Future[None]"]


def can_run_in_background() -> bool:
    """Whether this MPI lets a second thread call it: the same on every rank of a job. Not collective."""
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


class Background:
    """Runs operations in the order in which it is given them. The thread starts with the first one."""

    def __init__(self, watchdog: Watchdog, accelerator: Accelerator) -> None:
        """Not collective. ``watchdog`` looks at every operation while it runs, and not while it waits for its turn.

        An operation begins when the device has done what the caller had started before, on a lane of its own. It has
        ended when the device has done its work too.
        """
        self._watchdog = watchdog
        self._accelerator = accelerator
        self._operations: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[None] | None = None

    def start(self, what: str, operation: Callable[[], None]) -> Callable[[], None]:
        """Run ``operation`` when its turn has come; ``what`` is printed if it never ends.

        The operation touches nothing that the caller changes before it has waited. The result waits for the end, and
        raises what the operation raised. Every later operation then raises the same and is not run.
        """
        if self._thread is None:
            # Daemon: a job that ends in an error must not wait for a message that never comes.
            self._thread = threading.Thread(
                target=_work,
                args=(self._operations, self._watchdog, self._accelerator),
                name="hpczero-comm",
                daemon=True,
            )
            self._thread.start()
            weakref.finalize(self, self._operations.put, None).atexit = False  # of a dropped model
        future: Future[None] = Future()
        self._last = future
        self._operations.put((what, self._accelerator.mark(), operation, future))
        return future.result

    def drain(self) -> None:
        """Return when nothing is under way. Raises what an operation raised."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """End the thread, after what was started."""
        if self._thread is not None:
            self._operations.put(None)
            self._thread.join()
            self._thread = None


@torch.no_grad()  # the mode belongs to the thread, and so does the choice of the device
def _work(
    operations: queue.SimpleQueue[_Operation | None], watchdog: Watchdog, accelerator: Accelerator
) -> None:
    lane: Lane | None = None
    error: BaseException | None = None
    while (item := operations.get()) is not None:
        what, before, operation, future = item
        if error is None:
            try:
                with watchdog.collective(what):
                    if lane is None:
                        accelerator.enter_thread()
                        lane = accelerator.lane()
                    before.wait()
                    with lane.current():
                        operation()
                    lane.finish()
            except BaseException as failure:
                error = failure  # whose traceback keeps what MPI may still read and write
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
        del item, before, operation, future  # they hold buffers
