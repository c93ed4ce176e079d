"""Assertions that all ranks make together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing MPI would start it where tests are only collected
    from mpi4py import MPI


def parallel_assert(comm: MPI.Intracomm, condition: object, message: str = "") -> None:
    """Fail on every rank if ``condition`` is false on any, so that no rank is left waiting in a later collective.

    Collective over ``comm``.

    Args:
        comm: the ranks that judge together.
        condition: this rank's verdict, by its truth.
        message: what to say; the messages of the ranks that failed are shown.

    Raises:
        AssertionError: on every rank, naming those where ``condition`` is false.
    """
    __tracebackhide__ = True
    verdicts = comm.allgather((bool(condition), message))
    wrong = [f"rank {rank}: {said}" for rank, (ok, said) in enumerate(verdicts) if not ok]
    assert not wrong, f"false on {len(wrong)} of {comm.size} ranks\n" + "\n".join(wrong)
