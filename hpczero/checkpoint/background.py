"""A save on a thread.

Owns: the thread, its communicator, and what becomes of a save that nobody waits for. Must not know: locks, folders,
what is written.

[Note: No join]
An exception of a signal handler in ``Thread.join`` has Python 3.11 take the thread for ended (bpo-45274), also when the
interpreter ends. Who waits here waits for an event.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpczero.errors import CheckpointError
from hpczero.job.topology import Topology, before_finalize

logger = logging.getLogger("hpczero.checkpoint")

_begun: set[threading.Event] = set()  # the ends of all writes under way
_left: list[threading.Event] = []  # the ends of writes that nobody waits for


class Background:
    """One write on a thread, over a communicator of its own."""

    def __init__(self, topology: Topology) -> None:
        """Not collective."""
        self._topology = topology
        self._own: Topology | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()  # all that the thread does; see [Note: No join]
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._guard = threading.Lock()
        self._ended = self._told = False
        self._then: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a write has been started and not been finished."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for on this rank."""
        return self.busy and self._over.is_set()

    def start(self, work: Callable[[Topology], Path]) -> None:
        """Start a write. Collective over world the first time."""
        if self._own is None:
            self._own = replace(self._topology, world=self._topology.world.beside())
            atexit.register(self._tell_unheard)
        own, over = self._own, threading.Event()
        self._over = over
        _begun.add(over)
        before_finalize(_wait_for_begun)  # HDF5 is loaded by now
        self._ended, self._told, self._then = False, False, None

        def run() -> None:
            try:
                with (
                    own.watchdog.cut_off.apart()
                ):  # who goes on from a checkpoint may need this one
                    self._path = work(own)
            except BaseException as error:
                self._error = error
            with self._guard:
                self._ended = True
                then = self._then
            try:
                if then is not None:
                    self._end_alone(then)
            finally:
                over.set()
                _begun.discard(over)

        # Not a daemon: a program that ends without ``close`` still ends with a whole checkpoint.
        self._thread = threading.Thread(target=run, name="hpczero-checkpoint")
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread to give; peers are in the write
            run()

    def leave(self, then: Callable[[], None]) -> None:
        """Go on without a caller who waits; ``then`` is called at the end. Not collective.

        Peers write their parts on threads too, so the write ends as long as they live. The communicator is not freed.
        """
        assert self._thread is not None, "busy"
        with self._guard:
            ended = self._ended
            self._then = then
        if ended:
            self._end_alone(then)
        else:
            _left.append(self._over)

    def _end_alone(self, then: Callable[[], None]) -> None:
        if self._error is not None and self._own is not None and self._own.is_root:
            logger.warning("the save in flight when an exception came has failed: %s", self._error)
        self._told = True
        then()

    def finish(self) -> Path | None:
        """Wait for the thread of this rank. Not collective, but the thread's work is.

        Raises:
            CheckpointError: what the write raised.
        """
        assert self._thread is not None, "busy"
        self._over.wait()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            if isinstance(error, CheckpointError):
                raise type(error)(str(error)) from error
            raise error
        return self._path

    def _tell_unheard(self) -> None:
        """At the program's end: a write has failed, and nobody has waited for it."""
        if self._error is None or self._told or self._own is None:
            return
        if self._own.is_root:
            logger.warning("the save in flight when the program ended has failed: %s", self._error)

    def close(self) -> None:
        """Free the communicator, once nothing is written. Collective over world."""
        if self._own is not None:
            atexit.unregister(self._tell_unheard)
            self._own.world.comm.Free()
            self._own = None


def wait_for_left() -> None:
    """Return when all writes that were left are done or have failed. Not collective."""
    while _left:
        _left[-1].wait()
        _left.pop()


def _wait_for_begun() -> None:
    for over in list(_begun):
        over.wait()
