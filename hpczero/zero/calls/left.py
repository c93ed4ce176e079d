"""A forward that an exception has left.

Owns: where a forward began, and whether it was left after a collective. Must not know: hooks, units, what the exception
was about.

The program may catch the exception and call the model again. Where all ranks do, as after memory ran out on all of
them, nothing is lost. Where one does, its next call is another than that of the others, and ``comm.Order`` stops it.
"""

from __future__ import annotations

import sys
from types import FrameType

from hpczero.comm.collectives import Collectives

NEAR = 8  # frames between a hook and torch's call of it


class LeftForward:
    """Of the forwards of one model. Not collective."""

    def __init__(self, comm: Collectives) -> None:
        """Not collective."""
        self._comm = comm
        self._runs = self._was_left = False
        self._begun_at = 0  # fingerprint
        self._frame: FrameType | None = None  # of the call of the model, where torch makes it
        self._handled: BaseException | None = None

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
        """A forward begins.

        Returns:
            Whether one was left after a collective: ranks may have come to different units in it.
        """
        left, self._was_left = self._was_left, False
        if not self._runs:  # else it is the model that calls itself
            self._frame = _frame_of_call()
        self._runs = True
        self._begun_at = self._comm.calls.fingerprint
        self._handled = sys.exc_info()[1]  # the program's: it calls the model while it handles it
        return left

    def end(self) -> None:
        """It has ended, or an exception is leaving it. Not collective."""
        error, handled = sys.exc_info()[1], self._handled
        if error is not None and error is not handled and not getattr(error, "agreed", False):
            self._was_left = self._comm.calls.fingerprint != self._begun_at
        self._runs, self._handled, self._frame = False, None, None


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
