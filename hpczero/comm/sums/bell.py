"""Sleep until another rank of the node has come far enough: a rank that waits leaves its core to those that work.

Owns: the wait on counters in shared memory, by futex. Must not know: what the counters count.

Ranks of a layer wait for each other many times in a step. Where there are more ranks than cores, whoever looks again
and again takes time from those that it waits for. A rank therefore looks for a moment, and then sleeps in the kernel.
It wakes at least every millisecond, so that MPI's messages go on. Where there is no futex (other systems than Linux, or
a processor that is not known here) it looks again and again, as ``Counters`` do.

Source: futex(2); the numbers of the call are those of the kernel's tables.
"""

from __future__ import annotations

import ctypes
import platform
import sys

from mpi4py import MPI

from hpczero.comm.inside.segment import Counters

FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}
WAIT, WAKE = range(2)
EVERYBODY = 2**31 - 1
LOOKS = 30  # before it sleeps
NAP_NS = 10**6


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """Tells others that a counter has changed, and waits for theirs."""

    def __init__(self, comm: MPI.Intracomm, counters: Counters, column: int) -> None:
        """Not collective.

        Args:
            comm: the ranks of the counters; MPI's messages go on while this one waits.
            counters: borrowed.
            column: which of their numbers.
        """
        self._comm, self._counters, self._column = comm, counters, column
        self._addresses = [
            ctypes.c_void_p(counters.address(rank, column)) for rank in range(comm.size)
        ]
        known = sys.platform == "linux" and sys.byteorder == "little"
        self._number = FUTEX.get(platform.machine()) if known else None
        self._call = ctypes.CDLL(None).syscall
        self._nap = ctypes.byref(_Time(0, NAP_NS))

    def publish(self, value: int) -> None:
        """Say that this rank has come to ``value``, and wake who sleeps until it does."""
        self._counters.publish(self._column, value)
        if self._number is not None:
            address = self._addresses[self._comm.rank]
            self._call(self._number, address, WAKE, EVERYBODY, None, None, 0)

    def wait(self, value: int) -> None:
        """Return when every rank has come to ``value``."""
        counters, column = self._counters, self._column
        if self._number is None:
            counters.wait(column, value)
            return
        for _ in range(LOOKS):
            if counters.reached(column, value):
                return
        for rank, address in enumerate(self._addresses):
            while (seen := counters.read(rank, column)) < value:
                self._comm.Iprobe()  # a peer may wait for the rest of a message of ours
                # It returns at once if the counter has changed since it was read.
                low = ctypes.c_uint32(seen & 0xFFFFFFFF)
                self._call(self._number, address, WAIT, low, self._nap, None, 0)
        counters.wait(column, value)
