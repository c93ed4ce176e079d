"""Small models with adapters, and their training in one process. Must not know: what any test looks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import hpczero
from hpczero import finetune
from hpczero.kernels.codes import decode, encode
from hpczero.plan.layout import Codec
from tests.equality.reference import tree_sum
from tests.helpers.small_models import tiny_gpt, tiny_tokens

M = TypeVar("M", bound=nn.Module)


def adapted_gpt(rank: int = 3, **sizes: int) -> nn.Module:
    """A tiny GPT with products beside its linear layers, none of them zero; the same on every rank."""
    return with_products(finetune.lora(tiny_gpt(**sizes), rank=rank, alpha=2 * rank))


def with_products(model: M) -> M:
    """The model, no product of which is zero any more."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora" in name and name.endswith(".B"):
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(finetune.trained(model), lr=1e-2)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = tiny_tokens(rank + 100 * step)
    loss: Tensor = model(tokens, tokens)
    return loss


def steps(model: nn.Module, optimizer: Any, rank: int, which: range) -> None:
    """Of one rank, clipped."""
    for step in which:
        loss_of(model, rank, step).backward()
        hpczero.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def off(found: Mapping[str, Tensor] | None, plain: nn.Module) -> float:
    """Largest difference of a full state, which ranks other than 0 have not, from a model's own."""
    expected = plain.state_dict()
    return max([0.0, *(float((v - expected[n]).abs().max()) for n, v in (found or {}).items())])


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, size: int, steps: range
) -> None:
    """What ``size`` ranks would do, in one process, clipped; gradients are summed in the documented order."""
    parameters = finetune.trained(model)
    for step in steps:
        found = [torch.autograd.grad(loss_of(model, r, step), parameters) for r in range(size)]
        for parameter, gradients in zip(parameters, zip(*found, strict=True), strict=True):
            parameter.grad = tree_sum(gradients) * (1.0 / size)
        nn.utils.clip_grad_norm_(finetune.trained(model), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def rounded(model: M, name: str, blocks: str = "blocks.") -> M:
    """Frozen matrices of blocks as codes would give them back; blocks of 64 of the flat unit."""
    codec = Codec(name)
    parameters = dict(model.named_parameters())
    for block in (f"{blocks}0.", f"{blocks}1."):
        names = [
            each
            for each, parameter in parameters.items()
            if each.startswith(block) and parameter.dim() > 1 and not parameter.requires_grad
        ]
        flat = torch.cat([parameters[each].detach().reshape(-1) for each in names])
        padded = torch.zeros(-(-flat.numel() // 64) * 64)
        padded[: flat.numel()] = flat
        words = torch.empty(codec.words(padded.numel()))
        encode(padded, words, codec.name)
        decode(words.view(1, -1), padded.view(1, -1), codec.name)
        begin = 0
        for each in names:
            end = begin + parameters[each].numel()
            with torch.no_grad():
                parameters[each].copy_(padded[begin:end].view_as(parameters[each]))
            begin = end
    return model
