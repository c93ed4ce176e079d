"""Several tasks: products of each beside every layer, ranks that train different ones in a step, and exports."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hpczero
from hpczero import finetune
from hpczero.errors import ConfigError, PlanError, StepError
from tests.equality.reference import tree_sum
from tests.finetune.models import loss_of, off, optimizer_of, with_products
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, tiny_gpt, tiny_tokens, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

WEIGHTS = {"code": 3.0, "prose": 2.0, "rare": 0.1}
# Step by step, the task of each rank: different ones, one alone, and one that comes last.
TURNS = (("code", "prose", "code"), ("code", "code", "code"), ("prose", "rare", "code"))


def model_of_tasks() -> nn.Module:
    """A tiny GPT with products of three tasks, none of them zero; the same on every rank."""
    model = tiny_gpt()
    for rank, task in enumerate(WEIGHTS, 2):
        finetune.lora(model, rank=rank, task=task)
    return with_products(model)


def turn(rank: int, step: int) -> str:
    return TURNS[step % len(TURNS)][rank % 3]


def plain_steps(model: nn.Module, size: int, count: int) -> None:
    """What ``size`` ranks would do, in one process; a task that nobody trains in a step has no gradient in it."""
    optimizer, parameters = optimizer_of(model), finetune.trained(model)
    for step in range(count):
        found = []
        for rank in range(size):
            finetune.use(model, turn(rank, step))
            loss = loss_of(model, rank, step)
            found.append(torch.autograd.grad(loss, parameters, allow_unused=True))
        for parameter, of_ranks in zip(parameters, zip(*found, strict=True), strict=True):
            if any(each is not None for each in of_ranks):
                given = [torch.zeros_like(parameter) if g is None else g for g in of_ranks]
                parameter.grad = tree_sum(given) * (1.0 / size)
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("transport", ["flat", "auto"])
def test_ranks_with_different_tasks_train_as_one_process(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    plain, model = model_of_tasks(), model_of_tasks()
    plain_steps(plain, comm.size, 6)
    optimizer = optimizer_of(model)
    options: dict[str, Any] = {"stage": stage, "transport": transport, "topology": topology}
    with zeroified(model, optimizer, **options):
        for step in range(6):
            finetune.use(model, turn(comm.rank, step))
            loss_of(model, comm.rank, step).backward()
            hpczero.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found = hpczero.full_state_dict(model) or {}
    parallel_assert(comm, off(found, plain) <= 1e-6, f"{off(found, plain)}")
    if comm.size == 1:  # nobody has trained it
        first, name = model_of_tasks(), "blocks.0.attention.qkv.lora_rare.B"
        assert torch.equal(found[name], first.get_parameter(name))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_task_leaves_as_an_adapter_or_merged_and_the_others_stay(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    peft = pytest.importorskip("peft")
    model = model_of_tasks()
    with zeroified(model, optimizer_of(model), topology=topology):
        finetune.save_adapter(model, folder / "prose", adapter="prose")
        finetune.save_merged(model, folder / "merged", task="prose")
        for call in (finetune.save_adapter, finetune.save_merged):
            refused = partial(call, model, folder / "no")
            raises_on_all(comm, ConfigError, "task: got None", refused)
    if comm.rank == 0:
        plain = model_of_tasks()
        finetune.use(plain, "prose")
        expected = plain(tiny_tokens(0))
        finetune.merge(plain, task="prose")
        torch.testing.assert_close(plain(tiny_tokens(0)), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            load_file(folder / "merged" / "model.safetensors"), written(plain)
        )
        other = peft.PeftModel.from_pretrained(tiny_gpt(), folder / "prose")
        torch.testing.assert_close(other(tiny_tokens(0)), expected, atol=1e-5, rtol=1e-5)


def written(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a file has: tied weights once."""
    return dict(model.named_parameters())


def test_tasks_come_in_their_proportions_however_many_ranks_there_are() -> None:
    tasks = finetune.Tasks(WEIGHTS)
    one = [tasks.of(step, 0, 1) for step in range(510)]
    many = [
        tasks.of(step, rank, 3, micro, 2)
        for step in range(85)
        for micro in range(2)
        for rank in range(3)
    ]
    assert one == many
    assert Counter(name for name, _ in one) == {"code": 300, "prose": 200, "rare": 10}
    for task in WEIGHTS:  # each begins at its first micro-batch, and leaves none out
        numbers = [number for name, number in one if name == task]
        assert numbers == list(range(len(numbers)))
    for count in range(1, 510):
        seen = Counter(name for name, _ in one[:count])
        assert all(abs(seen[task] - count * w / 5.1) < 3 for task, w in WEIGHTS.items())


def test_what_tasks_cannot_be_is_refused_by_name() -> None:
    model = model_of_tasks()
    with pytest.raises(StepError, match=r"task 'code' before a task was chosen.*finetune\.use"):
        model(tiny_tokens(0))
    with pytest.raises(
        ConfigError, match=r"got 'none', expected one of \['code', 'prose', 'rare'\]"
    ):
        finetune.use(model, "none")
    for task in (None, "code"):
        with pytest.raises(PlanError, match="low-rank products already"):
            finetune.lora(model, task=task)
    with pytest.raises(ConfigError, match=r"task: got 'a\.b', expected letters"):
        finetune.lora(tiny_gpt(), task="a.b")
    with pytest.raises(ConfigError, match="task: got None, expected one of"):
        finetune.merge(model)
    taken = nn.Sequential(nn.Linear(3, 3))
    taken[0].add_module("lora_x", nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"task: got 'x', and '0' has a 'lora_x' already"):
        finetune.lora(taken, task="x", targets="0")
    for numbers in ((0, 2, 2), (0, 0, 1, 2, 2), (-1, 0, 1)):
        with pytest.raises(ConfigError, match="expected all in range"):
            finetune.Tasks(WEIGHTS).of(*numbers)
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
