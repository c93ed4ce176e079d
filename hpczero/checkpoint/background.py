"""A save on a thread.

Owns: the thread, its communicator, and what becomes of a save that nobody waits for. Must not know: locks, folders,
what is written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpczero.errors import CheckpointError
from hpczero.job.topology import Topology

logger = logging.getLogger("hpczero.checkpoint")

_left: list[threading.Thread] = []  # that write what nobody waits for


class Background:
    """One write on a thread, over a communicator of its own."""

    def __init__(self, topology: Topology) -> None:
        """Not collective."""
        self._topology = topology
        self._own: Topology | None = None
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._guard = threading.Lock()
        self._ended = False
        self._then: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """Whether a write has been started and not been finished."""
        return self._thread is not None

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for on this rank."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, work: Callable[[Topology], Path]) -> None:
        """Start a write. Collective over world the first time."""
        if self._own is None:
            self._own = replace(self._topology, world=self._topology.world.beside())
        own = self._own
        self._ended, self._then = False, None

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
            if then is not None:
                self._end_alone(then)

        # Not a daemon: a program that ends without ``close`` still ends with a whole checkpoint.
        self._thread = threading.Thread(target=run, name="hpczero-checkpoint")
        self._thread.start()

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
            _left.append(self._thread)

    def _end_alone(self, then: Callable[[], None]) -> None:
        if self._error is not None and self._topology.is_root:
            logger.warning("the save in flight when an exception came has failed: %s", self._error)
        then()

    def finish(self) -> Path | None:
        """Wait for the thread of this rank. Not collective, but the thread's work is.

        Raises:
            CheckpointError: what the write raised.
        """
        assert self._thread is not None, "busy"
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            if isinstance(error, CheckpointError):
                raise type(error)(str(error)) from error
            raise error
        return self._path

    def close(self) -> None:
        """Wait for the write and free the communicator. Collective over world."""
        if self._own is not None:
            self._own.world.comm.Free()
            self._own = None


def wait_for_left() -> None:
    """Return when all writes that were left are done or have failed. Not collective."""
    while _left:
        _left.pop().join()
