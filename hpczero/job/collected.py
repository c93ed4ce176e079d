"""Collected: arrays and small objects of every rank, on every rank, for programs that gather metrics.

Owns: the messages, and the refusal where ranks are in different calls. Must not know: what is in them, units, shards.
For what happens between steps; what a step sends is the business of a transport (``comm``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpczero.errors import CommError
from hpczero.job.group import Group
from hpczero.job.parcels import CHUNK_NBYTES, hand_out
from hpczero.job.told import told_all

Array = npt.NDArray[Any]

SAME_TAG = 30_001


def same_call(group: Group, what: str, detail: Any = None) -> list[Any]:
    """``detail`` of every rank in rank order, once all ranks are in the call ``what``. Collective over the group.

    Args:
        group: the ranks.
        what: names the call, equal on all ranks.
        detail: small, and can be pickled.

    Raises:
        CommError: on every rank, if one of them is in another call that begins with this one.
    """
    if group.size == 1:
        return [detail]
    with group.watchdog.collective(what):
        found = group.comm.allgather((what, detail))
        calls = [call for call, _ in found]
        if len(set(calls)) > 1:
            odd = next(rank for rank, call in enumerate(calls) if call != calls[0])
            error = CommError(
                f"rank {odd} is about to {calls[odd]}, and rank 0 to {calls[0]}: ranks must take the same steps; check "
                "what differs between them (lengths of data, conditions on the rank, callbacks that stop)"
            )
            told_all(error, group.comm)
            raise error
        return [each for _, each in found]


def objects(group: Group, mine: Any, what: str) -> list[Any]:
    """``mine`` of every rank in rank order, on every rank. Collective over the group.

    Args:
        group: the ranks.
        mine: can be pickled.
        what: as for ``same_call``.

    Raises:
        CommError: as ``same_call``.
    """
    return same_call(group, what, mine)


def arrays(group: Group, mine: Array, what: str) -> list[Array]:
    """``mine`` of every rank in rank order, on every rank. Collective over the group.

    Args:
        group: the ranks.
        mine: contiguous, any shape and plain dtype; shapes may differ between ranks.
        what: as for ``same_call``.

    Returns:
        New arrays; the one of this rank is a copy.

    Raises:
        CommError: as ``same_call``.
    """
    with group.watchdog.operation(what):
        return _arrays(group, mine, what)


def _arrays(group: Group, mine: Array, what: str) -> list[Array]:
    forms = same_call(group, what, (mine.shape, mine.dtype.str))
    counts = [
        int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize for shape, kind in forms
    ]
    starts = np.cumsum([0, *counts])
    found = np.empty(int(starts[-1]), dtype=np.uint8)
    own = slice(int(starts[group.rank]), int(starts[group.rank + 1]))
    found[own] = mine.reshape(-1).view(np.uint8)
    if found.nbytes <= CHUNK_NBYTES:
        with group.watchdog.collective(what):
            places = [int(start) for start in starts[:-1]]
            group.comm.Allgatherv(MPI.IN_PLACE, [found, counts, places, MPI.BYTE])
    else:
        for rank in range(group.size):
            hand_out(group, found[int(starts[rank]) : int(starts[rank + 1])], rank)
    return [
        found[int(starts[rank]) : int(starts[rank + 1])].view(np.dtype(kind)).reshape(shape)
        for rank, (shape, kind) in enumerate(forms)
    ]


def is_same_number(group: Group, mine: int) -> bool:
    """Whether all ranks have the same number of 64 bits. Collective over the group.

    By messages of a tag of its own: no collective that another rank may still be in can be taken for it. Before round k
    a rank knows the least and the largest number of 2**k ranks, from its own on downwards. It sends them 2**k ranks on.
    A number may count twice, which changes neither. A pair of ranks has one round, so a second call cannot be taken for
    the first.

    Source: Bruck et al., Efficient algorithms for all-to-all communications, IEEE TPDS 8(11), 1997.
    """
    comm = group.comm
    known, theirs = np.full(2, mine, dtype=np.int64), np.full(2, mine, dtype=np.int64)
    distance = 1
    while distance < comm.size:
        onward, before = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.Sendrecv(known, onward, SAME_TAG, recvbuf=theirs, source=before, recvtag=SAME_TAG)
        known[0], known[1] = min(known[0], theirs[0]), max(known[1], theirs[1])
        distance *= 2
    return bool(known[0] == known[1])
