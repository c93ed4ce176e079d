"""Sequences shared over ranks: the mean of the ranks' losses and gradients are those of one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Literal

import pytest
import torch

from hpczero.errors import CommError, ConfigError, PlanError
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import close, gpt_rule, own_tokens, share_sequence, split
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import grad, raises_on_all
from tests.parallel.wholes import off, randomize, tensor_ranks, tokens_and_targets, whole_values

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

CONFIG = GPTConfig(vocab_size=61, context=24, layers=2, hidden=48, heads=12, ffn_multiple=2)


def build(config: GPTConfig) -> GPT:
    return randomize(GPT(config))


def batch(length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens_and_targets(CONFIG, length)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_loss_logits_and_gradients_are_those_of_one_process(
    comm: MPI.Intracomm, positions: Literal["learned", "rotary"]
) -> None:
    config = dataclasses.replace(CONFIG, positions=positions)
    plain = build(config)
    wanted = plain(*batch())
    wanted.backward()
    with tensor_ranks(comm, sequence=comm.size, shard=1) as topology:
        model = share_sequence(copy.deepcopy(plain), topology)
        model.zero_grad()
        tokens, targets = (own_tokens(x, topology) for x in batch())
        loss = model(tokens, targets)
        loss.backward()
        mean = comm.allreduce(loss.item()) / comm.size
        parallel_assert(comm, abs(mean - wanted.item()) < 1e-6 * abs(mean), f"{mean} {wanted}")
        for name, parameter in model.named_parameters():
            total = torch.from_numpy(comm.allreduce(grad(parameter).numpy())) / comm.size
            parallel_assert(comm, off(total, grad(plain.get_parameter(name))) < 3e-6, name)
        with torch.no_grad():
            logits, all_of_them = model(tokens), plain(batch()[0])
        parallel_assert(comm, off(logits, own_tokens(all_of_them, topology)) < 2e-6)
        close(model)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("first", ["split", "share"])
@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
def test_two_ranks_share_layers_and_two_share_tokens(
    comm: MPI.Intracomm, first: str, sequence: bool
) -> None:
    plain = build(CONFIG)
    wanted = plain(*batch())
    wanted.backward()
    with tensor_ranks(comm, tensor=2, sequence=2, shard=1) as topology:
        model = copy.deepcopy(plain)
        model.zero_grad()
        if first == "share":
            share_sequence(model, topology)
        split(model, topology, gpt_rule(CONFIG), sequence=sequence)
        if first == "split":
            share_sequence(model, topology)
        loss = model(*(own_tokens(x, topology) for x in batch()))
        loss.backward()
        mean = comm.allreduce(loss.item()) / comm.size
        parallel_assert(comm, abs(mean - wanted.item()) < 1e-6 * abs(mean), f"{mean} {wanted}")
        own = whole_values(topology.tensor.comm, model, gradients=True)
        for name, parameter in plain.named_parameters():
            total = torch.from_numpy(topology.sequence.comm.allreduce(own[name].numpy())) / 2
            parallel_assert(comm, off(total, grad(parameter)) < 3e-6, name)
        close(model)


@pytest.mark.ranks(2)
def test_dropout_differs_between_own_tokens_of_equally_seeded_ranks(comm: MPI.Intracomm) -> None:
    config = dataclasses.replace(CONFIG, dropout=0.5)
    with tensor_ranks(comm, sequence=comm.size, shard=1) as topology:
        model = share_sequence(build(config), topology)
        torch.manual_seed(3)
        kept = comm.allgather((model.dropout(torch.ones(200)) > 0).numpy().tobytes())
        parallel_assert(comm, len(set(kept)) == comm.size, "equal masks")
        torch.manual_seed(3)
        loss = model(*(own_tokens(x, topology) for x in batch()))
        loss.backward()
        torch.manual_seed(3)
        again = model(*(own_tokens(x, topology) for x in batch()))
        parallel_assert(comm, torch.equal(loss, again) and bool(loss.isfinite()))
        close(model)


@pytest.mark.ranks(2)
def test_own_tokens_are_the_same_where_time_is_another_dimension(comm: MPI.Intracomm) -> None:
    tokens = batch()[0]
    with tensor_ranks(comm, sequence=comm.size, shard=1) as topology:
        transposed = own_tokens(tokens.T, topology, dim=0)
        parallel_assert(comm, torch.equal(transposed.T, own_tokens(tokens, topology)))


@pytest.mark.ranks(2)
def test_what_does_not_divide_or_fit_is_refused_by_name(comm: MPI.Intracomm) -> None:
    odd = dataclasses.replace(CONFIG, hidden=45, heads=9)
    with tensor_ranks(comm, sequence=comm.size, shard=1) as topology:
        raises_on_all(comm, PlanError, "9 heads", lambda: share_sequence(GPT(odd), topology))
        linear = torch.nn.Linear(2, 2)
        raises_on_all(comm, PlanError, "got a Linear", share_sequence, linear, topology)
        with pytest.raises(ConfigError, match="expected a multiple"):  # found by every rank itself
            own_tokens(batch(13)[0], topology)
        model = share_sequence(build(CONFIG), topology)
        raises_on_all(comm, ValueError, "26 tokens, 13 on each of 2", lambda: model(*batch(13)))
        own = batch(4 + comm.rank)
        raises_on_all(comm, CommError, "different calls", lambda: model(*own))
        close(model)
