"""Torch's own tensor and pipeline parallelism, over gloo.

``parallelize_module`` with FSDP2 over the ranks that are left, and torch.distributed.pipelining (1F1B) with DDP over
them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from hpczero.models.gpt import GPT, Attention
from hpczero.plan.spread import blocks_of
from scaling.contenders import base
from scaling.contenders.workload import LEARNING_RATE, SEED, Workload


class TensorParallel(base.GlooContender):
    """Layers are cut as in torch's own tutorial of tensor parallelism; the loss stays cut over the vocabulary.

    Masters in fp32 under bf16 are those of FSDP2, which then runs over groups of one rank too.
    """

    def __init__(self, tensor: int, sequence: int = 0, precision: str = "fp32") -> None:
        self.tensor, self.sequence, self.precision = tensor, bool(sequence), precision
        self.own = {"tensor": tensor, "sequence": self.sequence, "precision": precision}

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor

    def build(self, workload: Workload) -> None:
        mesh = init_device_mesh(
            "cpu", (self.size // self.tensor, self.tensor), mesh_dim_names=("data", "tensor")
        )
        model = base.gpt(workload)
        for module in model.modules():
            if isinstance(module, Attention):
                _regroup(module, self.tensor)
        self._cut(model, mesh["tensor"], workload.context)
        half = self.precision == "bf16"
        if half or self.size > self.tensor:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else None
            words: dict[str, Any] = {"mp_policy": policy} if policy else {}
            # Whole from forward to backward: the stages of ZeRO below 3 gather parameters once a step.
            words |= {"mesh": mesh["data"], "reshard_after_forward": False}
            for block in model.blocks:
                fully_shard(block, **words)
            fully_shard(model, **words)
        model.mean_loss = _cross_entropy
        self.model = model
        # Tensors of different meshes cannot be in one fused update.
        self._alike: dict[object, list[Tensor]] = {}
        for parameter in model.parameters():
            key = parameter.device_mesh if isinstance(parameter, DTensor) else None
            self._alike.setdefault(key, []).append(parameter)
        groups = [{"params": alike} for alike in self._alike.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)

    def _cut(self, model: GPT, mesh: Any, context: int) -> None:
        """Give every layer its part of the weights."""
        sequence = self.sequence
        between = Shard(1) if sequence else Replicate()
        enter: dict[str, Any] = {
            name: PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
            for name in ("attention", "mlp")
        }
        norms: dict[str, Any] = {
            name: SequenceParallel() for name in ("attention_norm", "mlp_norm")
        }
        layers: dict[str, Any] = {
            "attention.qkv": ColwiseParallel(),
            "attention.projection": RowwiseParallel(output_layouts=between),
            "mlp.expansion": ColwiseParallel(),
            "mlp.projection": RowwiseParallel(output_layouts=between),
        }
        for block in model.blocks:
            parallelize_module(block, mesh, {**layers, **(enter | norms if sequence else {})})
        ends: dict[str, Any] = {
            "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": ColwiseParallel(
                input_layouts=between, output_layouts=Shard(-1), use_local_output=False
            ),
        }
        if sequence:
            ends["final_norm"] = SequenceParallel()
            ends["wpe"] = SequenceParallel(sequence_dim=0, use_local_output=True)
            own, place = context // self.tensor, mesh.get_local_rank()
            model.span = lambda _: range(place * own, (place + 1) * own)
        tied = model.lm_head.weight is model.wte.weight
        parallelize_module(model, mesh, ends)
        if tied:
            model.lm_head.weight = model.wte.weight

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """As of every contender."""
        self.optimizer.zero_grad()
        with loss_parallel():
            loss = self.model(tokens, targets)
            loss.backward()
        self._clip()
        self.optimizer.step()
        return float((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())

    def _clip(self) -> None:
        """``torch.nn.utils.clip_grad_norm_`` cannot add norms over different meshes; so each kind by itself."""
        grads = [[p.grad for p in alike if p.grad is not None] for alike in self._alike.values()]
        norms = [torch.nn.utils.get_total_norm(each) for each in grads]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.linalg.vector_norm(torch.stack(whole)).item()
        factor = min(base.CLIP / (total + 1e-6), 1.0)
        for each in grads:
            torch._foreach_mul_(each, factor)


def _regroup(attention: Attention, parts: int) -> None:
    """Order the rows of q, k and v so that each rank's are together, and count own heads.

    AdamW and norms do not see an order.
    """
    attention.heads //= parts
    for tensor in (attention.qkv.weight, attention.qkv.bias):
        with torch.no_grad():
            strips = [strip.chunk(parts) for strip in tensor.chunk(3)]
            tensor.copy_(torch.cat([strip[part] for part in range(parts) for strip in strips]))


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


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


class Pipelined(base.GlooContender):
    """Embeddings are not tied: torch has nothing for a weight that two stages hold."""

    def __init__(self, pipeline: int, micro_batches: int) -> None:
        self.pipeline, self.micro_batches = pipeline, micro_batches
        self.own = {"stages": pipeline, "micro_batches": micro_batches, "schedule": "Schedule1F1B"}

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
        self._schedule = Schedule1F1B(stage, self.micro_batches, loss_fn=_cross_entropy)
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
