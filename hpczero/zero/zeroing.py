"""Zeroing: ``zero_grad`` of a zeroified model and of each of its optimizers.

Owns: what else ends where gradients are gone: an interrupted backward, the parts of ``accumulate``. Must not know:
buffers, what a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpczero.zero.calls.untraced import untraced
from hpczero.zero.schedule import Schedule
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.stepper import Stepper
from hpczero.zero.update.update import Step


class Zeroing:
    """Of one model; nothing here is collective."""

    def __init__(
        self,
        units: Sequence[Unit],
        schedule: Schedule,
        step: Step,
        *,
        next_part: Callable[[], object],
        begin_anew: Callable[[], None],
    ) -> None:
        """Hooks are attached.

        Args:
            units: of the model.
            schedule: of its backwards.
            step: of its optimizers, none yet.
            next_part: of ``accumulate``; another object after each part.
            begin_anew: ``accumulate`` has no part to come.
        """
        self._units = list(units)
        self._schedule, self._step = schedule, step
        self._next_part, self._begin_anew = next_part, begin_anew
        # Optimizers whose gradients were zeroed one after the other, with ``next_part`` meanwhile.
        self._row: tuple[object, set[int]] = None, set()

    @untraced
    def all(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets local gradients of ``no_sync`` and an interrupted backward."""
        if self._schedule.backward.runs:
            self._schedule.reset()
        self._begin_anew()
        self._step.forget_gradients()
        for unit in self._units:
            if unit.spec.trainable:
                unit.gradients.drop(set_to_none=set_to_none)
            else:
                unit.whole.watch.drop_own_gradients(set_to_none=set_to_none)

    def of(self, stepper: Stepper) -> Callable[..., None]:
        """``zero_grad`` of one optimizer."""
        if len(self._step.steppers) == 1:
            return self.all

        @untraced
        def zero_grad(set_to_none: bool = True) -> None:
            if self._schedule.backward.runs:
                self._schedule.reset()
                self._step.history.interruption()  # until the other optimizers' are gone, too
            self._step.drop_gradients(stepper, set_to_none=set_to_none)
            part, zeroed = self._row
            if part is not self._next_part():
                part, zeroed = self._next_part(), set()
            self._row = part, zeroed | {stepper.index}
            if len(self._row[1]) == len(self._step.steppers):
                self._begin_anew()

        return zero_grad
