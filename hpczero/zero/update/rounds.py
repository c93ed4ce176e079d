"""Rounds: which steps of several optimizers belong to one backward.

Owns: when a round begins, and what its steps have in common: whether it is skipped, whether the loss scale was told.
Must not know: units, optimizers, how ranks agree.

A round is the steps between two reductions, of each optimizer one. A second step of the same one begins another, so
that of one optimizer each step is a round.

[Note: Overflow and several optimizers]
A gradient that is not finite skips all steps of its round, as one optimizer over all parameters would. Each skipped
step drops the gradients of its own parameters. Those of an optimizer that does not step in this round stay, and with
them what is not finite: its next step is skipped, too, as torch's GradScaler has it. Until then they skip nobody else,
and the loss scale is told once.
"""

from __future__ import annotations

from collections.abc import Sequence


class Rounds:
    """Of one model; equal on all ranks, because steps and reductions are.

    Attributes:
        skipped: whether the steps of this round are skipped.
        told: whether the loss scale was told of this round.
    """

    def __init__(self, optimizers: int) -> None:
        """Before the first."""
        self.skipped = self.told = False
        self._stepped: set[int] = set()
        # Of each optimizer, whether its gradients are known not to be finite since a round before this one.
        self._spoiled = [False] * optimizers

    def gradients_come(self) -> None:
        """A reduction begins: what steps afterwards steps on other gradients."""
        self._stepped.clear()

    def gradients_go(self, index: int) -> None:
        """Those of one optimizer are gone."""
        self._spoiled[index] = False

    def overflows(self, index: int, finite: Sequence[bool]) -> bool:
        """Whether the step of an optimizer finds what no step has found; ``finite`` of the gradients of each one."""
        found = zip(finite, self._spoiled, strict=True)
        new = any(not good and not spoiled for good, spoiled in found)
        return new and (self._begins(index) or not self.skipped)

    def begin_step(self, index: int, finite: Sequence[bool]) -> bool:
        """As ``overflows``; whether the step is to be skipped."""
        overflow = self.overflows(index, finite)
        if self._begins(index):
            self._stepped.clear()
            self.skipped = self.told = False
        self.skipped = self.skipped or overflow
        self._spoiled = [not good for good in finite]
        return self.skipped or not finite[index]

    def _begins(self, index: int) -> bool:
        return not self._stepped or index in self._stepped

    def end_step(self, index: int) -> bool:
        """Its step is over; whether it was the first of the round."""
        self._stepped.add(index)
        return len(self._stepped) == 1

    @property
    def texts(self) -> list[str]:
        """What must be equal on all ranks."""
        return [
            f"gradients of optimizer {i} not finite" for i, bad in enumerate(self._spoiled) if bad
        ]
