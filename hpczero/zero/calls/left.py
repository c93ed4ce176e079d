"""A forward that an exception has left: whether all ranks have left theirs at the same place.

Owns: where a forward began, and the meeting before the next one. Must not know: hooks, units, what the exception was
about.

[Note: A forward on one rank alone]
The program may catch the exception and call the model again. Where all ranks do, as after memory ran out on all of
them, nothing is lost. Where one does, it begins anew with the first unit, and the others are at a later one: each would
take the other's shard of another unit for its own, and blocks are alike. A training step finds that in the end, an
evaluation has no step. The rank therefore waits for the others, to compare what they have called so far. It costs
nothing as long as no forward is left. Whoever was left alone waits too, and the watchdog ends the job.
"""

from __future__ import annotations

import sys
from types import FrameType

from hpczero.comm.collectives import Collectives
from hpczero.errors import CommError
from hpczero.job.collected import is_same_number
from hpczero.job.told import told_all

NEAR = 8  # frames between a hook and torch's call of it


class LeftForward:
    """Of the forwards of one model. Collective over the ranks that share its parameters, where it says so."""

    def __init__(self, comm: Collectives) -> None:
        """Not collective."""
        self._comm = comm
        self._runs = self._was_left = False
        self._begun_at = 0  # fingerprint
        self._frame: FrameType | None = None  # of the call of the model, where torch makes it
        self._handled: BaseException | None = None
        self._why = ""

    def number(self) -> None:
        """Count one that begins, for who exchanges activations in it. Not collective."""
        self._comm.group.forwards.begin()

    def is_lost(self) -> bool:
        """Whether the forward that was begun last was left without ``end``. Not collective.

        No hook hears of what is no ``Exception``, as KeyboardInterrupt.
        """
        if not self._runs or self._frame is None or _is_on_stack(self._frame):
            return False
        self._runs, self._was_left = False, self._comm.calls.fingerprint != self._begun_at
        return True

    def begin(self) -> bool:
        """A forward begins. Collective if one was left after a collective.

        Returns:
            Whether one was: ranks may have come to different units in it.

        Raises:
            CommError: on every rank; they have left theirs at different places.
        """
        left, self._was_left = self._was_left, False
        if left:
            self._meet()
        if not self._runs:  # else it is the model that calls itself
            self._frame = _frame_of_call()
        self._runs = True
        self._begun_at = self._comm.calls.fingerprint
        self._handled = sys.exc_info()[1]  # the program's: it calls the model while it handles it
        self._why = "an exception"
        return left

    def end(self) -> None:
        """It has ended, or an exception is leaving it. Not collective."""
        error, handled = sys.exc_info()[1], self._handled
        if error is not None and error is not handled and not getattr(error, "agreed", False):
            self._was_left = self._comm.calls.fingerprint != self._begun_at
            self._why = type(error).__name__
        self._runs, self._handled, self._frame = False, None, None

    def _meet(self) -> None:
        group = self._comm.group
        if group.size == 1 or group.watchdog.cut_off.happened():
            return  # nobody else is there; or a call of this rank has failed, and what needs it will say so
        what = f"the meeting of all ranks after {self._why} left a forward"
        with group.watchdog.collective(what):
            same = is_same_number(group, self._comm.calls.fingerprint)
        if not same:
            error = CommError(
                f"rank {self._comm.rank}: {self._why} left a forward, and ranks have left theirs between different "
                "collectives, or had called other modules before; catch such an error on all ranks alike, or let it "
                "end the program"
            )
            told_all(error, group.comm)
            raise error


def _frame_of_call() -> FrameType | None:
    """Frame of torch's own that lasts as long as the call of the module whose hook runs; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(NEAR):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code.co_name == "_call_impl":
            return frame
    return None


def _is_on_stack(frame: FrameType) -> bool:
    seen: FrameType | None = sys._getframe(1)
    while seen is not None and seen is not frame:
        seen = seen.f_back
    return seen is frame
