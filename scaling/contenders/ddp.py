"""torch DistributedDataParallel over gloo: parameters, gradients and optimizer whole on every rank."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from scaling.contenders import base
from scaling.contenders.workload import Workload


class Contender(base.GlooContender):
    """Gradients are views of the buckets, which saves a copy and their memory."""

    def build(self, workload: Workload) -> None:
        self.model = DistributedDataParallel(base.gpt(workload), gradient_as_bucket_view=True)
        self.optimizer = base.adamw(self.model.parameters())

    def settings(self) -> dict[str, str]:
        return {**super().settings(), "gradient_as_bucket_view": "True"}
