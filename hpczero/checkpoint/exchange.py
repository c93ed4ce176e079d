"""From the shards of ranks to the slabs of a file, and back, in rounds of bounded size.

A rank's elements of a flat dataset lie in many short runs, because every unit is cut over all ranks. A file is written
best in few long pieces. Each rank is therefore responsible for some consecutive slabs, and elements travel between the
two cuts. A rank holds one flat tensor in the order of the file, so what it sends to a slab is one slice. Every rank
knows what every other rank holds.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.checkpoint.disk.format import Dataset, Table
from hpczero.errors import CheckpointMismatch
from hpczero.job.watchdog import Watchdog


def check_range(
    part: Tensor,
    dtype: torch.dtype,
    table: Table,
    start: int,
    path: Path,
    *,
    stop: int | None = None,
) -> None:
    """Refuse a part of one parameter with finite values beyond ``dtype``.

    The part begins at ``start`` of ``table``. ``stop`` is where it ends if its values are not neighbours there.

    Raises:
        CheckpointMismatch: names the parameter.
    """
    if bool((part.isfinite() & part.to(dtype).isinf()).any()):
        (name,) = table.overlapping(start, start + len(part) if stop is None else stop)
        raise CheckpointMismatch(
            f"{path}: {name} holds {part.abs().max().item():.6g}, which {dtype} cannot; take bf16 or fp32"
        )


# EvenRuns: which elements of a flat dataset a rank holds, as entries of runs at even distances.
#
# A rank's part of a parameter that is cut along an inner dimension lies in one short run for each row: millions, for a
# large model. All are of one length at one distance, but for the ends. One entry therefore says all of them, and what
# is copied is a matrix.
#
#     dataset   . . . [first  c c c . . . . c c c . . . . c c   stop) . . .
#                      base   |<-- stride ->|   length = 3                    held: (e - base) % stride < length

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.generic]


class StridedRange(NamedTuple):
    """Elements ``e`` with ``start <= e < stop`` and ``(e - base) % stride < length``; ``start >= base``."""

    start: int
    stop: int
    base: int
    stride: int
    length: int

    @classmethod
    def plain(cls, start: int, stop: int) -> StridedRange:
        """All elements from ``start`` to ``stop``."""
        length = max(stop - start, 1)
        return cls(start, stop, start, length, length)

    def before(self, element: int) -> int:
        """How many elements of the entry come before ``element``."""
        return self._counted(min(max(element, self.start), self.stop)) - self._counted(self.start)

    def _counted(self, element: int) -> int:
        """Elements of the runs, from ``base`` on, before ``element``."""
        runs, rest = divmod(element - self.base, self.stride)
        return runs * self.length + min(rest, self.length)

    def at(self, index: int) -> int:
        """The element that has ``index`` others of the entry before it."""
        run, rest = divmod(index + self._counted(self.start), self.length)
        return self.base + run * self.stride + rest

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.before(self.stop)

    def clipped(self, window: range) -> StridedRange:
        """Those within ``window``; there may be none."""
        start = max(self.start, min(window.start, self.stop))
        return self._replace(start=start, stop=max(min(self.stop, window.stop), start))


@dataclass(frozen=True)
class EvenRuns:
    """Entries in rising order, none of which begins before the last one ends.

    Attributes:
        table: (entries, 5) int64, a row of ``StridedRange`` each.
    """

    table: Indices

    @classmethod
    def of(cls, entries: Sequence[StridedRange] | Sequence[tuple[int, int]]) -> EvenRuns:
        """Of entries, or of single runs as (start, stop)."""
        rows = [entry if len(entry) == 5 else StridedRange.plain(*entry) for entry in entries]
        return cls(np.array(rows, dtype=np.int64).reshape(-1, 5))

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def entries(self) -> list[StridedRange]:
        """The rows."""
        return [StridedRange(*row) for row in self.table.tolist()]

    @cached_property
    def ends(self) -> Indices:
        """(entries + 1,): elements before each entry, and of all."""
        return np.cumsum([0, *(entry.numel for entry in self.entries)], dtype=np.int64)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(self.ends[-1])

    def before(self, element: int) -> int:
        """How many of the elements come before ``element`` of the dataset."""
        index = int(np.searchsorted(self.table[:, 1], element, side="right"))
        if index == len(self):
            return self.numel
        return int(self.ends[index]) + self.entries[index].before(element)

    def within(self, window: range) -> EvenRuns:
        """Those in ``window``; entries without elements may remain."""
        first = int(np.searchsorted(self.table[:, 1], window.start, side="right"))
        last = int(np.searchsorted(self.table[:, 0], window.stop, side="left"))
        found = (StridedRange(*row) for row in self.table[first:last].tolist())
        return EvenRuns.of([entry.clipped(window) for entry in found])

    def moved(self, by: Sequence[int]) -> EvenRuns:
        """Each entry at another place, in the same order, which may not rise any more."""
        shift = np.array(by, dtype=np.int64).reshape(-1, 1)
        return EvenRuns(self.table + shift * np.array([1, 1, 1, 0, 0]))

    def take(self, order: Sequence[int]) -> EvenRuns:
        """Some entries, in this order."""
        return EvenRuns(self.table[np.array(order, dtype=np.int64)])

    def scatter(self, values: Values, window: Values, start: int) -> None:
        """Copy ``values``, one after the other, to these elements of ``window``, which begins at ``start``."""
        for held, part in self._views(values, window, start):
            part[...] = held

    def gather(self, window: Values, start: int, values: Values) -> None:
        """The reverse of ``scatter``."""
        for held, part in self._views(values, window, start):
            held[...] = part

    def _views(self, values: Values, window: Values, start: int) -> list[tuple[Values, Values]]:
        """Parts of ``values`` and of ``window`` that belong to each other: three of an entry at most."""
        found = []
        at = 0
        for entry in self.entries:
            for first, rows, count in _matrices(entry):
                step = window.strides[0]
                place = np.lib.stride_tricks.as_strided(
                    window[first - start :], (rows, count), (entry.stride * step, step)
                )
                found.append((values[at : at + rows * count].reshape(rows, count), place))
                at += rows * count
        return found


def _matrices(entry: StridedRange) -> list[tuple[int, int, int]]:
    """The runs of an entry, by equal length: one that its start cuts, whole ones, one that its stop cuts.

    Each with its first element, how many runs, and how long they are.
    """
    found: list[tuple[int, int, int]] = []
    at = entry.start
    if at >= entry.stop:
        return found
    run, rest = divmod(at - entry.base, entry.stride)
    if rest:
        end = entry.base + run * entry.stride + entry.length
        if rest < entry.length:
            found.append((at, 1, min(end, entry.stop) - at))
        run += 1
        at = entry.base + run * entry.stride
    last, rest = divmod(entry.stop - entry.base, entry.stride)
    if rest >= entry.length:
        last, rest = last + 1, 0
    if last > run:
        found.append((at, last - run, entry.length))
    if rest and last >= run:
        found.append((entry.base + last * entry.stride, 1, rest))
    return found


ROUND_NBYTES = 16 * 2**20  # of slabs that one rank gathers at a time


class DatasetExchange:
    """The two cuts of one kind of datasets. Methods are collective over the communicator unless they say otherwise."""

    def __init__(
        self, comm: MPI.Intracomm, watchdog: Watchdog, mine: EvenRuns | Sequence[tuple[int, int]]
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
        self.numel = self._mine.numel  # that this rank holds
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
        """Gather one round, ``windows`` of ``rounds``, from the elements of ``places`` for each rank.

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
        """Distribute one round: ``slabs``, (elements of this rank's window,), to ``parts``, those of ``places``."""
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
