"""torch ZeroRedundancyOptimizer with DDP over gloo: stage 1, whole tensors dealt out to ranks."""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from scaling.contenders import base
from scaling.contenders.workload import LEARNING_RATE, Workload


class Contender(base.GlooContender):
    """Updated parameters are broadcast bucket by bucket."""

    def build(self, workload: Workload) -> None:
        self.model = DistributedDataParallel(base.gpt(workload), gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            fused=True,
        )

    def settings(self) -> dict[str, str]:
        own = {"gradient_as_bucket_view": "True", "parameters_as_bucket_view": "True"}
        return {**super().settings(), **own}
