"""The same GPT written for stock torch, and its training by DTensor, FSDP2 and torch's pipelining: a second opinion.

q, k and v are layers of their own here, because DTensor cuts a weight into consecutive rows. Names and values are
translated to those of ``hpczero.models.GPT``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from hpczero.models import GPT
from hpczero.models.config import GPTConfig
from tests.helpers.gloo import skip_where_fsdp2_sums
from tests.parallel.layouts import Trained, clip_of, optimizer_of, text

if TYPE_CHECKING:
    from mpi4py import MPI

# Layers of a block here, and in hpczero.models.
NAMES = {
    "norm1": "attention_norm",
    "out": "attention.projection",
    "norm2": "mlp_norm",
    "up": "mlp.expansion",
    "down": "mlp.projection",
}
QKV = ("q", "k", "v")


@dataclass
class Seen(Trained):
    """What a training showed: also whole gradients of each step before clipping, in GPT's names."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)


class StockBlock(nn.Module):
    """One block with layers of its own for q, k and v."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, inner = config.hidden, config.ffn_multiple * config.hidden
        self.head_size = config.hidden // config.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in QKV)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) in and out; T may be a part of the tokens, where the norms stand."""
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class StockGPT(nn.Module):
    """All of a GPT with learned positions and an untied head, or one of its stages of consecutive blocks."""

    def __init__(self, config: GPTConfig, blocks: range | None = None) -> None:
        super().__init__()
        assert config.positions == "learned", "this is the GPT that is written here"
        assert not config.tie_embeddings, "two DTensors cannot be one parameter"
        blocks = range(config.layers) if blocks is None else blocks
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == config.layers
        if self.is_first:
            self.wte = nn.Embedding(config.vocab_size, config.hidden)
            self.wpe = nn.Embedding(config.context, config.hidden)
        self.blocks = nn.ModuleDict({str(i): StockBlock(config) for i in blocks})
        if self.is_last:
            self.final_norm = nn.LayerNorm(config.hidden)
            self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) tokens, or (B, T, C) from the stage before; (B, T, V) logits, or (B, T, C) for the stage after."""
        if self.is_first:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        if self.is_last:
            x = self.lm_head(self.final_norm(x)).clone()  # FSDP2 warns of a view, which to_local is
        return x


def stock_gpt(config: GPTConfig, *, blocks: range | None = None, seed: int = 3) -> StockGPT:
    """With the weights that ``hpczero.models.GPT`` starts from."""
    plain = GPT(config)
    plain.initialize_all(seed=seed)
    values = dict(plain.named_parameters())
    model = StockGPT(config, blocks)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole, third = _in_gpt(name)
            value = values[whole]
            parameter.copy_(value if third is None else value.chunk(3)[third])
    return model


def _in_gpt(name: str) -> tuple[str, int | None]:
    """The GPT's name of a parameter, and which third of it this is."""
    if not name.startswith("blocks."):
        return name, None
    _, number, layer, kind = name.split(".")
    if layer in QKV:
        return f"blocks.{number}.attention.qkv.{kind}", QKV.index(layer)
    return f"blocks.{number}.{NAMES[layer]}.{kind}", None


