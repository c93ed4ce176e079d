"""EMA and SWA of sharded weights are torch's, resume anywhere, and are never taken for the weights of training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import hpczero
from hpczero.errors import CheckpointMismatch, PlanError, StepError
from hpczero.optim import EMA, SWA
from tests.checkpoint.programs import first_ranks, state_digests
from tests.helpers.small_models import distance, same, update
from tests.helpers.world import World
from tests.optim.rules import Training, Zoo, trained

pytestmark = pytest.mark.mpi

AVERAGES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], AveragedModel]]] = {
    "ema": (
        lambda model: EMA(model, 0.8),
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)),
    ),
    "swa": (SWA, AveragedModel),
}


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    return (torch.optim.AdamW(trained(model), lr=0.01, eps=1e-4),)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", AVERAGES)
def test_the_average_is_torchs_and_the_weights_come_back(world: World, name, stage):
    ours, plain = Training(adamw, world.topology, stage=stage), Training(adamw, None)
    average, expected = AVERAGES[name][0](ours.model), AVERAGES[name][1](plain.model)
    for _ in range(3):
        ours.train(1)
        average.update()
        plain.train_as(world.size, 1)
        expected.update_parameters(plain.model)
    with average.applied(), hpczero.gathered(ours.model):
        apart = distance(ours.model, expected.module)
    world.check(apart < 1e-6, f"differs by {apart} from torch's")
    with average.applied():
        logits = ours.model(torch.arange(6)[None])
        wanted = expected.module(torch.arange(6)[None])
        world.check(torch.allclose(logits, wanted, atol=1e-5), "forward")
    ours.train(1)
    plain.train_as(world.size, 1)
    with hpczero.gathered(ours.model):
        apart = distance(ours.model, plain.model)
    ours.close()
    world.check(apart < 1e-6, f"training goes on {apart} away from torch's")


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore", "error:::hpczero")
@pytest.mark.parametrize("fails", [False, True])
def test_statistics_of_averages_are_torchs_and_end_with_the_block(world: World, fails):
    def normalised() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.linspace(-1, 3, 32).view(8, 4)).square().mean().backward()
        update(optimizer)

    def statistics(model: nn.Module) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in model.buffers()]

    batches = [torch.linspace(-2, 1, 32).view(8, 4), torch.linspace(0, 5, 32).view(8, 4)]
    plain, model = normalised(), normalised()
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hpczero.zeroify(model, optimizer, stage=3, topology=world.topology)
    average, expected = SWA(model), AveragedModel(plain)
    for _ in range(2):
        step(plain, reference)
        expected.update_parameters(plain)
        step(model, optimizer)
        average.update()
    update_bn(batches, expected)
    before, inside = statistics(model), []
    with suppress(ZeroDivisionError), average.applied():
        update_bn(batches, model)
        inside = statistics(model)
        world.comm.Barrier()  # a rank that leaves by an exception takes its part of the averages away at once
        if fails:
            raise ZeroDivisionError
    wanted = statistics(expected.module)
    after = statistics(model)
    hpczero.release(model)
    close = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(inside, wanted, strict=True))
    world.check(close, f"{inside} instead of {wanted}")
    world.check(same(after, before), f"{after} instead of {before}")


@pytest.mark.ranks(2)
def test_each_rank_keeps_its_part(world: World):
    for stage in (0, 3):
        training = Training(adamw, world.topology, stage=stage)
        average = EMA(training.model)
        memory = hpczero.sharding(training.model).memory
        held = sum(world.topology.gather(memory.current["averages"]))
        world.check(held == 4 * sum(p.numel() for p in trained(training.model)))
        average.close()
        world.check(memory.current["averages"] == 0)
        training.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("ranks", "stages"), [((3, 3), (3, 3)), ((3, 1), (1, 0)), ((1, 3), (0, 2))]
)
def test_any_ranks_and_stage_go_on(comm, folder, ranks, stages):
    found: list[dict[str, torch.Tensor]] = []
    for n, stage, resumes in zip(ranks, stages, (False, True), strict=True):
        with first_ranks(comm, n) as topology:
            if topology is None:
                continue
            training = Training(adamw, topology, stage=stage)
            averages = EMA(training.model, 0.7), SWA(training.model)
            if resumes:
                loaded = hpczero.checkpoint.load(folder / "0", training.model, training.optimizers)
                training.step = loaded.step
                assert [average.count for average in averages] == [2, 2]
            else:
                for _ in range(2):
                    training.train(1)
                    for average in averages:
                        average.update()
            place = folder / str(int(resumes))
            hpczero.checkpoint.save(place, training.model, training.optimizers, step=training.step)
            training.train(2)
            averages[0].update()
            with averages[0].applied():
                state = hpczero.full_state_dict(training.model)
            training.close()
            if state is not None:
                found.append(state)
    if comm.rank == 0:
        first, second = (folder / name / "step-000000002" for name in "01")
        digests = state_digests(first)
        assert {"/state/average.ema", "/state/average.swa"} <= digests.keys()
        assert digests == state_digests(second)
        apart = max(float((v - found[1][n]).abs().max()) for n, v in found[0].items())
        assert apart <= (0.0 if (ranks[0], stages[0]) == (ranks[1], stages[1]) else 1e-6)


@pytest.mark.ranks(2)
def test_a_checkpoint_with_an_average_wants_one_and_one_without_begins_anew(world: World, folder):
    training = Training(adamw, world.topology)
    model, optimizers = training.model, training.optimizers
    training.train(1)
    hpczero.checkpoint.save(folder / "without", model, optimizers, step=1)
    average = EMA(model)
    average.update()
    hpczero.checkpoint.save(folder / "with", model, optimizers, step=1)
    hpczero.checkpoint.load(folder / "without", model, optimizers)
    world.check(average.count == 0)
    average.close()

    def load() -> None:
        hpczero.checkpoint.load(folder / "with", model, optimizers)

    world.raises(CheckpointMismatch, "holds the average 'ema'", load)
    training.close()


@pytest.mark.ranks(2)
def test_what_would_mix_averages_and_weights_is_refused(world: World, folder):
    training = Training(adamw, world.topology)
    model, optimizers = training.model, training.optimizers
    average = EMA(model)
    world.raises(StepError, "has no weights yet", lambda: average.applied().__enter__())
    world.raises(PlanError, "name of an average: got 'ema'", lambda: EMA(model))
    training.train(1)
    average.update()

    def save() -> None:
        hpczero.checkpoint.save(folder, model, optimizers, step=1)

    with average.applied():
        world.raises(StepError, "a checkpoint inside of", save)
        world.raises(StepError, "optimizer.step.. inside of", lambda: training.train(1))
        optimizers[0].zero_grad()
        with pytest.raises(StepError, match="update it inside of"):
            average.update()
    training.train(1)
    training.close()


@pytest.mark.ranks(2)
def test_an_exception_on_one_rank_leaves_nobody_waiting_or_with_averages(world: World):
    training = Training(adamw, world.topology)
    average = SWA(training.model)
    training.train(1)
    average.update()
    training.train(1)
    with pytest.raises(ZeroDivisionError), average.applied():
        raise ZeroDivisionError
    with pytest.raises(StepError, match="load a checkpoint"):
        training.model(torch.arange(6)[None])
    training.close()


@pytest.mark.ranks(2)
def test_weights_on_a_tier_are_refused(world: World):
    model = Zoo()
    offload = hpczero.Offload("host", "host", "host")
    with world.zeroified(model, adamw(model), offload=offload):
        world.raises(PlanError, "rest on a memory tier", lambda: EMA(model))
