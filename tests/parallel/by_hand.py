"""Training in half precision by all tensor ranks of a layout in one process, written by hand with stock torch.

The casts are those that hpczero documents, and nothing of its own code makes them: fp32 masters; parameters and
activations in bf16; sums of tensor ranks' activations in fp32, rounded once; each rank's gradient in bf16, those of
micro-batches added in fp32 and rounded once; the mean over data parallel ranks in fp32; the optimizer in fp32 on the
masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpczero.models import GPT
from hpczero.models.config import GPTConfig
from tests.parallel.layouts import clip_of, optimizer_of, text

HALF = torch.bfloat16


class Fan(torch.autograd.Function):
    """One tensor for each rank; the gradient is their sum in fp32, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> tuple[Tensor, ...]:
        return tuple(x.clone() for _ in range(ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients), None


class Sum(torch.autograd.Function):
    """The ranks' sum in fp32, rounded once; each has its gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.ranks = len(parts)
        return _sum(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.clone() for _ in range(ctx.ranks))


class CrossEntropy(torch.autograd.Function):
    """The sum of -log softmax at the targets, in fp32, of logits in parts: each part's exponentials are summed first.

    ``F.cross_entropy`` of all logits adds in another order. Of a hundred micro-batches that alone rounds the gradient
    of a logit in a few to the other side.
    """

    @staticmethod
    def forward(ctx: Any, targets: Tensor, *parts: Tensor) -> Tensor:
        top = torch.cat(parts, dim=1).float().amax(1)
        powers = [(part.float() - top[:, None]).exp() for part in parts]
        total = torch.stack([power.sum(1) for power in powers]).sum(0)
        ctx.save_for_backward(targets, total, *powers)
        ctx.dtype = parts[0].dtype
        picked = torch.cat(parts, dim=1).float().gather(1, targets[:, None])[:, 0] - top
        return (total.log() - picked).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        targets, total, *powers = ctx.saved_tensors
        all_of_them = torch.cat(powers, dim=1) * (gradient / total)[:, None]
        all_of_them.scatter_add_(1, targets[:, None], -gradient.expand(len(targets), 1))
        widths = [power.shape[1] for power in powers]
        return None, *(part.to(ctx.dtype) for part in all_of_them.split(widths, dim=1))


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


class Ranks:
    """The forwards of ``ranks`` tensor ranks; of one rank it is the model as it is.

    Args:
        masters: fp32 values by name.
        ranks: that share each layer.
        sequence: whether each has a part of the tokens between products.
    """

    def __init__(
        self, config: GPTConfig, masters: Mapping[str, Tensor], ranks: int, *, sequence: bool
    ) -> None:
        assert config.positions == "learned", "these are written here"
        assert not config.tie_embeddings, "these are written here"
        assert config.heads % ranks == 0, "nothing is padded here"
        self.config, self.ranks, self.sequence = config, ranks, sequence
        self.values = {name: value.to(HALF) for name, value in masters.items()}
        # By name and rank: what has a gradient by itself.
        self.leaves: dict[tuple[str, int], Tensor] = {}

    def own(self, name: str, rank: int) -> Tensor:
        """What one rank has of a parameter, with a gradient of its own."""
        if (name, rank) not in self.leaves:
            value, dim = self.values[name], self._cut_along(name)
            if dim is not None:
                parts = [each.chunk(self.ranks, dim)[rank] for each in self._pieces(name, value)]
                value = torch.cat(parts)
            self.leaves[name, rank] = value.clone().requires_grad_()
        return self.leaves[name, rank]

    def _cut_along(self, name: str) -> int | None:
        """The dimension of a parameter that ranks share."""
        if self.ranks == 1:
            return None
        if name.endswith("projection.weight"):
            return 1
        cut = ".qkv." in name or ".expansion." in name or name == "lm_head.weight"
        return 0 if cut else None

    def _pieces(self, name: str, value: Tensor) -> tuple[Tensor, ...]:
        """What is cut by itself: q, k and v have each their heads."""
        return value.chunk(3) if ".qkv." in name else (value,)

    def gradients(self) -> dict[str, Tensor]:
        """Of the last backward, bf16 as each rank has them, in one fp32 tensor by name and rank; they are cleared."""
        found = {}
        for (name, rank), leaf in self.leaves.items():
            assert leaf.grad is not None, name
            found[f"{name}/{rank}"], leaf.grad = leaf.grad.float(), None
        return found

    def whole(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of whole parameters from those of ranks: put together where cut, summed where ranks have parts."""
        wholes: dict[str, Tensor] = {}
        for name, value in self.values.items():
            mine = [found[f"{name}/{r}"] for r in range(self.ranks) if f"{name}/{r}" in found]
            dim = self._cut_along(name)
            if dim is None:
                wholes[name] = torch.stack(mine).sum(0) if len(mine) > 1 else mine[0]
            else:
                pieces = zip(*(self._pieces(name, part) for part in mine), strict=True)
                wholes[name] = torch.cat([torch.cat(of_ranks, dim) for of_ranks in pieces])
            assert wholes[name].shape == value.shape, name
        return wholes

    # --- the forward

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in fp32."""
        x = F.embedding(tokens, self.own("wte.weight", 0))
        x = x + self.own("wpe.weight", 0)[: tokens.shape[1]]
        for block in range(self.config.layers):
            at = f"blocks.{block}"
            x = self._branch(x, f"{at}.attention_norm", f"{at}.attention.projection", at, True)
            x = self._branch(x, f"{at}.mlp_norm", f"{at}.mlp.projection", at, False)
        y = self._normed(x, "final_norm")
        parts = [
            F.linear(each, self.own("lm_head.weight", r))
            for r, each in enumerate(Fan.apply(y, self.ranks))
        ]
        rows = [part.flatten(0, 1) for part in parts]
        if self.ranks == 1:
            return F.cross_entropy(rows[0].float(), targets.flatten())
        total: Tensor = CrossEntropy.apply(targets.flatten(), *rows)
        return total / targets.numel()

    def _branch(self, x: Tensor, norm: str, last: str, at: str, attends: bool) -> Tensor:
        inputs = Fan.apply(self._normed(x, norm), self.ranks)
        inner = [
            (self._attention if attends else self._expansion)(each, at, r)
            for r, each in enumerate(inputs)
        ]
        products = [F.linear(y, self.own(f"{last}.weight", r)) for r, y in enumerate(inner)]
        if self.ranks == 1:
            return x + self._linear(inner[0], last, 0)
        total: Tensor = Sum.apply(*products)
        if not self.sequence:
            return x + (total + self.own(f"{last}.bias", 0))
        parts = enumerate(total.chunk(self.ranks, dim=1))
        return x + torch.cat([part + self.own(f"{last}.bias", r) for r, part in parts], dim=1)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        """By one norm, or by one of each rank's tokens."""
        parts = x.chunk(self.ranks, dim=1) if self.sequence else [x]
        width = (self.config.hidden,)
        normed = [
            F.layer_norm(part, width, self.own(f"{name}.weight", r), self.own(f"{name}.bias", r))
            for r, part in enumerate(parts)
        ]
        return torch.cat(normed, dim=1)

    def _attention(self, x: Tensor, at: str, rank: int) -> Tensor:
        qkv = self._linear(x, f"{at}.attention.qkv", rank)
        size = self.config.hidden // self.config.heads
        q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(-2)

    def _expansion(self, x: Tensor, at: str, rank: int) -> Tensor:
        return F.gelu(self._linear(x, f"{at}.mlp.expansion", rank), approximate="tanh")

    def _linear(self, x: Tensor, name: str, rank: int) -> Tensor:
        return F.linear(x, self.own(f"{name}.weight", rank), self.own(f"{name}.bias", rank))


@dataclass
class StepByHand:
    """One step: mean loss, norm before clipping, and masters after it."""

    loss: float
    norm: float
    masters: dict[str, Tensor]


def steps_by_hand(
    config: GPTConfig,
    starts: Sequence[Mapping[str, Tensor]],
    data: int,
    ranks: int,
    *,
    sequence: bool,
    micro_batches: int,
) -> list[StepByHand]:
    """Clipped steps of AdamW, each from given masters; the optimizer's moments are those of all these steps.

    A master that is off in its last bit may be rounded to another parameter, 4e-3 away, and what follows is another
    training. Each step therefore begins where the other side began it.

    Args:
        config: of the model.
        starts: masters before each step.
        data: data parallel ranks, which are taken one after the other.
        ranks: tensor ranks of each.
        sequence: whether these share the tokens between products.
        micro_batches: of each data parallel rank and step.
    """
    masters = nn.ParameterDict()
    names = [name for name, _ in GPT(config).named_parameters()]
    for number, name in enumerate(names):  # names with dots are no keys there
        masters[str(number)] = nn.Parameter(torch.empty_like(starts[0][name]))
    by_name = {name: masters[str(number)] for number, name in enumerate(names)}
    optimizer = optimizer_of(masters)
    found = []
    for step, start in enumerate(starts):
        for name, master in by_name.items():
            master.data.copy_(start[name])
        total, means = 0.0, []
        for rank in range(data):
            model = Ranks(config, start, ranks, sequence=sequence)
            sums: dict[str, Tensor] = {}
            for micro in range(micro_batches):
                tokens = text(step, micro, rank, config.context)
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                total += loss.item() / (data * micro_batches)
                for name, mine in model.gradients().items():
                    sums[name] = sums[name] + mine if name in sums else mine
            means.append(model.whole({n: v.to(HALF).float() for n, v in sums.items()}))
        gradients = {}
        for name, master in by_name.items():
            summed = torch.stack([mean[name] for mean in means]).sum(0)
            gradients[name] = master.grad = summed / (data * micro_batches)
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
        for gradient in gradients.values():
            gradient.mul_(min(1.0, clip_of(data) / (norm + 1e-6)))
        optimizer.step()
        after = {name: master.detach().clone() for name, master in by_name.items()}
        found.append(StepByHand(total, norm, after))
    return found
