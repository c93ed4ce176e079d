"""TakenStep: a step that is taken before torch's own call of it, which then finds groups without parameters.

Owns: the pieces of the groups meanwhile. Must not know: how a step is taken.
"""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer


class TakenStep:
    """Of one optimizer; nothing here is collective."""

    def __init__(self, optimizer: Optimizer) -> None:
        """``optimizer`` has been pointed at shards."""
        self._optimizer = optimizer
        self._put_away: list[list[nn.Parameter]] | None = None

    @property
    def taken(self) -> bool:
        """Whether torch's own call has nothing left to do; until ``restore``."""
        return self._put_away is not None

    def restore(self) -> None:
        """Put the pieces back into their groups; nothing if they are there."""
        if self._put_away is not None:
            for group, pieces in zip(self._optimizer.param_groups, self._put_away, strict=True):
                group["params"] = pieces
            self._put_away = None

    def _put_groups_away(self) -> list[list[nn.Parameter]]:
        """Note what the groups hold, for ``restore``; they hold it still, and may hold other things from here on."""
        self._put_away = [group["params"] for group in self._optimizer.param_groups]
        return self._put_away

    def _empty_groups(self) -> None:
        """The step is taken."""
        for group in self._optimizer.param_groups:
            group["params"] = []
