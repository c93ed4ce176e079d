"""Units made whole ahead of their use: the forecast, what is held, and the same bits with it and without."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.zero.backward_schedule import Prefetch
from hpczero.zero.units.unit import Unit
from tests.helpers.small_models import adamw, tiny_tokens, update
from tests.helpers.world import on_nodes

A, B, C, D = ((cast(Unit, name),) for name in "ABCD")
NONE: tuple[Unit, ...] = ()
SIZES = {"vocab_size": 512, "context": 64, "layers": 5, "hidden": 64, "heads": 4}


def run_pass(prefetch: Prefetch, *modules: tuple[Unit, ...]) -> list[tuple[Unit, ...]]:
    prefetch.begin("forward")
    return [prefetch.next_after(units) for units in modules]


# The modules of a pass; those of the next; what is forecast after each, and what was not used.
FORECASTS = [
    ((A, B, C), (A, B, C), [B, C, NONE], []),
    (((*A, *B), NONE, (*C, *D)), ((*A, *B), NONE), [(*C, *D), NONE], [*C, *D]),
    ((A, A, B, A, C), (A, A, B, A, C), [B, NONE, A, C, NONE], []),
    ((A, B, C, D), (A, C, D), [B, NONE, NONE], [*B]),
]


@pytest.mark.parametrize(
    ("first", "second", "expected", "unused"),
    FORECASTS,
    ids=["the same", "all units of a module", "twice in a row counts once", "that departs"],
)
def test_forecast_of_a_pass_after_the_first(first, second, expected, unused):
    prefetch = Prefetch()
    assert run_pass(prefetch, *first) == [NONE] * len(first)
    assert prefetch.end() == []
    assert run_pass(prefetch, *second) == expected
    assert prefetch.end() == unused
    run_pass(prefetch, *second)
    prefetch.end()
    assert prefetch.next_after(second[0]) == NONE, "outside of a pass"


def test_forward_and_backward_have_forecasts_of_their_own():
    prefetch = Prefetch()
    run_pass(prefetch, A, B)
    prefetch.end()
    prefetch.begin("backward")
    assert prefetch.next_after(B) == NONE
    prefetch.end()
    assert run_pass(prefetch, A) == [B]


def test_pass_that_was_interrupted_is_forgotten():
    prefetch = Prefetch()
    run_pass(prefetch, A, B, C)
    prefetch.end()
    run_pass(prefetch, A)  # an exception; no end
    assert run_pass(prefetch, A, B) == [B, C]


class Fork(nn.Module):
    """Uses other blocks from call to call, and one of them twice; the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 13), nn.Tanh()) for _ in range(5))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.4, generator=generator)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        long, fork = (0, 1, 2, 3), (0, 2, 1, 4, 2)
        routes = (long, long, fork, fork, (3, 4), long)
        for index in routes[self.calls % len(routes)]:
            x = self.blocks[index](x)
        self.calls += 1
        return x.square().mean()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("transport", ["hierarchical", "window"])
def test_overlap_changes_no_bit_and_leaves_nothing_whole(comm, transport):
    if comm.size < 4 and transport == "window":
        pytest.skip("shared memory needs two ranks on a node")
    nodes = [0, 0, 1, 1] if comm.size == 4 else range(comm.size)
    found: dict[bool, Any] = {}
    with on_nodes(comm, nodes) as world:
        for overlap in (False, True):
            options = {"transport": transport, "overlap": overlap}
            model = Fork()
            optimizer, losses = adamw(model), []
            with world.zeroified(model, optimizer, **options) as sharding:
                for step in range(8):
                    torch.manual_seed(world.rank + step)
                    for _ in range(2):  # two forwards, one of them without a backward
                        loss = model(torch.randn(3, 13))
                    loss.backward()
                    update(optimizer)
                    losses.append(loss.item())
                    held = [u.spec.name for u in sharding.units if u.whole.state.name != "SHARDED"]
                    world.check(not held, f"step {step}: {held} are still whole")
                state = hpczero.full_state_dict(model) or {}
                found[overlap] = losses, {name: t.numpy().tobytes() for name, t in state.items()}
        world.check(found[False] == found[True], f"{found[False][0]}\n{found[True][0]}")


def plan_and_peak(sharding: hpczero.Sharding, model: nn.Module, optimizer: Any) -> tuple[Any, int]:
    """The plan, and what was most of whole units in the third of some steps."""
    batch = tiny_tokens(sharding.topology.rank)
    for _ in range(3):
        sharding.memory.reset_peak()
        model(batch, batch).backward()
        update(optimizer)
    plan = sharding.plan.memory(footprint=sharding.collectives.footprint)
    return plan, sharding.memory.peak.get("unsharded", 0)


@pytest.mark.mpi
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("transport", ["hierarchical", "window"])
def test_bytes_held_between_nodes_equal_the_plan(comm, stage, transport):
    if comm.size == 2 and transport == "window":
        pytest.skip("shared memory needs two ranks on a node")
    with (
        on_nodes(comm, [2 * rank // comm.size for rank in range(comm.size)]) as world,
        world.gpt(SIZES, stage=stage, transport=transport) as (model, optimizer, sharding),
    ):
        plan, peak = plan_and_peak(sharding, model, optimizer)
        world.check(sharding.collectives.footprint.overlap)
        # What is lent or gathered ahead may be back before the next is taken: never more than the plan, seldom as much.
        said = f"peak {peak}, plan {plan.unsharded}"
        world.check(peak <= 1.03 * plan.unsharded, said)
        world.check(stage < 3 or peak >= 0.5 * plan.unsharded, said)
        exchange = sharding.memory.current.get("exchange", 0)
        said = f"exchange {exchange}, plan {plan.exchange}"
        world.check(abs(exchange - plan.exchange) <= 0.03 * plan.exchange, said)


@pytest.mark.mpi
@pytest.mark.ranks(4)
def test_a_rank_whose_peer_is_late_holds_no_more_than_the_plan(comm):
    with (
        on_nodes(comm, [0, 0, 1, 1]) as world,
        world.gpt(SIZES, transport="window") as (model, optimizer, sharding),
    ):
        if world.topology.local_rank == 0:
            for module in model.modules():
                module.register_forward_hook(lambda *_: time.sleep(0.004))
        plan, peak = plan_and_peak(sharding, model, optimizer)
        world.check(peak <= 1.03 * plan.unsharded, f"peak {peak}, plan {plan.unsharded}")
