"""GradientHistory: what was done to the gradients of the coming step, which ranks must have done alike.

Owns: the texts that ranks compare, and whether a backward was cut off. Must not know: optimizers, MPI, what a step does
with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from hpczero.zero.units.unit import Unit
from hpczero.zero.update.gradient_norms import GradientNorms


class GradientHistory:
    """Since the gradients were last gone; not collective.

    Attributes:
        incomplete: some gradients are those of a backward that did not finish.
    """

    def __init__(self, units: Sequence[Unit], norms: GradientNorms) -> None:
        """Empty.

        Args:
            units: the trainable ones.
            norms: told that gradients change.
        """
        self._units = list(units)
        self._norms = norms
        self._scalings: list[str] = []
        self._changes = 0  # of all changes of single gradients, in their order
        self.incomplete = False
        self._zeroed: set[int] = set()  # optimizers, since a backward was cut off

    def follow(self, units: Sequence[Unit]) -> None:
        """``units`` are the trainable ones from now on."""
        self._units = list(units)

    def clear(self) -> None:
        """The gradients are gone, and what was done to them is void."""
        self._norms.forget()
        self._scalings.clear()
        self._changes = 0
        self.incomplete = False

    def interruption(self) -> None:
        """A backward did not finish; until all its gradients are gone there is no step."""
        self.incomplete = True
        self._zeroed.clear()

    def zeroed(self, index: int, optimizers: int) -> None:
        """The gradients of optimizer ``index`` of so many are gone, or zero."""
        self._zeroed.add(index)
        if len(self._zeroed) == optimizers:
            self.incomplete = False

    def drop(self) -> None:
        """A gradient is gone."""
        left = (u.gradients.present or u.gradients.waiting for u in self._units)
        self.incomplete = self.incomplete and any(left)

    def scaling(self, what: str) -> None:
        """This rank's gradients were scaled by something that must be equal on all ranks; the step compares it."""
        self._norms.forget()
        if what not in self._scalings:
            self._scalings.append(what)

    def change(self, name: str, what: str) -> None:
        """As ``scaling``, of one parameter's gradient; which ones and in which order is compared too."""
        self.scaling(what)
        self._changes = zlib.crc32(f"{name} {what}".encode(), self._changes)

    @property
    def texts(self) -> list[str]:
        """Equal on all ranks, or one of them has done something that others have not."""
        if not self._changes:
            return list(self._scalings)
        changes = f"changes of parameter.grad, by parameter and order: {self._changes:08x}"
        return [*self._scalings, changes]
