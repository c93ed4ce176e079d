"""A whole GPT cut over tensor ranks: its loss, logits and gradients are those of one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from hpczero.models import GPT, GPTConfig
from hpczero.models.gpt import Attention
from hpczero.parallel import gpt_rule
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import grad
from tests.parallel.wholes import (
    check_gradients,
    equal_on_all,
    off,
    padding_is_zero,
    part,
    randomize,
    split_over,
    tokens_and_targets,
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
    return randomize(GPT(config), seed=seed)


@SEQUENCE
@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_logits_and_gradients_are_those_of_one_process(
    comm: MPI.Intracomm, kind: str, sequence: bool
) -> None:
    config = CONFIGS[kind]
    plain, (tokens, targets) = build(config), tokens_and_targets(config)
    names = [name for name, _ in plain.named_parameters()]
    with split_over(comm, copy.deepcopy(plain), gpt_rule(config), sequence=sequence) as model:
        parallel_assert(comm, [name for name, _ in model.named_parameters()] == names)
        parallel_assert(comm, part(model).names == tuple(names))
        wanted, found = plain(tokens, targets), model(tokens, targets)
        wanted.backward()
        found.backward()
        parallel_assert(comm, equal_on_all(comm, found), "the loss has other bits")
        parallel_assert(comm, off(found, wanted) < 1e-6, f"loss {found} {wanted}")
        check_gradients(comm, model, plain)
        parallel_assert(comm, padding_is_zero(model, gradients=True), "gradients of padding")
        for name, parameter in model.named_parameters():
            placement = part(model).placements[name]
            if placement.dim is None and not placement.partial:
                parallel_assert(comm, equal_on_all(comm, grad(parameter)), name)
        with torch.no_grad():
            logits = model(tokens)
            parallel_assert(comm, off(logits, plain(tokens)) < 2e-6, "logits")
            parallel_assert(comm, equal_on_all(comm, logits), "logits have other bits")
            one = tokens[:1, :1]  # most ranks have no token
            parallel_assert(comm, off(model(one), plain(one)) < 2e-6, "one token")


@pytest.mark.ranks(2, 3)
def test_values_of_rank_0_are_given_to_all_and_each_keeps_its_part(comm: MPI.Intracomm) -> None:
    plain = build(CONFIG)
    with split_over(comm, build(CONFIG, seed=1 + comm.rank), gpt_rule(CONFIG)) as model:
        found = whole_values(comm, model, gradients=False)
        for name, parameter in plain.named_parameters():
            parallel_assert(comm, torch.equal(found[name], parameter), name)
        parallel_assert(comm, padding_is_zero(model, gradients=False))
        parallel_assert(comm, model.lm_head.weight is model.wte.weight, "no longer tied")


@pytest.mark.ranks(2)
@SEQUENCE
def test_dropout_is_equal_where_activations_are_and_the_same_again_when_recomputed(
    comm: MPI.Intracomm, sequence: bool
) -> None:
    config = dataclasses.replace(CONFIG, dropout=0.3, context=64)
    recomputing = dataclasses.replace(config, checkpoint_activations=True)
    given, found = tokens_and_targets(config, seq_len=64), []
    for one in (config, recomputing):
        with split_over(comm, build(one), gpt_rule(one), sequence=sequence) as model:
            torch.manual_seed(7)
            loss = model(*given)
            loss.backward()
            parallel_assert(comm, equal_on_all(comm, loss), "loss")
            found.append((loss.detach(), whole_values(comm, model, gradients=True)))
            parallel_assert(comm, equal_on_all(comm, torch.get_rng_state()), "streams part")
            parallel_assert(comm, not torch.equal(model(*given), loss), "the same masks twice")
    parallel_assert(comm, torch.equal(found[0][0], found[1][0]))
    for name, gradient in found[0][1].items():
        parallel_assert(comm, torch.equal(gradient, found[1][1][name]), name)


@pytest.mark.ranks(2)
def test_masks_of_own_heads_differ_between_ranks(comm: MPI.Intracomm) -> None:
    """All heads have equal weights, and so equal outputs but for their masks."""
    config = GPTConfig(vocab_size=64, context=64, layers=1, hidden=24, heads=4, dropout=0.5)
    with split_over(comm, build(config), gpt_rule(config)) as model:
        attention = next(m for m in model.modules() if isinstance(m, Attention))
        ones = torch.ones(1, 2, 64, 6)
        torch.manual_seed(3)
        own = attention.attend(ones, ones, ones, False, 0.5)
        parallel_assert(comm, not equal_on_all(comm, own), "equal masks of other heads")
        torch.manual_seed(3)
        parallel_assert(comm, torch.equal(own, attention.attend(ones, ones, ones, False, 0.5)))


@pytest.mark.ranks(2)
def test_a_copy_of_a_split_model_is_one_of_its_own(comm: MPI.Intracomm) -> None:
    given = tokens_and_targets(CONFIG)
    with split_over(comm, build(CONFIG), gpt_rule(CONFIG)) as model:
        other, loss = copy.deepcopy(model), model(*given)
        parallel_assert(comm, torch.equal(other(*given), loss))
        with torch.no_grad():
            other.wte.weight.zero_()
        parallel_assert(comm, torch.equal(model(*given), loss), "they share weights")
        parallel_assert(comm, not torch.equal(other(*given), loss))
