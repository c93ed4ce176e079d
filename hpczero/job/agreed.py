"""Rank-local work that may fail: if it fails on one rank, all ranks raise, and say which.

Owns: what the others are told, and which error of several is raised. Must not know: what the work is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mpi4py import MPI

from hpczero import errors
from hpczero.errors import HpcZeroError
from hpczero.job.told import told_all
from hpczero.job.watchdog import Watchdog


@contextmanager
def agreed(comm: MPI.Intracomm, watchdog: Watchdog, what: str) -> Iterator[None]:
    """Run rank-local work inside; if any rank of ``comm`` raises, all of them raise.

    Collective over ``comm``, at the end of the block. The block must not communicate: a rank that fails leaves it
    early.

    Args:
        comm: the ranks that agree.
        watchdog: of the call at the end.
        what: names the work in the message, e.g. ``"open the token file"``.

    Raises:
        HpcZeroError: of the class that the first failing rank raised; the message names the ranks that failed. A
            foreign exception is raised again unchanged on its own rank, and named in the error of every other rank. It
            goes first where ranks fail differently, because its rank may not be able to go on.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # raised again below, on every rank
        error = caught
    except GeneratorExit:
        raise
    except BaseException as left:  # this rank does not come to the agreement
        if comm.size > 1:
            watchdog.cut_off.note(f"the agreement of all ranks after {what!r}", left)
        raise
    is_foreign = not isinstance(error, HpcZeroError)
    mine = None if error is None else (is_foreign, _told_as(error), errors.words_of(error))
    with watchdog.collective(f"the agreement of all ranks after {what!r}"):
        failed = np.array([error is not None], dtype=np.int64)
        comm.Allreduce(MPI.IN_PLACE, failed, op=MPI.MAX)
        if not failed[0]:
            return
        reports = comm.allgather(mine)
    failures = [(rank, *entry) for rank, entry in enumerate(reports) if entry is not None]
    failures = [failure for failure in failures if failure[1]] or failures
    ranks = [failure[0] for failure in failures]
    _, foreign, name, text = failures[0]
    kind = None if foreign else getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, HpcZeroError)):
        kind = HpcZeroError
        text = f"{name}: {text}"
    if error is not None and is_foreign:
        told_all(error, comm)
        raise error
    where = "" if len(ranks) == comm.size else f"on rank(s) {spans(ranks)}, could not {what}: "
    told = kind(f"{where}{text}")
    told_all(told, comm)
    raise told from error


def spans(ranks: Sequence[int]) -> str:
    """``0-3, 7`` for [0, 1, 2, 3, 7]."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def _told_as(error: Exception) -> str:
    """Name of the error's class. For one that ``errors`` does not have it is that of its nearest base in ``errors``."""
    for kind in type(error).__mro__:
        if issubclass(kind, HpcZeroError) and getattr(errors, kind.__name__, None) is kind:
            return str(kind.__name__)
    return type(error).__name__
