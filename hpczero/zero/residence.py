"""Residence: which units are whole now, and until when.

Owns: the reasons for which a unit stays whole, and which units are unsharded ahead of their use. Must not know: hooks
on modules, autograd, gradients' reduction, buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hpczero.zero.calls.backward import Gradients
from hpczero.zero.calls.kept import Kept
from hpczero.zero.calls.prefetch import Prefetch
from hpczero.zero.calls.read_ahead import ReadAhead
from hpczero.zero.calls.tensors import TooMany, tensors_in
from hpczero.zero.units.unit import Unit


class Residence:
    """Residence of the units of one model.

    Attributes:
        kept: units that stay whole for now.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Mapping[Unit, Gradients],
        *,
        sharded: bool,
        ahead: bool,
        read_ahead: int = 0,
    ) -> None:
        """Not collective.

        Args:
            units: in unit order.
            gradients: gradients of every trainable unit.
            sharded: whether parameters are given back between uses.
            ahead: whether to start to unshard the next module's units while those of one are used.
            read_ahead: number of units whose values are read, from where they rest, before they are used.
        """
        self._units = list(units)
        self.kept = Kept(gradients if sharded else {})
        self._prefetch = Prefetch() if ahead else None
        self._read_ahead = ReadAhead(read_ahead) if read_ahead else None
        self._stays = False  # see keep_whole

    def begin_pass(self, kind: str) -> None:
        """Note that a forward or a backward begins, as ``kind`` says."""
        if self._prefetch is not None:
            self._prefetch.begin(kind)
        if self._read_ahead is not None:
            self._read_ahead.begin(kind)

    def give_back(self, unit: Unit) -> None:
        """Reshard ``unit``, unless there is a reason to keep it whole. Nothing uses it now."""
        if not self._stays:
            unit.reshard(retain=unit in self.kept)

    def make_whole(self, units: Sequence[Unit]) -> None:
        """Wait until ``units`` are whole. The unshard of what comes after them has then started."""
        for unit in units:
            unit.unshard()
        if self._read_ahead is not None:
            for unit in units:
                self._read_ahead.used(unit)
        for unit in units:
            unit.whole.wait_for_unshard()
        if self._prefetch is not None:
            # After the wait, peers are at most one module behind. So no rank holds more than the plan says.
            for following in self._prefetch.next_after(units):
                following.unshard()

    def end_pass(self) -> None:
        """Reshard what was unsharded ahead and then not used."""
        if self._prefetch is not None:
            for unit in self._prefetch.end():
                self.give_back(unit)
        if self._read_ahead is not None:
            self._read_ahead.end()

    def calls_are_through(self) -> None:
        """Note that no call runs any more."""
        for unit in self.kept.calls_are_through():
            unit.reshard()

    def lend(self, units: Sequence[Unit], output: Any) -> None:
        """Keep a unit whole if ``output`` may be a view of its parameters (units/whole.py: [Note: Kept views])."""
        lost = [unit for unit in units if not unit.whole.lasts]
        if not lost:
            return
        try:
            outputs = list(tensors_in(output))
            seen = [unit for unit in lost if any(map(unit.whole.is_seen_by, outputs))]
        except TooMany:
            seen = lost
        for unit in seen:
            unit.whole.lend()
            if unit.whole.shared and torch.is_grad_enabled():
                self.kept.for_backward([unit])
            elif unit.whole.shared:
                self.kept.for_call(unit)

    @contextmanager
    def keep_whole(self) -> Iterator[None]:
        """Context: units that are unsharded stay whole until its end or the next step (issue 17, seam S5).

        Several micro batches then unshard parameters once, where a pipeline stage would do so for every forward and
        every backward. The price is the memory of whole parameters. All ranks enter and leave together.
        """
        before, self._stays = self._stays, True
        try:
            yield
        finally:
            self._stays = before
            if not before:
                self._reshard()

    def end_step(self, units: Collection[Unit] | None = None) -> list[Unit]:
        """Reshard whatever was kept, because values are about to change.

        A backward that has not come no longer matters.

        Args:
            units: whose values change; None: all.

        Returns:
            Those of them that were kept.
        """
        ended = self.kept.clear(units)
        for unit in ended:
            unit.reshard()
        if self._stays:
            self._reshard()
        return ended

    def reset(self) -> None:
        """Forget an interrupted forward or backward, and reshard all units."""
        self.kept.clear()
        self._reshard()

    def leave_pass(self) -> None:
        """Forget a forward that was left: its ranks may have come to different units between the same collectives."""
        self.kept.calls_are_through()
        self._reshard()

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard(retain=unit in self.kept)
