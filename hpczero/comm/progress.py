"""Progress: messages that go on while a rank computes.

Owns: the thread that calls MPI meanwhile. Must not know: which messages there are.

Many MPI libraries move a message that is too large to be sent at once only while both ends call MPI: 64 KiB over TCP
with Open MPI. A rank that computes for a second then delivers what it has sent a second late.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

from hpczero.accelerator import Accelerator
from hpczero.comm.background import can_run_in_background
from hpczero.job.group import Group

# Between two calls. A call takes a few microseconds of a core; a link of 1 Gbit/s carries 25 KiB in this time, and what
# the kernel holds for a socket is more than that.
NAP_S = 200e-6


@contextmanager
def progress(group: Group, accelerator: Accelerator) -> Iterator[None]:
    """Context in which messages over ``group`` go on by themselves. Not collective.

    It does nothing inside one node, where the receiver fetches what it needs, nor with an MPI that lets one thread call
    it.

    Args:
        group: whose messages; any of its communicators' will do.
        accelerator: device of the rank, of which an MPI may copy.
    """
    if group.num_nodes == 1 or not can_run_in_background():
        yield
        return
    over = threading.Event()
    thread = threading.Thread(
        target=_poll, args=(group.comm, accelerator, over), name="hpczero-progress", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _poll(comm: MPI.Intracomm, accelerator: Accelerator, over: threading.Event) -> None:
    accelerator.enter_thread()
    while not over.wait(NAP_S):
        comm.Iprobe()
