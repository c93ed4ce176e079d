"""The watchdog: a call that does not return ends the job instead of holding the allocation.

Owns: the deadline of the call in progress. Must not know: what the call does.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

from hpczero.errors import EXIT_HANG, abort_job


class Watchdog:
    """Looks at the call in progress from a daemon thread; started by the first watched call."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self._call: tuple[str, float] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, what: str) -> _Watch:
        """Context manager around one blocking call; ``what`` is printed if it never returns."""
        return _Watch(self, what)

    def stop(self) -> None:
        """End the thread and wait for it, so that none asks for the interpreter at exit."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _begin(self, what: str) -> None:
        self._call = (what, time.monotonic())
        if self._thread is None and self.timeout_s > 0 and not self._stop.is_set():
            self._thread = threading.Thread(target=self._look, name="hpczero-watchdog", daemon=True)
            self._thread.start()

    def _end(self) -> None:
        self._call = None

    def _look(self) -> None:
        period = min(max(self.timeout_s / 10, 0.05), 5.0)
        while not self._stop.wait(period):
            call = self._call
            if call is not None and time.monotonic() - call[1] > self.timeout_s:
                sys.stderr.write(
                    f"[rank {self.rank}] hang: {call[0]} has not finished after {self.timeout_s:g} s. "
                    "A peer failed, left the loop early, or runs other modules; run once with "
                    "HPCZERO_STRICT=1 to see which. HPCZERO_TIMEOUT sets this limit. Stacks follow.\n"
                )
                sys.stderr.flush()
                faulthandler.dump_traceback(all_threads=True)
                abort_job(EXIT_HANG)
                os._exit(
                    EXIT_HANG
                )  # the job is this process alone: nobody to abort, and the call never returns


class _Watch:
    def __init__(self, watchdog: Watchdog, what: str) -> None:
        self._watchdog = watchdog
        self._what = what

    def __enter__(self) -> None:
        self._watchdog._begin(self._what)

    def __exit__(self, *exception: object) -> None:
        self._watchdog._end()
