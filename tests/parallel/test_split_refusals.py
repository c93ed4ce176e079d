"""What split refuses: by name, on every rank, with the model as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hpczero.errors import CommError, PlanError, StepError
from hpczero.models import GPT, GPTConfig
from hpczero.parallel import Kept, Rule, Split, close, gpt_rule, split
from hpczero.plan.placement import part_of
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, sgd, zeroified
from tests.helpers.world import World
from tests.parallel.wholes import split_over, tensor_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

CONFIG = GPTConfig(vocab_size=61, context=16, layers=1, hidden=30, heads=5)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) in and out."""
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


LAYERS: dict[str, Split | Kept] = {"first": Split(0), "second": Split(1)}


def changed(change: Callable[[TwoLayers], object]) -> TwoLayers:
    model = TwoLayers()
    change(model)
    return model


def gradient(model: TwoLayers) -> None:
    model(torch.ones(1, 4)).sum().backward()


def tie(model: TwoLayers) -> None:
    model.first = nn.Linear(4, 4)
    model.second = nn.Linear(4, 4)
    model.second.weight = model.first.weight


def first_is(layer: nn.Module) -> Callable[[TwoLayers], None]:
    return lambda model: setattr(model, "first", layer)


def rule(changes: dict[str, Split | Kept], **options: Any) -> Rule:
    return Rule({**LAYERS, **changes}, **options)


CASES: dict[str, tuple[Rule, str]] = {
    "no pattern": (Rule({"first": Split(0)}), "module 'second' .* matches no pattern"),
    "two patterns": (rule({"*": Split(0)}), "matches first, \\*, expected one"),
    "unknown": (rule({"third": Split(0)}), "names 'third', which is no module"),
    "grain": (rule({"first": Split(0, grain=4)}), "'first.weight' cannot"),
    "strips": (rule({"first": Split(0, 4)}), "'first.weight' cannot"),
    "few heads": (rule({"first": Split(0, grain=6)}), "fewer than the 2"),
    "count": (rule({}, counts=("first.heads",)), "counts 'heads'"),
}
MODELS: dict[str, tuple[Callable[[TwoLayers], object], str]] = {
    "hooks": (
        lambda m: m.first.register_forward_hook(lambda *_: None),
        "module 'first' .* has hooks",
    ),
    "forward": (
        lambda m: m.first.__dict__.update(forward=m.second.forward),
        "module 'first' .* forward of its own",
    ),
    "parametrization": (
        lambda m: parametrizations.weight_norm(m.first),
        "module 'first' \\(ParametrizedLinear\\) cannot be split",
    ),
    "class": (first_is(nn.Bilinear(4, 4, 6)), "module 'first' \\(Bilinear\\) cannot be split"),
    "gradient": (gradient, "'first.weight' has a gradient"),
    "tied": (tie, "'first.weight' is 'second.weight' too"),
    "dropout": (
        lambda m: m.add_module("drop", nn.Dropout(0.5)),
        "module 'drop' \\(Dropout\\) drops elements",
    ),
    "embedding": (first_is(nn.Embedding(8, 4, max_norm=1.0)), "module 'first' .* max_norm"),
    "buffers": (
        lambda m: m.first.register_buffer("scale", torch.ones(1)),
        "module 'first' .* has scale beside",
    ),
}


@pytest.mark.parametrize("case", [*CASES, *MODELS])
def test_what_cannot_be_split_is_named_and_stays_as_it_was(comm: MPI.Intracomm, case: str) -> None:
    given, said = CASES.get(case, (Rule(LAYERS), ""))
    model = TwoLayers()
    if case in MODELS:
        change, said = MODELS[case]
        change(model)
        given = rule({"first.parametrizations.weight": Kept.STREAM}) if "para" in case else given
    before = [(name, id(p), tuple(p.shape)) for name, p in model.named_parameters()]
    with tensor_ranks(comm) as topology:
        raises_on_all(comm, PlanError, said, lambda: split(model, topology, given))
    after = [(name, id(p), tuple(p.shape)) for name, p in model.named_parameters()]
    parallel_assert(comm, before == after and part_of(model) is None)


def other_rule(**other: Any) -> Callable[[int], tuple[nn.Module, Rule]]:
    return lambda rank: (
        changed(lambda m: setattr(m.first, "heads", 2)),
        Rule(LAYERS, **(other if rank else {})),
    )


def other_vocabulary(rank: int) -> tuple[nn.Module, Rule]:
    config = dataclasses.replace(CONFIG, vocab_size=61 + rank)
    return GPT(config), gpt_rule(config)


def other_positions(rank: int) -> tuple[nn.Module, Rule]:
    config = dataclasses.replace(CONFIG, positions="rotary") if rank else CONFIG
    return GPT(config), gpt_rule(CONFIG)


DIFFERENT = "rank 1 of 2 split a model with other parameters"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (other_vocabulary, DIFFERENT),
        (other_positions, "names 'wpe'"),  # which one rank finds by itself
        (other_rule(counts=("first.heads",)), f"{DIFFERENT}, .* rule"),
        (other_rule(entries={"first": "input"}), f"{DIFFERENT}, .* rule"),
        (other_rule(cut_before=("first",)), f"{DIFFERENT}, .* rule"),
        (other_rule(join_after=("second",)), f"{DIFFERENT}, .* rule"),
    ],
)
def test_ranks_with_other_models_or_rules_are_told_before_they_wait(
    comm: MPI.Intracomm, make: Callable[[int], tuple[nn.Module, Rule]], said: str
) -> None:
    model, own = make(comm.rank)
    with tensor_ranks(comm) as topology:
        raises_on_all(comm, PlanError, said, lambda: split(model, topology, own))


