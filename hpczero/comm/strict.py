"""The strict order check: ranks agree on the next call before they make it.

Owns: the comparison, and the message that names the rank that differs. Must not know: what the calls do.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from mpi4py import MPI

from hpczero.errors import CommError
from hpczero.job.told import told_all

RECORD_NBYTES = 192


class OrderCheck:
    """Compares (step, operation, unit, bytes) over all ranks, by one exchange per call (``HPCZERO_STRICT=1``)."""

    def __init__(self, world: MPI.Intracomm) -> None:
        """Collective over ``world``; ``free()`` undoes it."""
        self._comm = world.Dup()
        self._comm.Set_name("hpczero.order")
        self._sequence = 0

    def check(self, step: int, operation: str, unit: str, nbytes: int) -> None:
        """Raise on every rank if one is about to make another call than the others. Collective.

        Raises:
            CommError: the message names each rank that differs from the majority, and both calls.
        """
        self._sequence += 1
        record = f"{operation} of {unit!r}, {nbytes} bytes, step {step}".encode()[:RECORD_NBYTES]
        mine = np.zeros(RECORD_NBYTES, dtype=np.uint8)
        mine[: len(record)] = np.frombuffer(record, dtype=np.uint8)
        found = np.empty((self._comm.size, RECORD_NBYTES), dtype=np.uint8)
        self._comm.Allgather(mine, found)
        if (found == mine).all():
            return
        calls = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in found]
        usual, votes = Counter(calls).most_common(1)[0]
        odd = [f"rank {rank}: {call}" for rank, call in enumerate(calls) if call != usual]
        error = CommError(
            f"ranks disagree about collective number {self._sequence}. {votes} of {len(calls)} rank(s) "
            f"start {usual}; {'; '.join(odd[:8])}"
            f"{f' and {len(odd) - 8} more' if len(odd) > 8 else ''}. Every rank must run the same "
            "modules in the same order; look for a branch on rank or data before this call"
        )
        told_all(error, self._comm)
        raise error

    def free(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()
