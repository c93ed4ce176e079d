"""Skips: steps that do nothing because a gradient is not finite, and steps that have nothing to do.

Owns: how many there were, when there are too many, and what is said of them. Must not know: units, optimizers, how
ranks agree.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hpczero.comm.collectives import Collectives
from hpczero.plan.precision import LossScaler, Precision

logger = logging.getLogger("hpczero.step")


@dataclass
class StepCounts:
    """Steps that were skipped because some gradient was not finite; equal on every rank."""

    skipped: int = 0
    in_a_row: int = 0


class Skips:
    """Of one model.

    Attributes:
        counts: of the steps so far.
    """

    def __init__(
        self, comm: Collectives, precision: Precision, scaler: LossScaler, *, speaks: bool
    ) -> None:
        """Not collective.

        Args:
            comm: for the number of the step.
            precision: what a non-finite gradient means.
            scaler: the loss scale, told of every step.
            speaks: whether this rank writes the log.
        """
        self._speaks = speaks
        self.counts = StepCounts()
        self._comm = comm
        self._precision = precision
        self._scaler = scaler
        self._told = False

    def skip(self) -> str | None:
        """Count the step that is taken now as skipped; why that cannot help, or None where it may."""
        self.counts.skipped += 1
        self.counts.in_a_row += 1
        scaled = self._precision.loss_scale is not None
        if not scaled and self._precision.nonfinite == "raise":
            return "precision.nonfinite='skip' would skip such steps"
        if scaled and self._scaler.exhausted:
            return f"the loss scale is at its minimum {self._scaler.scale:g}"
        if self.counts.in_a_row >= self._precision.max_skips:
            return f"{self.counts.in_a_row} steps in a row were skipped"
        if self._speaks:
            logger.warning(
                "step %d skipped: a gradient is not finite (loss scale %g, %d skipped so far)",
                self._comm.calls.step,
                self._scaler.scale,
                self.counts.skipped,
            )
        return None

    def skip_late(self, name: str) -> None:
        """Count a step that is skipped because its gradients have not been finite since an earlier one."""
        self.counts.skipped += 1
        if self._speaks:
            logger.warning(
                "step %d of %s skipped: its gradients hold what was not finite when another optimizer stepped (%d "
                "skipped so far); zero_grad of it after that step would have begun anew",
                self._comm.calls.step,
                name,
                self.counts.skipped,
            )

    def end_step(self, *, overflow: bool) -> None:
        """The step is over."""
        if not overflow:
            self.counts.in_a_row = 0
        self._scaler.update(overflow=overflow)

    def tell_nothing_to_do(self) -> None:
        """Say once that no parameter has a gradient."""
        if self._speaks and not self._told:
            self._told = True
            logger.warning(
                "step %d: no parameter has a gradient, so the optimizer changes nothing, as in plain torch; was "
                "backward called since zero_grad, on a loss that this very model made?",
                self._comm.calls.step,
            )
