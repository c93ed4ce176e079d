"""Cuts: where the step that is recorded begins, and where it ends.

Owns: that place. Must not know: what a step does, what becomes of its entries.

[Note: Between the reductions and the update]
What a step gathers after its update the next forward waits for, and its loss is told after the update too. A step from
one ``TrainingStep.take`` to the next would wait for what it has not started. Once gradients are clipped all reductions
are over, and no gather of the update has begun. From there to the same place in the next step everything that is
started is waited for.
"""

from __future__ import annotations

from scaling.simulate.clocks import CountingClock, ThreadClock
from scaling.simulate.programs import Lanes
from scaling.simulate.recorder import Recorder


class Cuts:
    """A hook before each update: the last record ends there, and the next one begins.

    Attributes:
        most: steps to record; each has the end of one ``take`` and the beginning of the next.
        lanes: of each that is recorded.
        flops: of all of them; 0 where work is measured.
    """

    def __init__(self, recorder: Recorder, clock: CountingClock | ThreadClock, most: int) -> None:
        self.most = most
        self.lanes: list[Lanes] = []
        self._recorder, self._clock = recorder, clock
        self._from = self._to = 0.0

    def __call__(self, *_: object) -> None:
        """As ``Optimizer.register_step_pre_hook`` wants it."""
        if self._recorder.on:
            self.lanes.append(self._recorder.end())
        self._to = getattr(self._clock, "flops", 0.0)
        if not self.lanes:
            self._from = self._to
        if len(self.lanes) < self.most:
            self._recorder.begin()

    @property
    def flops(self) -> float:
        """Of all steps that are recorded."""
        return self._to - self._from
