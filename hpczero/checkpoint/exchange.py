"""From the shards of ranks to the slabs of a file, and back.

Owns: who sends which elements to whom, in rounds of bounded size. Must not know: files, parameters, torch modules.

A rank's elements of a flat dataset lie in many short runs, because every unit is cut over all ranks. A file is written
best in few long pieces. Each rank is therefore responsible for some consecutive slabs, and elements travel between the
two cuts, a few slabs at a time. A rank holds one flat tensor in the order of the file, so what it sends to a slab is
one slice.
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
from hpczero.job.watchdog import Watchdog

ROUND_NBYTES = 16 * 2**20  # of slabs that one rank gathers at a time

Runs = npt.NDArray[
    np.int64
]  # (n, 2): first element and the one after the last, ascending, disjoint


class Exchange:
    """The two cuts of one kind of datasets. Methods are collective over the communicator unless they say otherwise."""

    def __init__(
        self, comm: MPI.Intracomm, watchdog: Watchdog, mine: Sequence[tuple[int, int]]
    ) -> None:
        """Tell every rank what this rank holds. Collective over ``comm``.

        Args:
            comm: all ranks that hold elements; borrowed, and used for nothing else meanwhile.
            watchdog: looks at every round.
            mine: elements of the file that this rank holds, as (start, stop), ascending.
        """
        self._comm = comm
        self._watchdog = watchdog
        runs = np.array(list(mine), dtype=np.int64).reshape(-1, 2)
        counts = np.empty(comm.size, dtype=np.int64)
        with watchdog.watch("checkpoint: who holds what"):
            comm.Allgather(np.array([runs.size], dtype=np.int64), counts)
            everybody = np.empty(int(counts.sum()), dtype=np.int64)
            comm.Allgatherv(np.ascontiguousarray(runs).reshape(-1), [everybody, counts])
        ends = np.cumsum(counts)
        self._runs = [
            everybody[end - count : end].reshape(-1, 2)
            for end, count in zip(ends, counts, strict=True)
        ]
        # Elements of this rank before each of its runs.
        self._before = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])

    @property
    def numel(self) -> int:
        """Elements that this rank holds."""
        return int(self._before[-1])

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
        return [slice(*self._place(window)) for window in windows]

    def to_slabs(self, parts: Sequence[Tensor], windows: Sequence[range]) -> Tensor:
        """Gather one round.

        Args:
            parts: for each rank, the elements of ``places``.
            windows: one item of ``rounds``.

        Returns:
            (elements of this rank's window,), complete.
        """
        rank = self._comm.rank
        window = windows[rank]
        into = _on_page(len(window), parts[rank].dtype)
        incoming = [_within(runs, window) for runs in self._runs]
        _scatter(parts[rank], incoming[rank], window.start, into)
        counts = [_count(runs) for runs in incoming]
        for peer, values in self._trade(lambda peer: parts[peer], counts):
            _scatter(values, incoming[peer], window.start, into)
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
        outgoing = [_within(runs, window) for runs in self._runs]
        _gather(slabs, outgoing[rank], window.start, parts[rank])

        def part(peer: int) -> Tensor:
            found = torch.empty(_count(outgoing[peer]), dtype=slabs.dtype)
            _gather(slabs, outgoing[peer], window.start, found)
            return found

        for peer, values in self._trade(part, [len(part) for part in parts]):
            parts[peer][:] = values

    def _place(self, window: range) -> tuple[int, int]:
        """The slice of this rank's elements that lies in ``window``."""
        runs = self._runs[self._comm.rank]
        return self._rank_of(runs, window.start), self._rank_of(runs, window.stop)

    def _rank_of(self, runs: Runs, element: int) -> int:
        """Number of this rank's elements before ``element``."""
        index = int(np.searchsorted(runs[:, 1], element, side="right"))
        if index == len(runs):
            return self.numel
        return int(self._before[index] + max(element - runs[index, 0], 0))

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
            received = torch.empty(counts[source], dtype=send.dtype)
            with self._watchdog.watch("checkpoint: exchange between shards and slabs"):
                comm.Sendrecv(
                    _bytes(send),
                    to if len(send) else MPI.PROC_NULL,
                    recvbuf=_bytes(received),
                    source=source if len(received) else MPI.PROC_NULL,
                )
            yield source, received


def _on_page(numel: int, dtype: torch.dtype) -> Tensor:
    """(numel,), content undefined, that begins at a page. Files take such memory without a copy in between."""
    found = torch.empty(numel + mmap.PAGESIZE // dtype.itemsize, dtype=dtype)
    skip = -found.data_ptr() % mmap.PAGESIZE // dtype.itemsize
    return found[skip : skip + numel]


def _bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = tensor.numpy().view(np.uint8)  # torch refuses some empty ones
    return found


def _scatter(values: Tensor, runs: Runs, start: int, window: Tensor) -> None:
    """Copy ``values``, one after the other, to their ``runs`` of the ``window`` that begins at element ``start``."""
    source, target, begin = values.numpy(), window.numpy(), 0
    for first, last in (runs - start).tolist():
        target[first:last] = source[begin : begin + last - first]
        begin += last - first


def _gather(window: Tensor, runs: Runs, start: int, values: Tensor) -> None:
    """Copy the ``runs`` of the ``window`` that begins at element ``start`` to ``values``, one after the other."""
    source, target, begin = window.numpy(), values.numpy(), 0
    for first, last in (runs - start).tolist():
        target[begin : begin + last - first] = source[first:last]
        begin += last - first


def _within(runs: Runs, window: range) -> Runs:
    """The parts of ``runs`` that lie in ``window``."""
    first = int(np.searchsorted(runs[:, 1], window.start, side="right"))
    last = int(np.searchsorted(runs[:, 0], window.stop, side="left"))
    return np.clip(runs[first : max(last, first)], window.start, window.stop)


def _count(runs: Runs) -> int:
    return int((runs[:, 1] - runs[:, 0]).sum())
