"""From the shards of ranks to the slabs of a file, and back.

Owns: who sends which elements to whom, in rounds of bounded size. Must not know: files, parameters, torch modules.

A rank's elements of a flat dataset lie in many short runs, because every unit is cut over all ranks. A file is written
best in few long pieces. Each rank is therefore responsible for some consecutive slabs, and elements travel between the
two cuts, a few slabs at a time. A rank holds one flat tensor in the order of the file, so what it sends to a slab is
one slice. Every rank knows what every other one holds, as entries of runs (``even_runs``): a few for each parameter.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.checkpoint.disk.format import Dataset
from hpczero.checkpoint.even_runs import EvenRuns
from hpczero.job.watchdog import Watchdog

ROUND_NBYTES = 16 * 2**20  # of slabs that one rank gathers at a time


class Exchange:
    """The two cuts of one kind of datasets. Methods are collective over the communicator unless they say otherwise."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        watchdog: Watchdog,
        mine: EvenRuns | Sequence[tuple[int, int]],
    ) -> None:
        """Tell every rank what this rank holds. Collective over ``comm``.

        Args:
            comm: all ranks that hold elements; borrowed, and used for nothing else meanwhile.
            watchdog: looks at every round.
            mine: elements of the file that this rank holds, ascending; single runs may be given as (start, stop).
        """
        self._comm = comm
        self._watchdog = watchdog
        self._mine = mine if isinstance(mine, EvenRuns) else EvenRuns.of(mine)
        table = np.ascontiguousarray(self._mine.table)
        counts = np.empty(comm.size, dtype=np.int64)
        with watchdog.collective("checkpoint: who holds what"):
            comm.Allgather(np.array([table.size], dtype=np.int64), counts)
            everybody = np.empty(int(counts.sum()), dtype=np.int64)
            comm.Allgatherv(table.reshape(-1), [everybody, counts])
        ends = np.cumsum(counts)
        self._runs = [
            EvenRuns(everybody[end - count : end].reshape(-1, 5))
            for end, count in zip(ends, counts, strict=True)
        ]

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return self._mine.numel

    def rounds(self, dataset: Dataset) -> Iterator[list[range]]:
        """For each round, the elements that each rank gathers, empty for some. Equal on all ranks. Not collective."""
        size = self._comm.size
        per_round = max(ROUND_NBYTES // (dataset.slab_numel * dataset.itemsize), 1)
        shares = [dataset.slabs_of(rank, size) for rank in range(size)]
        for first in range(0, max(map(len, shares)), per_round):
            windows = []
            for share in shares:
                slabs = share[first : first + per_round]
                edges = (
                    (dataset.slab(slabs[0]).start, dataset.slab(slabs[-1]).stop)
                    if slabs
                    else (0, 0)
                )
                windows.append(range(*edges))
            yield windows

    def places(self, windows: Sequence[range]) -> list[slice]:
        """Which of this rank's elements, in the order of the file, lie in each rank's window. Not collective."""
        before = self._mine.before
        return [slice(before(window.start), before(window.stop)) for window in windows]

    def to_slabs(self, parts: Sequence[Tensor], windows: Sequence[range]) -> Tensor:
        """Gather one round.

        Args:
            parts: for each rank, the elements of ``places``.
            windows: one item of ``rounds``.

        Returns:
            (elements of this rank's window,), complete: each element is one rank's, or values are undefined.
        """
        rank = self._comm.rank
        window = windows[rank]
        into = _on_page(len(window), parts[rank].dtype)
        incoming = [runs.within(window) for runs in self._runs]
        incoming[rank].scatter(parts[rank].numpy(), into.numpy(), window.start)
        counts = [runs.numel for runs in incoming]
        for peer, values in self._trade(lambda peer: parts[peer], counts):
            incoming[peer].scatter(values.numpy(), into.numpy(), window.start)
        return into

    def from_slabs(self, slabs: Tensor, parts: Sequence[Tensor], windows: Sequence[range]) -> None:
        """Distribute one round.

        Args:
            slabs: (elements of this rank's window,).
            parts: for each rank, the elements of ``places``; they are written.
            windows: one item of ``rounds``.
        """
        rank = self._comm.rank
        window = windows[rank]
        outgoing = [runs.within(window) for runs in self._runs]
        outgoing[rank].gather(slabs.numpy(), window.start, parts[rank].numpy())

        def part(peer: int) -> Tensor:
            found = torch.empty(outgoing[peer].numel, dtype=slabs.dtype, device="cpu")
            outgoing[peer].gather(slabs.numpy(), window.start, found.numpy())
            return found

        for peer, values in self._trade(part, [len(part) for part in parts]):
            parts[peer][:] = values

    def _trade(
        self, part: Callable[[int], Tensor], counts: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each other rank with what comes from it, one after the other. The caller must take all of them.

        It is not one Alltoallv: what is sent lies in several places, and a rank's own part needs no message.

        Args:
            part: gives what goes to a rank.
            counts: elements that come from each rank.
        """
        comm, size = self._comm, self._comm.size
        for distance in range(1, size):
            to, source = (comm.rank + distance) % size, (comm.rank - distance) % size
            send = part(to)
            received = torch.empty(counts[source], dtype=send.dtype, device="cpu")
            with self._watchdog.collective("checkpoint: exchange between shards and slabs"):
                comm.Sendrecv(
                    _bytes(send),
                    to if len(send) else MPI.PROC_NULL,
                    recvbuf=_bytes(received),
                    source=source if len(received) else MPI.PROC_NULL,
                )
            yield source, received


def _on_page(numel: int, dtype: torch.dtype) -> Tensor:
    """(numel,), content undefined, that begins at a page. Files take such memory without a copy in between."""
    found = torch.empty(numel + mmap.PAGESIZE // dtype.itemsize, dtype=dtype, device="cpu")
    skip = -found.data_ptr() % mmap.PAGESIZE // dtype.itemsize
    return found[skip : skip + numel]


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = tensor.numpy().view(np.uint8)  # torch refuses some empty ones
    return found
