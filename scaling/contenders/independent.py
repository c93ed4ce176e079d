"""The floor: every rank trains alone and never communicates; no data-parallel training can be faster."""

from __future__ import annotations

import os

from scaling.contenders import base
from scaling.contenders.workload import Workload
from scaling.evidence.record import versions


class Contender(base.Contender):
    """A plain torch loop."""

    def connect(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def build(self, workload: Workload) -> None:
        self.model = base.gpt(workload)
        self.optimizer = base.adamw(self.model.parameters())

    def barrier(self) -> None:
        """Nothing: the command's message starts all ranks within a millisecond."""

    def close(self) -> None:
        """Nothing to leave."""

    def settings(self) -> dict[str, str]:
        return versions("torch")
