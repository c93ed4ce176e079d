"""Parcels: arrays that go from rank to rank of a group outside of any transport.

Owns: the messages. Must not know: what is in them, units, shards. For what happens seldom: the first values, whole
weights for a file. What a step sends is the business of a transport (``comm``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpczero.job.group import Group

CHUNK_NBYTES = 2**30  # of one message: MPI counts in 32 bits

Array = npt.NDArray[Any]


def hand_out(group: Group, array: Array, root: int = 0) -> None:
    """Give every rank of ``group`` what ``array`` of rank ``root`` holds, in place. Collective over the group.

    Args:
        group: the ranks.
        array: contiguous, of equal shape and dtype on all of them; written on all ranks but ``root``.
        root: rank of the group.
    """
    if group.size == 1:
        return
    with group.watchdog.collective("handing values out"):
        for part in _chunks(array):
            group.comm.Bcast([part, MPI.BYTE], root=root)


def bring(group: Group, array: Array, source: int, root: int = 0) -> None:
    """Bring ``array`` of rank ``source`` into ``array`` of rank ``root``. Those two ranks call it; nobody else.

    Args:
        group: the ranks.
        array: contiguous, of equal shape and dtype on both; written on ``root``.
        source: rank of the group.
        root: rank of the group.
    """
    if source == root:
        return
    with group.watchdog.collective(f"values of rank {source} for rank {root}"):
        for part in _chunks(array):
            if group.rank == source:
                group.comm.Send([part, MPI.BYTE], dest=root)
            else:
                group.comm.Recv([part, MPI.BYTE], source=source)


def _chunks(array: Array) -> list[npt.NDArray[np.uint8]]:
    flat = array.reshape(-1).view(np.uint8)
    return [flat[start : start + CHUNK_NBYTES] for start in range(0, flat.size, CHUNK_NBYTES)]
