"""torch FSDP2 (``fully_shard``) over gloo: stage 3."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scaling.contenders import base
from scaling.contenders.workload import Workload


class Contender(base.GlooContender):
    """Every block and the root are groups; blocks are given back after forward and gathered again in backward."""

    def build(self, workload: Workload) -> None:
        model = base.gpt(workload)
        mesh = init_device_mesh("cpu", (self.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        # The root keeps torch's default, whole from forward to backward: gathering it twice would only slow it down.
        fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = base.adamw(model.parameters())

    def settings(self) -> dict[str, str]:
        own = {"groups": "blocks and root", "reshard_after_forward": "blocks True, root default"}
        return {**super().settings(), **own}
