"""The mean over micro-batches and ranks is their sum in the documented order, times one factor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import ConfigError, StepError
from hpczero.models import GPT
from tests.equality.reference import tree_sum
from tests.helpers import runs
from tests.helpers.mpirun import run_ranks
from tests.helpers.small_models import MLP, adamw, mlp_input, same_state
from tests.helpers.world import World

PARTS = 3
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def loss_of(model: nn.Module, rank: int, part: int) -> Tensor:
    """Not divided by anything."""
    loss: Tensor = model(mlp_input(10 * part + rank)).square().mean()
    return loss


def sum_in_order(terms: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One after another, as backward passes come."""
    total = dict(terms[0])
    for term in terms[1:]:
        total = {name: total[name] + term[name] for name in total}
    return total


def times_one_factor(ranks: list[dict[str, Tensor]], parts: int) -> dict[str, Tensor]:
    """The tree over ranks, then one product in fp32."""
    factor = torch.tensor(1.0 / (len(ranks) * parts), dtype=torch.float32)
    return {name: tree_sum([rank[name] for rank in ranks]) * factor for name in ranks[0]}


def plain_gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@STAGES
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
def test_gradient_is_the_sum_times_one_factor_bit_for_bit(world: World, stage, transport):
    plain = MLP()

    def of_rank(rank: int) -> dict[str, Tensor]:
        losses = [loss_of(plain, rank, part) for part in range(PARTS)]
        return sum_in_order([plain_gradients(plain, loss) for loss in losses])

    expected = times_one_factor([of_rank(rank) for rank in range(world.size)], PARTS)
    with world.mlp(adamw, stage=stage, transport=transport) as (model, _):
        for part in range(PARTS):
            with hpczero.accumulate(model, part, PARTS):
                loss_of(model, world.rank, part).backward()
        world.check(same_state(hpczero.full_gradients(model), expected))


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_bf16_takes_the_same_mean(world: World):
    # division of the loss by 4 is exact, so that both ways give the same bits
    found = []
    for divisor in (1, 4):
        with world.mlp(adamw, stage=3, precision="bf16") as (model, _):
            for part in range(4):
                accumulate = hpczero.accumulate(model, part, 4)
                no_sync = hpczero.no_sync(model) if part < 3 else nullcontext()
                with accumulate if divisor == 1 else no_sync:
                    (loss_of(model, world.rank, part) / divisor).backward()
            found.append(hpczero.full_gradients(model))
    world.check(same_state(*found))


# --- misuse


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_parts_out_of_range_or_order(world: World):
    model = MLP()
    optimizer = adamw(model)

    def run(part: int, parts: int) -> None:
        with hpczero.accumulate(model, part, parts):
            loss_of(model, world.rank, part).backward()

    with world.zeroified(model, optimizer, stage=3):
        for part, parts in ((3, 3), (-1, 3), (0, 0)):
            with pytest.raises(ConfigError, match=f"part {part} of {parts}, expected one of 0 to"):
                run(part, parts)
        run(0, 3)
        for part, parts in ((2, 3), (1, 4)):
            with pytest.raises(StepError, match="does not follow the part before"):
                run(part, parts)
        with pytest.raises(StepError, match=r"parts that were never completed.*zero_grad\(\)"):
            run(0, 3)
        world.raises(StepError, "never reduced", optimizer.step)
        world.check_trains(model, optimizer)
        with hpczero.no_sync(model):
            loss_of(model, world.rank, 0).backward()
        with pytest.raises(StepError, match=r"gradients of no_sync .* keep to one way"):
            run(0, 2)
        world.check_trains(model, optimizer)
        run(0, 2)
        with pytest.raises(StepError, match="of accumulate was to come"):
            loss_of(model, world.rank, 0).backward()
        optimizer.zero_grad()
        world.check_trains(model, optimizer)


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_other_factors_on_one_rank_are_refused(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        parts = 2 + world.rank
        for part in range(parts):
            with hpczero.accumulate(model, part, parts):
                loss_of(model, world.rank, part).backward()
        said = r"has gradients of 3 micro-batches .*where rank 0 has gradients of 2 micro-batches"
        world.raises(StepError, said, optimizer.step)
        optimizer.zero_grad()
        loss_of(model, world.rank, 0).backward()
        hpczero.clip_grad_norm_(model, 1.0 + world.rank)
        world.raises(StepError, "clipped with max_norm=2.0", optimizer.step)
        world.check_trains(model, optimizer)


# --- the training command

RECORDING = """
import sys, torch, hpczero, hpczero.train
from hpczero.data import Batches

folder, samples = sys.argv.pop(1), []
draw, clip = Batches.micro_batch, hpczero.clip_grad_norm_

def micro_batch(*args):
    samples.append(draw(*args))
    return samples[-1]

def record(model, max_norm):
    found = (samples, model.config, hpczero.full_state_dict(model), hpczero.full_gradients(model))
    torch.save(found, f"{folder}/rank{hpczero.sharding(model).topology.rank}.pt")
    return clip(model, max_norm)

Batches.micro_batch, hpczero.clip_grad_norm_ = micro_batch, record
sys.exit(hpczero.train.main())
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As each of three ranks on two cores: sums of kernels depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_training_command_multiplies_by_one_factor(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of the text\n" for i in range(300)))
    given = runs.options(
        tmp_path,
        model__layers=1,
        model__hidden=32,
        train__steps=1,
        train__micro_batch=1,
        train__accumulation=PARTS,
        data__path=tmp_path / "text.txt",
        data__cache=tmp_path,
    )
    run_ranks(3, ["-c", RECORDING, tmp_path, *given[2:]], timeout=100).ended()
    ranks, losses = [], []
    for rank in range(3):
        path = tmp_path / f"rank{rank}.pt"
        samples, config, values, found = torch.load(path, weights_only=False)
        if rank == 0:
            model = GPT(config)
            model.load_state_dict(values)
        parts = [model(*map(torch.from_numpy, part)) for part in samples]
        assert len(parts) == PARTS
        losses.append(sum((loss.detach() / PARTS).item() for loss in parts))
        ranks.append(sum_in_order([plain_gradients(model, loss) for loss in parts]))
    expected = times_one_factor(ranks, PARTS)
    assert same_state(found, expected)
    assert runs.losses(tmp_path) == [sum(losses) / 3]
