"""A whole GPT cut over tensor ranks: its loss, logits and gradients are those of one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from hpczero.models import GPT, GPTConfig
from hpczero.models.gpt import Attention
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
        for name, _parameter in model.named_parameters():
            placement = part(model).placements[name]
            if placement.dim is None and not placement.partial:
                parallel_assert(comm, equal_on_all(comm, gradients(model)[name]), name)
        with torch.no_grad():
            logits = model(tokens_and_targets[0])
            parallel_assert(comm, off(logits, plain(tokens_and_targets[0])) < 2e-6, "logits")
            parallel_assert(comm, equal_on_all(comm, logits), "logits have other bits")
            one = model(tokens_and_targets[0][:1, :1])  # one token: most ranks have none
            parallel_assert(
                comm, off(one, plain(tokens_and_targets[0][:1, :1])) < 2e-6, "one token"
            )
        close(model)


@pytest.mark.ranks(2, 3)
def test_values_of_rank_0_are_given_to_all_and_each_keeps_its_part(comm: MPI.Intracomm) -> None:
    plain = build(CONFIG)
    with tensor_ranks(comm) as topology:
        model = split(build(CONFIG, seed=1 + comm.rank), topology, gpt_rule(CONFIG))
        found = whole_values(comm, model, gradients=False)
        for name, parameter in plain.named_parameters():
            parallel_assert(comm, torch.equal(found[name], parameter), name)
        parallel_assert(comm, padding_is_zero(model, gradients=False))
        parallel_assert(comm, model.lm_head.weight is model.wte.weight, "no longer tied")
        close(model)


@pytest.mark.ranks(2)
def test_a_model_on_the_meta_device_is_cut_without_values(comm: MPI.Intracomm) -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    with tensor_ranks(comm) as topology:
        split(model, topology, gpt_rule(CONFIG))
        for name, parameter in model.named_parameters():
            placement = part(model).placements[name]
            parallel_assert(comm, parameter.is_meta, name)
            parallel_assert(comm, tuple(parameter.shape) == placement.local_shape, name)


@pytest.mark.ranks(2)
@SEQUENCE
def test_who_counts_and_who_has_partial_sums(comm: MPI.Intracomm, sequence: bool) -> None:
    with tensor_ranks(comm) as topology:
        model = split(GPT(CONFIG), topology, gpt_rule(CONFIG), sequence=sequence)
        found = part(model).placements
        cut = {name for name, p in found.items() if p.dim is not None}
        partial = {name for name, p in found.items() if p.partial}
        norms = {n for n in found if "norm" in n or n.endswith("projection.bias")}
        parallel_assert(comm, partial == (norms if sequence else set()), str(partial))
        parallel_assert(comm, set(found) - cut == norms | {"wpe.weight"}, str(cut))
        parallel_assert(
            comm, all(p.counted == (n in cut or comm.rank == 0) for n, p in found.items())
        )
        close(model)


@pytest.mark.ranks(2, 4)
@SEQUENCE
def test_ten_steps_of_adamw_are_those_of_one_process_and_padding_does_not_drift(
    comm: MPI.Intracomm, sequence: bool
) -> None:
    plain = build(CONFIG)
    with tensor_ranks(comm) as topology:
        model = split(copy.deepcopy(plain), topology, gpt_rule(CONFIG), sequence=sequence)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
        for _ in range(10):
            losses = [m(*batch(CONFIG)) for m in (plain, model)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
            for name, parameter in model.named_parameters():
                if part(model).placements[name].partial:
                    parameter.grad = torch.from_numpy(
                        comm.allreduce(gradients(model)[name].numpy())
                    )
            for optimizer in optimizers:
                optimizer.step()
            parallel_assert(comm, off(losses[1], losses[0]) < 1e-6, str(losses))
        parallel_assert(comm, padding_is_zero(model, gradients=False), "padding has drifted")
        close(model)


@pytest.mark.ranks(2)
@SEQUENCE
def test_dropout_is_equal_where_activations_are_and_the_same_again_when_recomputed(
    comm: MPI.Intracomm, sequence: bool
) -> None:
    config = dataclasses.replace(CONFIG, dropout=0.3, context=64)
    recomputing = dataclasses.replace(config, checkpoint_activations=True)
    tokens_and_targets = batch(config, seq_len=64)
    found = []
    with tensor_ranks(comm) as topology:
        for one in (config, recomputing):
            model = split(build(one), topology, gpt_rule(one), sequence=sequence)
            torch.manual_seed(7)
            loss = model(*tokens_and_targets)
            loss.backward()
            parallel_assert(comm, equal_on_all(comm, loss), "loss")
            found.append((loss.detach(), whole_values(comm, model, gradients=True)))
            parallel_assert(comm, equal_on_all(comm, torch.get_rng_state()), "streams part")
            again = model(*tokens_and_targets)
            parallel_assert(comm, not torch.equal(again, loss), "the same masks twice")
            close(model)
        parallel_assert(comm, torch.equal(found[0][0], found[1][0]))
        for name, gradient in found[0][1].items():
            parallel_assert(comm, torch.equal(gradient, found[1][1][name]), name)


@pytest.mark.ranks(2)
def test_masks_of_own_heads_differ_between_ranks(comm: MPI.Intracomm) -> None:
    """All heads have equal weights, and so equal outputs but for their masks."""
    config = GPTConfig(vocab_size=64, context=64, layers=1, hidden=24, heads=4, dropout=0.5)
    with tensor_ranks(comm) as topology:
        model = split(build(config), topology, gpt_rule(config))
        attention = next(m for m in model.modules() if isinstance(m, Attention))
        ones = torch.ones(1, 2, 64, 6)
        torch.manual_seed(3)
        own = attention.attend(ones, ones, ones, False, 0.5)
        parallel_assert(comm, not equal_on_all(comm, own), "equal masks of other heads")
        torch.manual_seed(3)
        parallel_assert(comm, torch.equal(own, attention.attend(ones, ones, ones, False, 0.5)))
        close(model)


@pytest.mark.ranks(2)
def test_a_copy_of_a_split_model_is_one_of_its_own(comm: MPI.Intracomm) -> None:
    with tensor_ranks(comm) as topology:
        model = split(build(CONFIG), topology, gpt_rule(CONFIG))
        other = copy.deepcopy(model)
        loss = model(*batch(CONFIG))
        parallel_assert(comm, torch.equal(other(*batch(CONFIG)), loss))
        with torch.no_grad():
            other.wte.weight.zero_()
        parallel_assert(comm, torch.equal(model(*batch(CONFIG)), loss), "they share weights")
        parallel_assert(comm, not torch.equal(other(*batch(CONFIG)), loss))
        close(model)