def in_gpt(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values by the GPT's names; thirds are put together."""
    thirds: dict[str, dict[int, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, value in found.items():
        target, third = _in_gpt(name)
        if third is None:
            whole[target] = value
        else:
            thirds.setdefault(target, {})[third] = value
    return whole | {n: torch.cat([parts[i] for i in range(3)]) for n, parts in thirds.items()}


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- DTensor and FSDP2


def split_by_dtensor(model: StockGPT, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Tensor parallelism by torch, with or without SequenceParallel; each parameter becomes a DTensor."""
    stream = Shard(1) if sequence else Replicate()  # between the products
    plan: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    for number in model.blocks:
        block = f"blocks.{number}"
        for name in (*QKV, "up"):
            plan[f"{block}.{name}"] = ColwiseParallel(input_layouts=stream)
        for name in ("out", "down"):
            plan[f"{block}.{name}"] = RowwiseParallel(output_layouts=stream)
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    if sequence:
        plan |= dict.fromkeys(norms, SequenceParallel(use_local_output=True))
    parallelize_module(model, mesh, plan)
    kept = ["wpe"] if sequence else ["wpe", *norms]
    for name in kept:
        module = model.get_submodule(name)
        distribute_module(module, mesh, None, _enters, _leaves_in_parts if sequence else _leaves)


def _enters(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
    return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)


def _leaves(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.to_local()


def _leaves_in_parts(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    return output.redistribute(mesh, [Shard(0)]).to_local()


def shard_by_fsdp2(model: StockGPT, mesh: DeviceMesh, again: bool | int = True) -> None:
    """``fully_shard`` of each block and of the rest; over a mesh of two dimensions, replicas of shards.

    Args:
        model: changed in place.
        mesh: of the ranks.
        again: what becomes of parameters after forward: a number shards them over so many ranks until backward.
    """
    skip_where_fsdp2_sums()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=again)


def whole(tensor: Any) -> Tensor:
    """The whole value of a DTensor or of a plain tensor. Collective for DTensors."""
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().clone()


def train_stock(
    config: GPTConfig,
    comm: MPI.Intracomm,
    divide: Callable[[StockGPT], None],
    *,
    data: int,
    rank: int,
    micro_batches: int,
    steps: int,
) -> Seen:
    """Clipped steps of AdamW of a model that ``divide`` has spread. Collective.

    Args:
        config: of the model.
        comm: all ranks.
        divide: changes the model in place.
        data: data parallel ranks.
        rank: which of them this is.
        micro_batches: of each of them and step.
        steps: to take.
    """
    model = stock_gpt(config)
    divide(model)
    optimizer = optimizer_of(model)
    seen = Seen()
    for step in range(steps):
        total = 0.0
        for micro in range(micro_batches):
            tokens = text(step, micro, rank, config.context)
            loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:]) / micro_batches
            loss.backward()
            total += loss.item()
        losses = comm.allgather(total)
        seen.losses.append(sum(losses) / len(losses))
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        seen.gradients.append(in_gpt(gradients))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_of(data))
        seen.norms.append(whole(norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


# --- pipelining


def train_stock_pipeline(
    config: GPTConfig, comm: MPI.Intracomm, *, micro_batches: int, steps: int
) -> Seen:
    """Clipped steps of AdamW by ``Schedule1F1B``, a stage on each rank of the default process group. Collective."""
    each = -(-config.layers // comm.size)
    assert each * comm.size == config.layers, "equal stages"
    blocks = range(comm.rank * each, (comm.rank + 1) * each)
    model = stock_gpt(config, blocks=blocks)
    stage = PipelineStage(model, comm.rank, comm.size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=mean_loss)
    optimizer = optimizer_of(model)
    seen = Seen()
    for step in range(steps):
        tokens = torch.cat([text(step, micro, 0, config.context) for micro in range(micro_batches)])
        losses: list[Tensor] = []
        # Contiguous: torch 2.11 looks at strides.
        arguments = [tokens[:, :-1].contiguous()] if model.is_first else []
        if model.is_last:
            schedule.step(*arguments, target=tokens[:, 1:], losses=losses)
        else:
            schedule.step(*arguments)
        mean = torch.stack(losses).mean().item() if losses else 0.0
        seen.losses.append(comm.allgather(mean)[-1])
        mine = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        seen.gradients.append(
            {k: v for part in comm.allgather(in_gpt(mine)) for k, v in part.items()}
        )
        total = torch.tensor(sum(g.double().square().sum().item() for g in mine.values()))
        dist.all_reduce(total)
        norm = math.sqrt(total.item())
        seen.norms.append(norm)
        torch.nn.utils.clip_grads_with_norm_(
            model.parameters(), clip_of(1), torch.tensor(norm, dtype=torch.float32)
        )
        optimizer.step()
        optimizer.zero_grad()
    return seen
