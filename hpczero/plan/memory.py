"""MemoryPlan: bytes that one rank holds, by what they are for.

Owns: the sums. Must not know: how they are counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank. ``unsharded``, ``exchange`` and ``stepping`` are peaks within a step; the others are always held.

    Attributes:
        parameters, master, gradients, optimizer: what training keeps.
        unsharded: whole parameters and gradients in use.
        exchange: buffers through which gradients come.
        staging: blocks through which a memory tier's bytes pass.
        away: what rests on a memory tier; in none of the sums.
        stepping: decoded state of the unit that is stepped on, when nothing is ``unsharded``.
    """

    parameters: int
    master: int
    gradients: int
    optimizer: int
    unsharded: int
    exchange: int
    staging: int = 0
    away: int = 0
    stepping: int = 0

    @property
    def states(self) -> int:
        """Bytes held between steps."""
        return self.parameters + self.master + self.gradients + self.optimizer + self.staging

    @property
    def total(self) -> int:
        """Bytes at the peak of a step, activations excluded."""
        return self.states + max(self.unsharded, self.stepping) + self.exchange