def test_a_model_is_split_once_and_before_zeroify(comm: MPI.Intracomm) -> None:
    with tensor_ranks(comm) as topology:
        model = split(GPT(CONFIG), topology, gpt_rule(CONFIG))
        message = "'wte' .*cannot be split|was split already"
        raises_on_all(comm, PlanError, message, lambda: split(model, topology, gpt_rule(CONFIG)))
        close(model)
        other, given = GPT(CONFIG), gpt_rule(CONFIG)
        with (
            tensor_ranks(comm, shard=comm.size) as shards,
            zeroified(other, sgd(other), topology=shards),
        ):
            raises_on_all(comm, PlanError, "zeroified already", split, other, topology, given)


def put_in(model: nn.Module) -> None:
    model.register_parameter("gate", nn.Parameter(torch.ones(2)))


def untied(model: nn.Module) -> None:
    model.lm_head = nn.Linear(CONFIG.hidden, CONFIG.vocab_size, bias=False)


def replaced(model: nn.Module) -> None:
    model.wte = nn.Embedding(CONFIG.vocab_size, CONFIG.hidden)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put_in, "'gate' .* was put into the model"),
        (untied, "'lm_head.weight' .* was put into the model"),
        (replaced, "'wte.weight' .* expected one of"),
    ],
)
def test_parameters_that_come_after_split_are_refused(
    comm: MPI.Intracomm, change: Callable[[nn.Module], None], said: str
) -> None:
    with tensor_ranks(comm) as topology:
        model = split(GPT(CONFIG), topology, gpt_rule(CONFIG))
        change(model)
        World(comm, topology).refuses(PlanError, said, model, sgd(model))
        close(model)


def test_streams_that_differ_are_refused_where_there_is_dropout(comm: MPI.Intracomm) -> None:
    config = dataclasses.replace(CONFIG, dropout=0.1)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with split_over(comm, GPT(config), gpt_rule(config)) as model:
        torch.manual_seed(comm.rank)
        raises_on_all(comm, StepError, "another random stream", lambda: model(tokens))
        model.eval()
        parallel_assert(comm, model(tokens).shape == (1, 4, 61))


def test_tokens_and_targets_outside_of_the_vocabulary_are_torchs_errors(
    comm: MPI.Intracomm,
) -> None:
    good, bad = torch.zeros(1, 4, dtype=torch.int64), torch.full((1, 4), 61)
    with split_over(comm, GPT(CONFIG), gpt_rule(CONFIG)) as model:
        raises_on_all(comm, IndexError, "id 61 of 61", lambda: model(bad, good))
        raises_on_all(comm, IndexError, "Target 61 is out of bounds", lambda: model(good, bad))


def test_ranks_with_other_samples_are_told(comm: MPI.Intracomm) -> None:
    with split_over(comm, GPT(CONFIG), gpt_rule(CONFIG)) as model:
        same, own = torch.ones(2, 1, 4, dtype=torch.int64), torch.full((1, 4), comm.rank)
        message = "with inputs of the model, token ids of checksum .* give all of them .* the same samples"
        raises_on_all(comm, CommError, message, lambda: model(own))
        message = "with inputs of the model, token ids of checksum"
        raises_on_all(comm, CommError, message, lambda: model(same[0], own))
        parallel_assert(comm, model(same[0], same[1]).isfinite())


@pytest.mark.ranks(1, 2)
def test_a_group_of_one_leaves_a_model_as_it_is(comm: MPI.Intracomm) -> None:
    model = TwoLayers()
    with tensor_ranks(comm, shard=comm.size) as topology:
        parallel_assert(comm, split(model, topology, Rule(LAYERS)) is model)
        parallel_assert(comm, type(model.first) is nn.Linear and part_of(model) is None)
        missing = Rule({"first": Split(0)})
        raises_on_all(comm, PlanError, "no pattern", lambda: split(model, topology, missing))


class Heads(nn.Module):
    """Attention that views by a number of heads, and one that is not about heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.steps = 4, 2, 3
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 4) in and out."""
        y = self.first(x).view(len(x), self.num_heads, -1)
        out: torch.Tensor = self.second((y * y.sum(-1, keepdim=True)).flatten(1))
        return out


@pytest.mark.parametrize("counts", [(), ("0.num_heads",)])
def test_a_number_of_heads_that_nobody_counts_is_told(
    comm: MPI.Intracomm, counts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Its views fit on two ranks, with two heads of half the width: no error, and another function."""
    model = nn.Sequential(Heads())
    by_heads = Rule({"0.first": Split(0, grain=2), "0.second": Split(1, grain=2)}, counts=counts)
    with split_over(comm, model, by_heads):
        told = [record.getMessage() for record in caplog.records if "heads" in record.getMessage()]
    expected = comm.rank == 0 and not counts
    parallel_assert(comm, bool(told) is expected, str(told))
    parallel_assert(comm, not told or "0.num_heads = 4" in told[0], str(told))
