"""Reads: memory of another process on this node, read from where it lies.

Owns: the system call, and the trial that says whether this machine allows it. Must not know: tensors of which call.

Linux lets a process read memory of another one of the same user (process_vm_readv), unless a container or the security
settings of a machine forbid it. Nothing is changed to have it allowed: where the trial fails, bytes take another way.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys

import numpy as np
from torch import Tensor

from hpczero.errors import CommError
from hpczero.job.group import Group

TOKEN_NBYTES = 32


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Reads:
    """Reads of the other ranks' memory."""

    def __init__(self, processes: list[int]) -> None:
        """Not collective; ``create`` tries whether it works.

        Args:
            processes: number of each rank's process.
        """
        self._processes = processes
        self._call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        pointer = ctypes.POINTER(_Piece)
        number = ctypes.c_ulong
        self._call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        self._call.restype = ctypes.c_ssize_t

    @classmethod
    def create(cls, group: Group) -> Reads | None:
        """Reads between the ranks of ``group``, or None where one of them may not. Collective over ``group``."""
        if group.num_nodes > 1 or group.size == 1 or not sys.platform.startswith("linux"):
            return None
        token = np.frombuffer(secrets.token_bytes(TOKEN_NBYTES), dtype=np.uint8).copy()
        told = group.comm.allgather((os.getpid(), token.ctypes.data, token.tobytes()))
        try:
            reads: Reads | None = cls([process for process, _, _ in told])
        except AttributeError:  # a C library without it
            reads = None
        works = reads is not None
        for rank, (_, address, expected) in enumerate(told):
            found = np.zeros(TOKEN_NBYTES, dtype=np.uint8)
            try:
                works = works and reads is not None
                if works and reads is not None:
                    reads.fetch(rank, address, found.ctypes.data, TOKEN_NBYTES)
                    works = found.tobytes() == expected
            except CommError:
                works = False
        # The token must live until all have read it.
        return reads if all(group.comm.allgather(works)) else None

    def fetch(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copy ``nbytes`` at ``address`` of ``rank``'s process to ``into`` of this one. Not collective.

        Raises:
            CommError: it is not allowed, or not memory of that process.
        """
        done = 0
        while done < nbytes:  # the kernel copies at most 2 GiB at a time
            here, there = (_Piece(start + done, nbytes - done) for start in (into, address))
            copied = self._call(self._processes[rank], here, 1, there, 1, 0)
            if copied <= 0:
                number = ctypes.get_errno()
                raise CommError(
                    f"{nbytes:,} bytes of process {self._processes[rank]}, rank {rank} of the group, cannot be read: "
                    f"{os.strerror(number)}"
                )
            done += copied

    def fill(self, target: Tensor, rank: int, address: int) -> None:
        """Fill a contiguous tensor from ``address`` of ``rank``'s process. Not collective."""
        self.fetch(rank, address, target.data_ptr(), target.numel() * target.element_size())
