"""Prefetch: which unit is used next, as the pass before has shown.

To start a unit early is to make a collective call early. Every rank must do so at the same place, or the order of calls
differs. The forecast therefore looks at nothing but the units that this model's passes have used, which is the same on
all ranks, never at clocks or at what has arrived. A pass that departs from the one before gets no forecast from there
on. => To unshard a unit early is to make a collective call early. Every rank must do so at the same place, or the order
of calls differs. The forecast therefore uses nothing but the units that this model's passes have used, which are the
same on all ranks. It never uses clocks, or what has arrived. A pass that departs from the one before gets no forecast
from there on.
"""

from __future__ import annotations

from hpczero.zero.units.unit import Unit


class Prefetch:
    """Forecast for one model. Forward and backward passes are compared with earlier ones of their kind."""

    def __init__(self) -> None:
        self._records: dict[str, list[Unit]] = {}
        self._pass: str | None = None
        self._seen: list[Unit] = []
        self._as_before = False
        self._early: set[Unit] = set()

    def begin(self, kind: str) -> None:
        """Begin a pass. One that has not ended is forgotten.

        Args:
            kind: passes of the same kind resemble each other.
        """
        self._pass, self._seen, self._as_before = kind, [], True

    def next_after(self, unit: Unit) -> Unit | None:
        """Note that ``unit`` is used now; returns the unit that will be used next, or None if that is unknown."""
        self._early.discard(unit)
        if self._pass is None or self._seen[-1:] == [unit]:
            return None
        record, place = self._records.get(self._pass, []), len(self._seen)
        self._seen.append(unit)
        self._as_before = self._as_before and record[place : place + 1] == [unit]
        if not self._as_before or place + 1 >= len(record):
            return None
        self._early.add(record[place + 1])
        return record[place + 1]

    def end(self) -> list[Unit]:
        """End the pass. Returns the units that were forecast and then not used, in the order of the record."""
        if self._pass is None:
            return []
        unused = [u for u in dict.fromkeys(self._records.get(self._pass, [])) if u in self._early]
        self._early.clear()
        self._records[self._pass], self._pass = self._seen, None
        return unused
