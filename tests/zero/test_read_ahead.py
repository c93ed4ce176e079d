"""Whose values are read before they are used: those behind it, and what a backward begins with at a forward's end."""

from __future__ import annotations

from typing import Any

import torch

from hpczero.zero.backward_schedule import ReadAhead


class Units:
    """Names that note when they are started."""

    def __init__(self, names: str) -> None:
        self.started: list[str] = []
        self.by_name = {name: self._unit(name) for name in names}

    def _unit(self, name: str) -> Any:
        started = self.started

        class Rest:
            def start(self) -> None:
                started.append(name)

        class Unit:
            rest = Rest()

        return Unit()

    def run(self, ahead: ReadAhead, kind: str, names: str) -> list[str]:
        """One pass; what was started at its begin and at each use."""
        found = []
        for step, name in enumerate(["", *names]):
            self.started.clear()
            if step:
                ahead.used(self.by_name[name])
            else:
                ahead.begin(kind)
            found.append("".join(self.started))
        ahead.end()
        return found


def test_a_forward_ends_with_the_first_units_of_the_backward_and_a_backward_with_nothing() -> None:
    units, ahead = Units("rabc"), ReadAhead(2)
    assert units.run(ahead, "forward", "rabc") == [""] * 5
    assert units.run(ahead, "backward", "rcba") == [""] * 5
    assert units.run(ahead, "forward", "rabc") == ["ra", "ab", "bc", "cr", "rc"]
    assert units.run(ahead, "backward", "rcba") == ["rc", "cb", "ba", "a", ""]


def test_a_forward_without_gradients_is_followed_by_no_backward() -> None:
    units, ahead = Units("rabc"), ReadAhead(2)
    units.run(ahead, "forward", "rabc")
    units.run(ahead, "backward", "rcba")
    with torch.no_grad():
        assert units.run(ahead, "forward", "rabc") == ["ra", "ab", "bc", "c", ""]


def test_a_pass_that_goes_another_way_reads_nothing_more() -> None:
    units, ahead = Units("rabc"), ReadAhead(1)
    units.run(ahead, "forward", "rabc")
    units.run(ahead, "backward", "rcba")
    assert units.run(ahead, "forward", "rcba") == ["r", "a", "", "c", ""]
