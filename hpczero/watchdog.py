"""The watchdog: a call that does not return ends the job instead of holding the allocation.

Owns: the deadline of the call in progress. Must not know: what the call does.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time

from hpczero.errors import EXIT_HANG, abort_job


class Watchdog:
    """Looks at the calls in progress from a daemon thread; started by the first watched call.

    Attributes:
        timeout_s: seconds one call may take before the job is ended with exit 86; 0 waits for ever.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank = rank
        self.timeout_s = timeout_s
        self._calls: list[tuple[str, float]] = []
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
            atexit.unregister(self.stop)

    def _begin(self, what: str) -> None:
        self._calls.append((what, time.monotonic()))
        if self._thread is None and self.timeout_s > 0 and not self._stop.is_set():
            self._thread = threading.Thread(target=self._look, name="hpczero-watchdog", daemon=True)
            self._thread.start()
            atexit.register(self.stop)

    def _end(self) -> None:
        self._calls.pop()

    def _look(self) -> None:
        period = min(max(self.timeout_s / 10, 0.05), 5.0)
        while not self._stop.wait(period):
            innermost = self._calls[-1:]
            if not innermost:
                continue
            what, start = innermost[0]
            if time.monotonic() - start > self.timeout_s:
                sys.stderr.write(
                    f"[rank {self.rank}] hang: {what} has not finished after {self.timeout_s:g} s. "
                    "A peer failed, left early, runs other modules, or still works; run once with "
                    "HPCZERO_STRICT=1 to see which. HPCZERO_TIMEOUT sets this limit. Stacks follow.\n"
                )
                sys.stderr.flush()
                faulthandler.dump_traceback(all_threads=True)
                abort_job(EXIT_HANG)
                # The job is this process alone: nobody to abort, and the call never returns.
                os._exit(EXIT_HANG)


class _Watch:
    def __init__(self, watchdog: Watchdog, what: str) -> None:
        self._watchdog = watchdog
        self._what = what

    def __enter__(self) -> None:
        self._watchdog._begin(self._what)

    def __exit__(self, *exception: object) -> None:
        self._watchdog._end()
