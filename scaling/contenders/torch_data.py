"""Training by torch alone, over gloo: DDP, ZeroRedundancyOptimizer, FSDP2, and ranks that never communicate."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from scaling.contenders import base
from scaling.contenders.workload import LEARNING_RATE, Workload
from scaling.evidence.record import versions


class Independent(base.Contender):
    """The floor: every rank trains alone; no data-parallel training can be faster."""

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


class DDP(base.GlooContender):
    """Everything whole on every rank. Gradients are views of the buckets, which saves a copy and their memory."""

    own: Mapping[str, object] = {"gradient_as_bucket_view": True}

    def build(self, workload: Workload) -> None:
        self.model = DistributedDataParallel(base.gpt(workload), gradient_as_bucket_view=True)
        self.optimizer = base.adamw(self.model.parameters())


class ZeroRedundancy(base.GlooContender):
    """Stage 1, whole tensors dealt out to ranks. Updated parameters are broadcast bucket by bucket."""

    own: Mapping[str, object] = {**DDP.own, "parameters_as_bucket_view": True}

    def build(self, workload: Workload) -> None:
        self.model = DistributedDataParallel(base.gpt(workload), gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            fused=True,
        )


class FSDP2(base.GlooContender):
    """Every block and the root are groups; blocks are given back after forward and gathered again in backward."""

    own: Mapping[str, object] = {
        "groups": "blocks and root",
        "reshard_after_forward": "blocks True, root default",
    }

    def build(self, workload: Workload) -> None:
        model = base.gpt(workload)
        mesh = init_device_mesh("cpu", (self.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        # The root keeps torch's default, whole from forward to backward: gathering it twice would only slow it down.
        fully_shard(model, mesh=mesh)
        self.model = model
        self.optimizer = base.adamw(model.parameters())
