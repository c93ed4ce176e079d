"""Prefetch: which units are used next, as the pass before has shown.

To unshard a unit early is to make a collective call early. Every rank must do so at the same place, or the order of
calls differs. The forecast therefore uses nothing but the units that this model's passes have used, which are the same
on all ranks. It never uses clocks, or what has arrived. A pass that departs from the one before gets no forecast from
there on.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpczero.zero.units.unit import Unit


class Prefetch:
    """Forecast for one model. Forward and backward passes are compared with earlier ones of their kind.

    Units come as modules use them: all those of one module together.
    """

    def __init__(self) -> None:
        self._records: dict[str, list[tuple[Unit, ...]]] = {}
        self._pass: str | None = None
        self._seen: list[tuple[Unit, ...]] = []
        self._as_before = False
        self._early: set[Unit] = set()

    def begin(self, kind: str) -> None:
        """Begin a pass. One that has not ended is forgotten.

        Args:
            kind: passes of the same kind resemble each other.
        """
        self._pass, self._seen, self._as_before = kind, [], True

    def next_after(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Note that ``units`` are used now; returns those that will be used next, none where that is unknown."""
        used = tuple(units)
        self._early.difference_update(used)
        if self._pass is None or not used or self._seen[-1:] == [used]:
            return ()
        record, place = self._records.get(self._pass, []), len(self._seen)
        self._seen.append(used)
        self._as_before = self._as_before and record[place : place + 1] == [used]
        if not self._as_before or place + 1 >= len(record):
            return ()
        self._early.update(record[place + 1])
        return record[place + 1]

    def end(self) -> list[Unit]:
        """End the pass. Returns the units that were forecast and then not used, in the order of the record."""
        if self._pass is None:
            return []
        recorded = dict.fromkeys(u for used in self._records.get(self._pass, []) for u in used)
        unused = [unit for unit in recorded if unit in self._early]
        self._early.clear()
        self._records[self._pass], self._pass = self._seen, None
        return unused
