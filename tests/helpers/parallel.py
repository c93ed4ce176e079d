"""Assertions that all ranks make together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


def on_root(comm: MPI.Intracomm, call: Callable[..., object], *args: Any, **options: Any) -> None:
    """``call(*args, **options)`` on rank 0 alone, once all ranks are here; none goes on before it is done.

    Where it fails, the test fails on all ranks. Collective over ``comm``.
    """
    __tracebackhide__ = True
    comm.Barrier()
    error: Exception | None = None
    if comm.rank == 0:
        try:
            call(*args, **options)
        except Exception as caught:  # judged below, on every rank
            error = caught
    parallel_assert(comm, error is None, f"{type(error).__name__}: {error}")


def told(
    kind: type[Exception] | tuple[type[Exception], ...],
    call: Callable[..., object],
    *args: Any,
    **options: Any,
) -> str:
    """What ``call(*args, **options)`` says on this rank where it raises ``kind``, for ranks to judge together.

    Empty where it does not raise.
    """
    try:
        call(*args, **options)
    except kind as error:
        return str(error)
    return ""
