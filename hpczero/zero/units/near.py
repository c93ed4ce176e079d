"""Near: a copy of values where the model computes, from which gathers read while the masters rest elsewhere.

Owns: that copy, and when new values have arrived in it. Must not know: units, optimizers, windows, media.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpczero.accelerator import Accelerator, Mark
from hpczero.tier import Traffic

SENT = "near"  # what moves, as traffic has it


class Near:
    """Values in the dtype of the parameters, which whoever makes new ones copies here at once.

    Attributes:
        tensor: (numel,) where the model computes.
    """

    def __init__(self, tensor: Tensor) -> None:
        """For the argument see the attribute."""
        self.tensor = tensor

    def settle(self) -> None:
        """Return when all that was sent has arrived."""
        return

    def updated(self, window: range, values: Tensor) -> None:
        """Elements of ``window`` are ``values`` now, wherever those are; they may change when this returns."""
        self.settle()
        with torch.no_grad():
            self.tensor[window.start : window.stop].copy_(values)


class Ascent:
    """The way of updated parameters from memory of the host up to the device.

    Attributes:
        accelerator: of the device.
        lane: of its own.
        traffic: where the bytes are counted.
    """

    def __init__(self, accelerator: Accelerator, traffic: Traffic) -> None:
        """Of one rank."""
        self.accelerator, self.traffic = accelerator, traffic
        self.lane = accelerator.lane()


class SentNear(Near):
    """Values that the host has updated, sent to the device beside other work.

    Attributes:
        sent: behind the last of it; None where all has arrived.
    """

    def __init__(self, tensor: Tensor, ascent: Ascent) -> None:
        """``tensor``: see ``Near``."""
        super().__init__(tensor)
        self._ascent = ascent
        self.sent: Mark | None = None

    def settle(self) -> None:
        """As of ``Near``; the host waits, since what is started on the device afterwards may read at once."""
        if self.sent is not None:
            self.sent.wait()
            self.sent = None

    def send(self, window: range, values: Tensor) -> None:
        """Start to bring elements of ``window``; nobody may change ``values`` before ``settle``.

        Args:
            window: elements of the shard.
            values: (elements,) in the dtype of the parameters, in memory that the device copies from.
        """
        ascent = self._ascent
        ascent.lane.after(ascent.accelerator.mark())  # the device may still read what was there
        with torch.no_grad():
            ascent.lane.copy(self.tensor[window.start : window.stop], values)
        self.sent = ascent.lane.mark()
        ascent.traffic.read({SENT: values.nbytes})
