"""Teams, which make files together: a team of one process, which needs no MPI, and one of all ranks.

[Note: Who may be slow]
No collective takes longer than the work of a rank between two meetings: some blocks of a file. The watchdog therefore
ends the job where a rank hangs, for instance on a file server that is gone, and not because there is much to do.

[Note: Asked to end]
A rank that sleeps hears a signal at once. One that is inside of a collective hears it when all are there, which is
never once another has gone: rank 0 could not take away the file that it has begun. The waits between work are asleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from hpczero.job.long_work import Moment, Progress

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

T = TypeVar("T")
R = TypeVar("R")
Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


class Alone:
    """The team of one process; methods as of ``Ranks``."""

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


MEET_S = 0.5  # of work between two meetings, at least


class Ranks:
    """The team of all ranks of a topology, which work on parts of one thing.

    Every method is collective: all ranks make the same calls in one order. A rank that waits sleeps, so its cores are
    free for the threads that work.

    Attributes:
        rank: of this process, from 0.
        size: number of ranks.
        progress: told how far the work of this rank is.
    """

    def __init__(
        self, topology: Topology, show: Callable[[Moment], None] = lambda moment: None
    ) -> None:
        """``show`` is told on rank 0 how far it is, whenever all ranks meet."""
        self.rank, self.size = topology.rank, topology.size
        self.progress = Progress()
        self._topology = topology
        self._show = show

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Run rank-local work inside; if any rank raises, all ranks raise. ``what`` names the work in the message.

        As ``Topology.agreed``, but asleep until all are there ([Note: Asked to end]).
        """
        error = None
        try:
            yield
        except Exception as caught:  # raised again below, on every rank
            error = caught
        if self.all_gather(np.array([error is not None], dtype=np.int64)).any():
            with self._topology.agreed(what):
                if error is not None:
                    raise error

    def all_gather(self, mine: Int64Array) -> Int64Array:
        """int64 (k,) of every rank as (size, k)."""
        from hpczero.job.root_work import wait_asleep

        found = np.empty((self.size, len(mine)), dtype=np.int64)
        with self._topology.watchdog.collective("a meeting of the ranks that make a file"):
            wait_asleep(self._topology.world.comm.Iallgather(mine, found))
        if self.rank == 0:
            self._show(self.progress.now())
        return found

    def all_gather_lists(self, mine: Sequence[T]) -> list[list[T]]:
        """The list of every rank, in rank order. Its items must pickle."""
        self.all_gather(np.zeros(1, dtype=np.int64))  # asleep until all are there
        with self._topology.watchdog.collective("an exchange of the ranks that make a file"):
            return self._topology.world.comm.allgather(list(mine))

    def gather(self, mine: ByteArray, nbytes: Sequence[int]) -> list[ByteArray]:
        """Bytes of every rank, on rank 0; empty elsewhere. ``nbytes`` has their number on each rank."""
        from hpczero.job.root_work import wait_asleep

        found = np.empty(sum(nbytes) if self.rank == 0 else 0, dtype=np.uint8)
        into = (found, list(nbytes)) if self.rank == 0 else None
        with self._topology.watchdog.collective("the gather of a file on rank 0"):
            wait_asleep(self._topology.world.comm.Igatherv(mine, into))
        return np.split(found, np.cumsum(nbytes)[:-1]) if self.rank == 0 else []

    def take_steps(self, what: str, steps: Iterator[object]) -> None:
        """Exhaust ``steps``, this rank's own, while all ranks meet now and then ([Note: Who may be slow]).

        Raises:
            HpcZeroError: the steps of some rank raised; on every rank, as ``agreed``.
        """
        done = False
        while True:
            error = None
            until = time.monotonic() + MEET_S
            try:
                while not done and time.monotonic() < until:
                    done = next(steps, self) is self
            except Exception as caught:  # raised again below, on every rank
                error = caught
            found = self.all_gather(np.array([done, error is not None], dtype=np.int64))
            if found[:, 1].any():
                with self._topology.agreed(what):
                    if error is not None:
                        raise error
            if found[:, 0].all():
                return

    def by_root(self, what: str, work: Callable[[Progress], str]) -> str:
        """What ``work`` returns on rank 0, on every rank. It may use the cores of all ranks of its node."""
        from hpczero.job.root_work import done_by_root

        return done_by_root(self._topology, what, work, show=self._show)


Team = Alone | Ranks


def shared(
    team: Team, what: str, items: Sequence[T], work: Callable[[T], Generator[None, None, R]]
) -> list[R]:
    """What ``work`` returns for each item, on every rank; each rank works at a share. Collective over the team.

    ``work`` yields after each of its steps. Raises as ``Ranks.take_steps``.
    """
    mine: list[tuple[int, R]] = []

    def steps() -> Iterator[None]:
        for number in range(team.rank, len(items), team.size):
            mine.append((number, (yield from work(items[number]))))
            yield

    team.take_steps(what, steps())
    found = dict(entry for share in team.all_gather_lists(mine) for entry in share)
    return [found[number] for number in range(len(items))]
