"""TwinUpdate: one step over two kinds of units: some rest on a tier, the others stay where they are computed with.

Owns: the order of the two. Must not know: how either takes its step.

Source: DeepSpeed's Twin-Flow, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpczero.errors import StepError
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.parts import PartedUpdate
from hpczero.zero.update.streamed import StreamedUpdate


class TwinUpdate:
    """Of one optimizer; nothing here is collective. The parts are as of ``StreamedUpdate`` and ``PartedUpdate``."""

    def __init__(self, here: PartedUpdate, away: StreamedUpdate) -> None:
        """``here`` and ``away``: of the same optimizer, over different units."""
        self._here, self._away = here, away

    def follow(self, units: Sequence[Unit]) -> None:
        """``units`` are the trainable ones that are here from now on."""
        self._here.follow(units)

    @property
    def taken(self) -> bool:
        """Whether torch's own call has nothing left to do; until ``restore``."""
        return self._away.taken

    def check(self, *, last: bool) -> None:
        """As of what rests on the tier.

        Raises:
            StepError: the optimizer is not as it was at zeroify.
        """
        self._away.check(last=last)

    def take(self, *, last: bool) -> None:
        """Take both steps: reads from the tier have begun when the units that are here are stepped on.

        Raises:
            StepError: the optimizer's groups hold a piece twice, or it makes state that it did not make at zeroify.
            TierError: as of what rests on the tier.
        """
        self._away.begin()
        try:
            self._here.take(last=last)
            if not self._here.taken:
                raise StepError(
                    "optimizer.step() with a part of its state on a memory tier (offload): the step cannot be taken "
                    "over long tensors, expected every piece once in optimizer.param_groups"
                )
        except BaseException:
            self._away.give_up()
            raise
        finally:
            self._here.restore()
        self._away.take(last=last)

    def restore(self) -> None:
        """Put the pieces back into their groups; nothing if they are there."""
        self._here.restore()
        self._away.restore()

    def adopt(self) -> None:
        """State was loaded, or put into ``optimizer.state``."""
        self._here.adopt()
        self._away.adopt()

    def forget(self) -> None:
        """State is about to be replaced."""
        self._here.forget()
        self._away.forget()
