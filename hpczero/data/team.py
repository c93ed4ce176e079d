"""The contract of a team, and the team of one process, which needs no MPI.

Owns: what ranks do together while a token file is made. Must not know: text, tokens, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hpczero.job.long_work import Progress

T = TypeVar("T")
Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


class Team(Protocol):
    """Ranks that work on parts of one thing. Every method is collective: all ranks make the same calls in one order.

    A rank that waits sleeps, so its cores are free for the threads that work.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        progress: told how far the work of this rank is.
    """

    rank: int
    size: int
    progress: Progress

    def agreed(self, what: str) -> AbstractContextManager[None]:
        """Run rank-local work inside; if any rank raises, all ranks raise. ``what`` names the work in the message."""
        ...

    def all_gather(self, mine: Int64Array) -> Int64Array:
        """int64 (k,) of every rank as (size, k)."""
        ...

    def all_gather_lists(self, mine: Sequence[T]) -> list[list[T]]:
        """The list of every rank, in rank order. Its items must pickle."""
        ...

    def gather(self, mine: ByteArray, nbytes: Sequence[int]) -> list[ByteArray]:
        """Bytes of every rank, on rank 0; empty elsewhere. ``nbytes`` has their number on each rank."""
        ...

    def take_steps(self, what: str, steps: Iterator[object]) -> None:
        """Exhaust ``steps``, this rank's own, while all ranks meet now and then.

        Raises:
            HpcZeroError: the steps of some rank raised; on every rank, as ``agreed``.
        """
        ...

    def by_root(self, what: str, work: Callable[[Progress], str]) -> str:
        """What ``work`` returns on rank 0, on every rank."""
        ...


class Alone:
    """The team of one process."""

    rank, size = 0, 1

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress or Progress()

    def agreed(self, what: str) -> AbstractContextManager[None]:
        """Nobody else need know."""
        return nullcontext()

    def all_gather(self, mine: Int64Array) -> Int64Array:
        """(k,) as (1, k)."""
        return mine[None]

    def all_gather_lists(self, mine: Sequence[T]) -> list[list[T]]:
        """The one list."""
        return [list(mine)]

    def gather(self, mine: ByteArray, nbytes: Sequence[int]) -> list[ByteArray]:
        """The one array."""
        return [mine]

    def take_steps(self, what: str, steps: Iterator[object]) -> None:
        """Exhaust them."""
        for _ in steps:
            pass

    def by_root(self, what: str, work: Callable[[Progress], str]) -> str:
        """Call it."""
        return work(self.progress)
