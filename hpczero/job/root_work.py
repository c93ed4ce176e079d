"""Work that rank 0 does alone while the others wait, for longer than a collective may take.

No rank is taken for hung while the work gets on, and every rank is if it does not. The result or the error of the work
is that of all ranks. The work has the cores of the ranks that wait.

[Note: Meetings]
The work runs on a thread of rank 0. Meanwhile all ranks meet again and again. Rank 0 comes to a meeting once the work
has got on since the last one (what that means: long_work.py). Every wait is therefore short while the work gets on. If
it has not got on for HPCZERO_TIMEOUT, the watchdog ends the job as for any other hang.

[Note: Sleeping]
A rank that waits in a collective polls for messages without a pause and uses a core. Here ranks start the collective
and sleep between looks whether it is complete. The work therefore gets the cores of all ranks of its node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hpczero.errors import StoppedEarly
from hpczero.job.group import told_all
from hpczero.job.long_work import LOOK_S, LongWork, Moment, Progress
from hpczero.job.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

SHORTEST_S, LONGEST_S = 0.05, 0.5  # between two meetings
GRACE_S = 1.0  # who is asked to stop that early does short work all the same: the run then has something to save
LEAST_SLEEP_S, MOST_SLEEP_S = 0.0005, 0.02  # between two looks


def done_by_root(
    topology: Topology,
    what: str,
    work: Callable[[Progress], str],
    *,
    show: Callable[[Moment], None] = lambda moment: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> str:
    """What ``work`` returns on rank 0, on every rank. Collective over world.

    Args:
        topology: its watchdog says how long the work may go without a sign of life.
        what: names the work in messages, e.g. ``"prepare the token file"``.
        work: called on rank 0 alone, on a thread that may run on the cores of all ranks of its node. It reports to its
            argument whenever it has got on. It must not communicate.
        show: called on rank 0, several times a second.
        is_stopped: whether this process was asked to stop. Every rank is asked after the first second; one stops all.

    Raises:
        StoppedEarly: some rank was asked to stop; on every rank.
        HpcZeroError: ``work`` raised; as ``Topology.agreed`` says, on every rank.
    """
    with topology.watchdog.collective(f"waiting for all ranks to {what}"):
        cores = topology.world.node.allgather(os.sched_getaffinity(0))
    task = LongWork(work, frozenset().union(*cores)) if topology.is_root else None
    limit_s = topology.watchdog.timeout_s
    period_s = min(max(limit_s / 10, SHORTEST_S), LONGEST_S) if limit_s else LONGEST_S
    has_finished = stops = False
    begun = time.monotonic()

    def stops_here() -> bool:
        return time.monotonic() - begun > GRACE_S and is_stopped()

    try:
        while not (has_finished or stops):
            with topology.watchdog.collective(f"waiting for rank 0 to {what}"):
                if task is not None:
                    has_finished = _finished(task, period_s, show, stops_here)
                has_finished, stops = _anywhere(topology, has_finished, stops_here())
    except BaseException:
        # A signal of the user's: the other ranks end by it too, or by the end of this one.
        if task is not None:
            task.end()
        raise
    if not has_finished:
        if task is not None:
            task.end()
        early = StoppedEarly(f"asked to stop before there was anything to save; did not {what}")
        raise told_all(early, topology.world.comm)
    text = ""
    with topology.agreed(what):
        if task is not None:
            text = task.result()
    return topology.broadcast_text(text)


def _finished(
    task: LongWork[str],
    period_s: float,
    show: Callable[[Moment], None],
    is_stopped: Callable[[], bool],
) -> bool:
    """Whether the work is over.

    Returns when it is or shall end. Otherwise it returns after ``period_s``, or later, when the work has got on.
    """
    until = time.monotonic() + period_s
    has_got_on = False
    while not task.wait(min(LOOK_S, period_s)):
        show(task.progress.now())
        if is_stopped():
            task.progress.end()  # now: whoever sent the signal may not wait long
            return False
        has_got_on = has_got_on or task.has_got_on()
        if has_got_on and time.monotonic() >= until:
            return False
    return True


def _anywhere(topology: Topology, *mine: bool) -> tuple[bool, ...]:
    """Whether each holds on any rank. Collective over world ([Note: Sleeping])."""
    found = np.empty(len(mine), dtype=np.int64)
    wait_asleep(topology.world.comm.Iallreduce(np.array(mine, dtype=np.int64), found))  # a sum
    return tuple(bool(count) for count in found)


def wait_asleep(request: MPI.Request) -> None:
    """Wait for a request; this process's cores are free meanwhile ([Note: Sleeping])."""
    sleep_s = LEAST_SLEEP_S
    while not request.Test():
        time.sleep(sleep_s)
        sleep_s = min(2 * sleep_s, MOST_SLEEP_S)
