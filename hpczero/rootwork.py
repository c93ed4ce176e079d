"""Work that rank 0 does alone while the others wait, for longer than a collective may take.

Owns: that no rank is taken for hung as long as the work gets on, and is if it does not; that its result, or its error,
is that of all ranks. Must not know: what the work is.

[Note: Meetings] The work is on a thread of rank 0. Meanwhile all ranks meet again and again, and rank 0 comes to a
meeting once the work has got on since the last one. So every wait is short while it does; where it has not for
HPCZERO_TIMEOUT, the watchdog ends the job as it ends any other hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from hpczero.topology import Topology

SHORTEST_S, LONGEST_S = 0.05, 5.0  # between two meetings

Tick = Callable[[], None]  # the work got on; of any thread, and cheap


def done_by_root(topology: Topology, what: str, work: Callable[[Tick], str]) -> str:
    """What ``work`` returns on rank 0, on every rank. Collective over world.

    Args:
        topology: its watchdog says how long the work may go without a tick.
        what: names the work in messages, e.g. ``"prepare the token file"``.
        work: called on rank 0 alone, on a thread; calls its argument whenever it has got on. It must not communicate.

    Raises:
        HpcZeroError: as ``Topology.agreed``, where ``work`` raised.
    """
    task = _Task(work) if topology.is_root else None
    limit_s = topology.watchdog.timeout_s
    period_s = min(max(limit_s / 10, SHORTEST_S), LONGEST_S) if limit_s else LONGEST_S
    finished = np.zeros(1, dtype=np.int64)
    while not finished[0]:
        with topology.watchdog.watch(f"waiting for rank 0 to {what}"):
            if task is not None:
                finished[0] = task.has_finished(period_s)
            topology.world.Bcast(finished, root=0)
    text = ""
    with topology.agreed(what):
        if task is not None:
            text = task.result()
    return topology.broadcast_text(text)


class _Task:
    """One call on a thread."""

    def __init__(self, work: Callable[[Tick], str]) -> None:
        self._work = work
        self._text = ""
        self._error: BaseException | None = None
        self._got_on = threading.Event()
        self._finished = threading.Event()
        # A daemon: where the job ends for another reason, nothing waits for it.
        self._thread = threading.Thread(target=self._run, name="hpczero-root", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._text = self._work(self._got_on.set)
        except BaseException as error:
            self._error = error
        finally:
            self._finished.set()
            self._got_on.set()

    def has_finished(self, period_s: float) -> bool:
        """Returns after ``period_s``, or when it has got on if that is later; at once when it has finished."""
        self._finished.wait(period_s)
        self._got_on.wait()
        self._got_on.clear()
        return self._finished.is_set()

    def result(self) -> str:
        """What the call returned; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._text
