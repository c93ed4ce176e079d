"""Room of a tier that was given back: which of it the next record gets.

Owns: the stretches that are free. Must not know: the medium, what the bytes mean.

The first stretch that is long enough is taken, the lowest first. What is kept in the order in which it is needed, and
given back in the other, as activations are, leaves no gaps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpczero.tier.lanes import Transfer


@dataclass(order=True)
class _Stretch:
    begin: int
    end: int
    before: frozenset[Transfer] = field(compare=False)


class FreeRoom:
    """Stretches of a flat space that nobody uses, none beside another."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []

    @property
    def nbytes(self) -> int:
        """Of all of it."""
        return sum(each.end - each.begin for each in self._stretches)

    def find(self, nbytes: int, end: int) -> tuple[int, frozenset[Transfer]]:
        """Where ``nbytes`` may lie, and what has to end there before something is written; takes nothing.

        Args:
            nbytes: how much.
            end: of the space. What lies beyond it is made when it is needed.
        """
        if not nbytes:
            return end, frozenset()
        for each in self._stretches:
            if each.end - each.begin >= nbytes or each.end == end:
                return each.begin, frozenset(t for t in each.before if not t.has_ended)
        return end, frozenset()

    def take(self, begin: int, end: int) -> None:
        """``begin`` to ``end`` is used, as ``find`` has given it."""
        for index, each in enumerate(self._stretches):
            if each.begin == begin < end:
                each.begin = min(end, each.end)
                if each.begin == each.end:
                    del self._stretches[index]
                return

    def put(self, begin: int, end: int, before: Iterable[Transfer]) -> None:
        """``begin`` to ``end`` is free, once ``before`` have ended."""
        if begin == end:
            return
        insort(self._stretches, _Stretch(begin, end, frozenset(before)))
        joined: list[_Stretch] = []
        for each in self._stretches:
            if joined and joined[-1].end == each.begin:
                joined[-1] = _Stretch(joined[-1].begin, each.end, joined[-1].before | each.before)
            else:
                joined.append(each)
        self._stretches = joined
