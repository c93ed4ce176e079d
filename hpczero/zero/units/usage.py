"""Usage: which parameters of a unit have a gradient, on whatever rank; the others have None, as in plain torch.

Owns: what this rank knows of it between two steps, and what follows from what all know. Must not know: gradients,
ranks, the step.

A zero gradient is not None: weight decay and momentum go on with it. A loop may set gradients to None through the
model, which all ranks see, or through the optimizer's pieces, which only the owner of a piece sees. So each rank keeps
what it used since the last step apart from what was known before it, and the step puts together what all have seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]


class Usage:
    """Of the slots of one unit; not collective.

    Attributes:
        now: (slots,) whether this rank had a gradient since the last step.
        emptied: (slots,) whether a piece that this rank holds was found to be None at the first reduction since.
        late: whether one was found so at a later one; nobody else can tell then what was used before it.
    """

    def __init__(self, slots: int) -> None:
        self.now = np.zeros(slots, dtype=bool)
        self.emptied = np.zeros(slots, dtype=bool)
        self.late = False
        self._before = np.zeros(slots, dtype=bool)  # known to all ranks at the last step
        self._announced = np.zeros(slots, dtype=bool)  # set to None where all ranks see it
        self._reductions = 0  # since the last step

    def __len__(self) -> int:
        return len(self.now)

    def found_none(self, position: int) -> None:
        """A reduction finds that a piece of a slot was set to None since the last one."""
        if self._announced[position]:
            return
        if self._reductions:
            self.late = True
        else:
            self.emptied[position] = True

    def reduced(self, filled: Sequence[bool]) -> None:
        """A reduction brings gradients of the slots that this rank ``filled``."""
        if all(filled):
            self.now[:] = True
        else:
            self.now |= np.array(filled, dtype=bool)
        self._announced[:] = False
        self._reductions += 1

    def drop(self, position: int) -> None:
        """The gradient of one slot was set to None, on all ranks."""
        self.now[position] = self._before[position] = False
        self._announced[position] = True

    def drop_all(self) -> None:
        """All gradients are gone, on all ranks."""
        for flags in (self.now, self.emptied, self._before, self._announced):
            flags[:] = False
        self.late, self._reductions = False, 0

    def step(self, now: Flags, emptied: Flags) -> Flags:
        """The step begins. Args: ``now`` and ``emptied`` of any rank. Returns which slots have a gradient, (slots,)."""
        used = now | (self._before & ~emptied)
        self.drop_all()
        self._before = used
        return used
