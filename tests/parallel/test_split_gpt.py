"""A whole GPT cut over tensor ranks: its loss, logits and gradients are those of one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from hpczero.models import GPT, GPTConfig
from hpczero.parallel import close, gpt_rule, split
from tests.helpers.parallel import parallel_assert
from tests.parallel.wholes import (
    equal_on_all,
    off,
    padding_is_zero,
    part,
    tensor_ranks,
    whole_values,
)

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

# Neither the heads nor the vocabulary nor the width of the MLP divide by 2, 3 and 4.
CONFIG = GPTConfig(vocab_size=61, context=16, layers=2, hidden=30, heads=5, ffn_multiple=3)
SMALL = GPTConfig(vocab_size=64, context=16, layers=1, hidden=24, heads=12, ffn_multiple=2)
CONFIGS = {
    "tied": CONFIG,
    "untied": dataclasses.replace(CONFIG, tie_embeddings=False),
    "rotary": dataclasses.replace(CONFIG, positions="rotary"),
    "nothing padded": SMALL,
    "checkpointing": dataclasses.replace(CONFIG, checkpoint_activations=True),
}
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])


def build(config: GPTConfig, seed: int = 1) -> GPT:
    """Values at which everything has a gradient."""
    model = GPT(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
    return model


def batch(config: GPTConfig, seq_len: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(config.vocab_size, (2, seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gradients(model: GPT) -> dict[str, Any]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@SEQUENCE
@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_logits_and_gradients_are_those_of_one_process(
    comm: MPI.Intracomm, kind: str, sequence: bool
) -> None:
    config = CONFIGS[kind]
    plain, tokens_and_targets = build(config), batch(config)
    names = [name for name, _ in plain.named_parameters()]
    with tensor_ranks(comm) as topology:
        model = split(copy.deepcopy(plain), topology, gpt_rule(config), sequence=sequence)
        parallel_assert(comm, [name for name, _ in model.named_parameters()] == names)
        parallel_assert(comm, part(model).names == tuple(names))
        wanted = plain(*tokens_and_targets)
        wanted.backward()
        found = model(*tokens_and_targets)
        found.backward()
        parallel_assert(comm, equal_on_all(comm, found), "the loss has other bits")
        parallel_assert(comm, off(found, wanted) < 1e-6, f"loss {found} {wanted}")
        for name, gradient in whole_values(comm, model, gradients=True).items():
            worst = off(gradient, gradients(plain)[name])
            parallel_assert(comm, worst < 3e-6, f"{name}: {worst}")
        parallel_assert(comm, padding_is_zero(model, gradients=True), "gradients of padding")
        for name, parameter in model.named_parameters():
            placement = part(model).placements[name]
            if placement.dim is None and not placement.partial:
                parallel_assert(comm, equal_on_all(comm, parameter.grad), name)
        with torch.no_grad():
            logits = model(tokens_and_targets[0])
            parallel_assert(comm, off(logits, plain(tokens_and_targets[0])) < 2e-6, "logits")
            parallel_assert(comm, equal_on_all(comm, logits), "logits have other bits")
            one = model(tokens_and_targets[0][:1, :1])  # one token: most ranks have none
            parallel_assert(
                comm, off(one, plain(tokens_and_targets[0][:1, :1])) < 2e-6, "one token"
            )
        close(model)
