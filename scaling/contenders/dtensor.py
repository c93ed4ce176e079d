"""torch DTensor over gloo: ``parallelize_module``, with FSDP2 over the ranks that are left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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

from hpczero.models.gpt import GPT, Attention
from scaling.contenders import base
from scaling.contenders.workload import LEARNING_RATE, Workload


class Contender(base.GlooContender):
    """Layers are cut as in torch's own tutorial of tensor parallelism; the loss stays cut over the vocabulary.

    Masters in fp32 under bf16 are those of FSDP2, which then runs over groups of one rank too.
    """

    def __init__(self, tensor: int, sequence: int = 0, precision: str = "fp32") -> None:
        self.tensor, self.sequence, self.precision = tensor, bool(sequence), precision

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
        model.mean_loss = _mean_cross_entropy
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

    def settings(self) -> dict[str, str]:
        own = {"tensor": str(self.tensor), "sequence": str(self.sequence)}
        return {**super().settings(), **own, "precision": self.precision}


def _regroup(attention: Attention, parts: int) -> None:
    """Order the rows of q, k and v so that each rank's are together, and count own heads.

    AdamW and norms do not see an order.
    """
    attention.heads //= parts
    for tensor in (attention.qkv.weight, attention.qkv.bias):
        with torch.no_grad():
            strips = [strip.chunk(parts) for strip in tensor.chunk(3)]
            tensor.copy_(torch.cat([strip[part] for part in range(parts) for strip in strips]))


def _mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
