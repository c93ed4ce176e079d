"""EvenRuns: which elements of a flat dataset a rank holds, as entries of runs at even distances.

Owns: counting and copying such elements without a loop over runs. Must not know: ranks, files, parameters.

A rank's part of a parameter that is cut along an inner dimension lies in one short run for each row: millions, for a
large model. All are of one length at one distance, but for the ends. One entry therefore says all of them, and what is
copied is a matrix.

    dataset   . . . [first  c c c . . . . c c c . . . . c c   stop) . . .
                     base   |<-- stride ->|   length = 3                    held: (e - base) % stride < length
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.generic]


class Entry(NamedTuple):
    """Elements ``e`` with ``start <= e < stop`` and ``(e - base) % stride < length``; ``start >= base``."""

    start: int
    stop: int
    base: int
    stride: int
    length: int

    @classmethod
    def plain(cls, start: int, stop: int) -> Entry:
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

    def clipped(self, window: range) -> Entry:
        """Those within ``window``; there may be none."""
        start = max(self.start, min(window.start, self.stop))
        return self._replace(start=start, stop=max(min(self.stop, window.stop), start))


@dataclass(frozen=True)
class EvenRuns:
    """Entries in rising order, none of which begins before the last one ends.

    Attributes:
        table: (entries, 5) int64, a row of ``Entry`` each.
    """

    table: Indices

    @classmethod
    def of(cls, entries: Sequence[Entry] | Sequence[tuple[int, int]]) -> EvenRuns:
        """Of entries, or of single runs as (start, stop)."""
        rows = [entry if len(entry) == 5 else Entry.plain(*entry) for entry in entries]
        return cls(np.array(rows, dtype=np.int64).reshape(-1, 5))

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def entries(self) -> list[Entry]:
        """The rows."""
        return [Entry(*row) for row in self.table.tolist()]

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
        found = (Entry(*row) for row in self.table[first:last].tolist())
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
            for runs in _matrices(entry):
                rows, count = runs.rows, runs.length
                step = window.strides[0]
                place = np.lib.stride_tricks.as_strided(
                    window[runs.first - start :], (rows, count), (entry.stride * step, step)
                )
                found.append((values[at : at + rows * count].reshape(rows, count), place))
                at += rows * count
        return found


class _Matrix(NamedTuple):
    """Some runs of equal length at the stride of their entry: the first element, how many, how long."""

    first: int
    rows: int
    length: int


def _matrices(entry: Entry) -> list[_Matrix]:
    """The runs of an entry: one that its start cuts, whole ones, one that its stop cuts."""
    found: list[_Matrix] = []
    at = entry.start
    if at >= entry.stop:
        return found
    run, rest = divmod(at - entry.base, entry.stride)
    if rest:
        end = entry.base + run * entry.stride + entry.length
        if rest < entry.length:
            found.append(_Matrix(at, 1, min(end, entry.stop) - at))
        run += 1
        at = entry.base + run * entry.stride
    last, rest = divmod(entry.stop - entry.base, entry.stride)
    if rest >= entry.length:
        last, rest = last + 1, 0
    if last > run:
        found.append(_Matrix(at, last - run, entry.length))
    if rest and last >= run:
        found.append(_Matrix(entry.base + last * entry.stride, 1, rest))
    return found
