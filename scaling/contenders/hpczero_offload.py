"""hpczero at stage 3 with everything that it keeps on a disk."""

from __future__ import annotations

import hpczero
from hpczero import Offload
from hpczero.plan.rules import default_rule
from scaling.contenders import base, hpczero_stage
from scaling.contenders.scratch import BUFFERS, scratch
from scaling.contenders.workload import Workload

WINDOW_NBYTES = 16 * 2**20


class Contender(hpczero_stage.Contender):
    """As ``hpczero_stage``; parameters, gradients and state of the optimizer rest in files of this machine's disk."""

    def build(self, workload: Workload) -> None:
        model = base.gpt(workload)
        self.optimizer = base.adamw(model.parameters())
        self.model = hpczero.zeroify(
            model,
            self.optimizer,
            stage=self.stage,
            topology=self.topology,
            rule=default_rule,
            transport=self.transport,
            offload=Offload("disk", "disk", "disk", scratch(), WINDOW_NBYTES, BUFFERS),
        )

    def settings(self) -> dict[str, str]:
        offload = f"everything on disk, {BUFFERS} blocks of {WINDOW_NBYTES >> 20} MiB"
        return {**super().settings(), "offload": offload}
