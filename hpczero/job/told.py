"""Told: errors that all ranks of a communicator raise together.

Owns: the marks on such an error. Must not know: what went wrong, who acts on the marks (``errors.run``, CutOff).
"""

from __future__ import annotations

from mpi4py import MPI


def told_all(error: Exception, comm: MPI.Intracomm) -> None:
    """Mark ``error``, which every rank of ``comm`` raises. Not collective."""
    error.agreed = is_job(comm)  # type: ignore[attr-defined]
    error.raised_by = comm.size  # type: ignore[attr-defined]


def is_job(comm: MPI.Intracomm) -> bool:
    """Whether these are all ranks that were started: an error that all of them raise needs to be told to nobody."""
    return bool(comm.size == MPI.COMM_WORLD.size)
