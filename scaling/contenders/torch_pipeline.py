"""torch.distributed.pipelining over gloo: 1F1B, with DDP over the ranks that are left."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hpczero.models.gpt import GPT
from hpczero.plan.spread import blocks_of
from scaling.contenders import base
from scaling.contenders.workload import SEED, Workload


class Part(nn.Module):
    """One stage of a GPT."""

    def __init__(self, model: GPT, stages: int, stage: int) -> None:
        super().__init__()
        self._first, self._last = stage == 0, stage == stages - 1
        blocks = blocks_of(len(model.blocks), stages, stage)
        self.blocks = nn.ModuleList(model.blocks[block] for block in blocks)
        if self._first:
            assert model.wpe is not None, "workloads have learned positions"
            self.wte, self.wpe = model.wte, model.wpe
        if self._last:
            self.final_norm, self.lm_head = model.final_norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) tokens or (B, T, C) in, (B, T, C) or (B, T, V) out."""
        if self._first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.final_norm(x)) if self._last else x


class Contender(base.GlooContender):
    """Embeddings are not tied: torch has nothing for a weight that two stages hold."""

    def __init__(self, pipeline: int, micro_batches: int) -> None:
        self.pipeline, self.micro_batches = pipeline, micro_batches

    @property
    def data_rank(self) -> int:
        return self.rank % (self.size // self.pipeline)

    def build(self, workload: Workload) -> None:
        data = self.size // self.pipeline
        mesh = init_device_mesh("cpu", (self.pipeline, data), mesh_dim_names=("pipeline", "data"))
        self._group, self._stage = mesh.get_group("pipeline"), mesh.get_local_rank("pipeline")
        whole = GPT(replace(workload.model, tie_embeddings=False))
        whole.initialize_all(seed=SEED)
        part: nn.Module = Part(whole, self.pipeline, self._stage)
        self.model = part
        if data > 1:
            part = DistributedDataParallel(
                part, process_group=mesh.get_group("data"), gradient_as_bucket_view=True
            )
        stage = PipelineStage(
            part, self._stage, self.pipeline, torch.device("cpu"), group=self._group
        )
        self._schedule = Schedule1F1B(stage, self.micro_batches, loss_fn=_mean_cross_entropy)
        self.optimizer = base.adamw(part.parameters())

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """As of every contender; every stage learns the loss, as with hpczero."""
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        last = self._stage == self.pipeline - 1
        given = (tokens,) if self._stage == 0 else ()
        if last:
            self._schedule.step(*given, target=targets, losses=losses)
        else:
            self._schedule.step(*given)
        self._clip()
        self.optimizer.step()
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        torch.distributed.broadcast(loss, group=self._group, group_src=self.pipeline - 1)
        return float(loss.item())

    def _clip(self) -> None:
        """By the norm over all stages."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        square = torch.nn.utils.get_total_norm(grads).square()
        torch.distributed.all_reduce(square, group=self._group)
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), base.CLIP, square.sqrt())

    def settings(self) -> dict[str, str]:
        own = {"stages": str(self.pipeline), "micro_batches": str(self.micro_batches)}
        return {**super().settings(), **own, "schedule": "Schedule1F1B"}


def _mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
