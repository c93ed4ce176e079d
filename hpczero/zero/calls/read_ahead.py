"""ReadAhead: whose values are read from where they rest, before they are used.

Owns: the order in which units were used, and how far ahead of it reading goes. Must not know: modules, tiers, how a
unit is made whole.

Reading is this rank's own business: a forecast that is wrong costs time, and nobody else notices. It may therefore go
further ahead than `prefetch`, which is a collective, and from the end of a forward into the backward that follows it:
values do not change between the two. After a backward comes a step, which changes them.
"""

from __future__ import annotations

import torch

from hpczero.zero.units.unit import Unit

FORWARD, BACKWARD = "forward", "backward"  # kinds of passes


class ReadAhead:
    """Forecast for one model; forward and backward passes each follow their own kind."""

    def __init__(self, units: int) -> None:
        """``units``: how many are read ahead."""
        self._units = units
        self._records: dict[str, list[Unit]] = {}
        self._kind: str | None = None
        self._seen: list[Unit] = []

    def begin(self, kind: str) -> None:
        """A pass begins, which resembles others of its ``kind``."""
        self.end()
        self._kind, self._seen = kind, []
        for unit in self._records.get(kind, [])[: self._units]:
            unit.rest.start()

    def used(self, unit: Unit) -> None:
        """``unit`` is being used: those behind it are wanted next."""
        if self._seen[-1:] == [unit]:
            return
        place = len(self._seen)
        self._seen.append(unit)
        record = self._records.get(self._kind or "", [])
        if record[place : place + 1] == [unit]:
            coming = record[place + 1 :]
            if self._kind == FORWARD and torch.is_grad_enabled():
                coming = coming + self._records.get(BACKWARD, [])
            for following in coming[: self._units]:
                following.rest.start()

    def end(self) -> None:
        """The pass is through."""
        if self._kind is not None and self._seen:
            self._records[self._kind] = self._seen
        self._kind = None
