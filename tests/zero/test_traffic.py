"""Bytes and calls that really go to MPI in a step: 2Ψ(N-1)/N for stages 0 to 2, 3Ψ(N-1)/N for stage 3, plus padding.

Counted on the communicator itself, from the arguments of its calls, so neither the transport's accounts nor the plan
can hide or invent any.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.models import GPT
from hpczero.plan import TrafficPlan
from hpczero.zero.units.whole import UnitState
from tests.helpers.small_models import adamw, same, sgd, tiny_gpt, tiny_tokens, update
from tests.helpers.world import World, on_nodes

if TYPE_CHECKING:
    from hpczero import Sharding

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

OPERATIONS = ("all_gather", "reduce_scatter")
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
NARROWED = hpczero.Precision(param="fp32", reduce="bf16")  # gradients wider than what travels


@pytest.fixture(autouse=True)
def _no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed would duplicate the communicator that counts."""
    monkeypatch.setenv("HPCZERO_DISTRIBUTED", "0")


class Wire:
    """Calls and bytes that this rank gave to MPI for other ranks in collectives over the shards, or to agree."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def count(self, operation: str, nbytes: int) -> None:
        self.calls[operation] += 1
        self.nbytes[operation] += nbytes

    def clear(self) -> None:
        self.calls.clear()
        self.nbytes.clear()


@contextmanager
def counted(
    world: World, model: GPT | None = None, *, trains: bool = True, **options: Any
) -> Iterator[tuple[GPT, Any, Sharding, Wire]]:
    """A GPT sharded inside, over communicators that count; any call they do not know fails the test."""
    from mpi4py import MPI

    wire, model = Wire(), model or tiny_gpt()
    optimizer = adamw(model) if trains else None

    class Knowing(MPI.Intracomm):
        known: tuple[str, ...] = ()

        def __getattribute__(self, name: str) -> Any:
            if name[:1].isupper() and name not in ("Get_size", "Get_rank", *type(self).known):
                raise AssertionError(f"{name} is not counted")
            return super().__getattribute__(name)

    class Shard(Knowing):
        known = ("Allgather", "Alltoall")

        def Allgather(self, send: Any, receive: Any) -> None:
            _, count, block = receive  # each rank sends its own block to all others
            wire.count("all_gather", (self.size - 1) * count * block.size)
            super().Allgather(send, receive)

        def Alltoall(self, send: Any, receive: Any) -> None:
            _, count, block = send  # one block for each rank, its own stays
            wire.count("reduce_scatter", (self.size - 1) * count * block.size)
            super().Alltoall(send, receive)

    class All(Knowing):
        # the last: of calls that are new to ranks
        known = ("Allgather", "Allreduce", "Bcast", "Sendrecv")

        def Allgather(self, send: Any, receive: Any) -> None:
            wire.count("agreement", (self.size - 1) * send.nbytes)
            super().Allgather(send, receive)

        def Allreduce(self, send: Any, receive: Any, op: Any = MPI.SUM) -> None:
            wire.count("agreement", (self.size - 1) * receive.nbytes)
            super().Allreduce(send, receive, op)

        def Bcast(self, buffer: Any, root: int = 0) -> None:
            wire.count("broadcast", buffer[0].nbytes)
            super().Bcast(buffer, root)

    class Inside(Knowing):
        known = ("Allgather", "Split", "Iprobe", "Barrier")  # the others carry nothing

        def Allgather(self, send: Any, receive: Any) -> None:
            _, count, block = receive
            wire.count("inside", (self.size - 1) * count * block.size)
            super().Allgather(send, receive)

    ranks = world.topology.world
    counting = dataclasses.replace(
        ranks,
        ordered=Shard(ranks.ordered),
        comm=All(ranks.comm),
        node=Inside(ranks.node),
        rail=ranks.rail and Inside(ranks.rail),
    )
    groups: dict[str, Any] = dict.fromkeys(("world", "data", "shard", "data_sequence"), counting)
    topology: Any = dataclasses.replace(world.topology, **groups)
    how = {"topology": topology, "transport": "flat"} | options
    with world.zeroified(model, optimizer, **how) as state:
        yield model, optimizer, state, wire


def train_step(
    model: nn.Module,
    optimizer: Any,
    sharding: Sharding,
    *,
    micro_steps: int = 1,
    synced: int | None = None,
) -> None:
    """One optimizer step of ``micro_steps`` backwards, of which the last ``synced`` reduce."""
    tokens = tiny_tokens(sharding.topology.rank)
    synced = micro_steps if synced is None else synced
    for micro_step in range(micro_steps):
        with ExitStack() as stack:
            if micro_step < micro_steps - synced:
                stack.enter_context(hpczero.no_sync(model))
            model(tokens, tokens).backward()
    hpczero.clip_grad_norm_(model, 1.0)
    update(optimizer)


def check(
    world: World, wire: Wire, sharding: Sharding, plan: TrafficPlan, *, agreements: int = 2
) -> None:
    """What was counted is what the plan says and what the transport's accounts say."""
    calls = {"all_gather": plan.all_gathers, "reduce_scatter": plan.reduce_scatters}
    nbytes = {
        "all_gather": plan.all_gather_nbytes,
        "reduce_scatter": plan.reduce_scatter_nbytes,
    }
    said = f"{wire.calls} {wire.nbytes}, planned {plan}"
    world.check(all(wire.calls[op] == calls[op] for op in calls), said)
    world.check(all(wire.nbytes[op] == nbytes[op] for op in nbytes), said)
    world.check(wire.calls["broadcast"] == 0, said)
    world.check(agrees_shortly(world, wire, calls=agreements), said)
    accounts_equal_plan(world, sharding, plan)


def agrees_shortly(world: World, wire: Wire, *, calls: int = 2) -> bool:
    """Clip and step: the digits of a norm, and flags. Nothing that grows with the model or the ranks."""
    return wire.calls["agreement"] == calls and wire.nbytes["agreement"] < 640 * (world.size - 1)


def measured(model: nn.Module, optimizer: Any, sharding: Sharding, wire: Wire, **how: Any) -> None:
    """A step to warm up, then one that is counted."""
    train_step(model, optimizer, sharding, **how)
    wire.clear()
    sharding.collectives.stats.reset()
    train_step(model, optimizer, sharding, **how)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_moves_two_or_three_times_the_model_and_its_padding(world: World, stage, precision):
    options, size = {"stage": stage, "precision": precision}, world.size
    with counted(world, **options) as (model, optimizer, state, wire):
        psi, units = sum(p.numel() for p in model.parameters()), 1 + len(model.blocks)
        measured(model, optimizer, state, wire)
        padding = state.plan.padding_numel
        world.check(0 < padding < 64 * size * units, padding)
        # In elements. A replicated optimizer gathers reduced gradients, which are fp32 always.
        times, item = (3 if stage == 3 else 2), ITEMSIZE[precision]
        gathered = wire.nbytes["all_gather"] // (4 if stage == 0 else item)
        reduced = wire.nbytes["reduce_scatter"] // item
        expected = times * (psi + padding) * (size - 1)
        world.check((gathered + reduced) * size == expected, wire.nbytes)
        world.check(wire.calls["all_gather"] == (2 if stage == 3 else 1) * units)
        world.check(wire.calls["reduce_scatter"] == units)
        check(world, wire, state, state.plan.traffic())


@pytest.mark.parametrize(("micro_steps", "synced"), [(3, 3), (3, 1), (3, 2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_moves_what_the_plan_says(world: World, stage, micro_steps, synced):
    with counted(world, stage=stage, precision="bf16") as (model, optimizer, state, wire):
        how: dict[str, Any] = {"micro_steps": micro_steps, "synced": synced}
        measured(model, optimizer, state, wire, **how)
        check(world, wire, state, state.plan.traffic(**how))
        # by hand: reductions only where synced, and at stage 3 two gathers in every pass
        units = 1 + len(model.blocks)
        gathers = {0: synced, 1: 1, 2: 1, 3: 2 * micro_steps}[stage] * units
        world.check(wire.calls["reduce_scatter"] == synced * units, wire.calls)
        world.check(wire.calls["all_gather"] == gathers, wire.calls)


@pytest.mark.parametrize("transport", ["window", "ipc"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_shared_memory_of_a_node_sends_no_parameter(world: World, stage, precision, transport):
    options = {"stage": stage, "transport": transport, "precision": precision}
    with counted(world, **options) as (model, optimizer, state, wire):
        measured(model, optimizer, state, wire)
        said = f"{wire.calls} {wire.nbytes}; {state.collectives.stats}"
        world.check(agrees_shortly(world, wire), said)
        # Only a replicated optimizer gathers what is nobody's parameter: whole reduced gradients, in fp32.
        padded = sum(unit.layout.padded_numel for unit in state.plan.units)
        gathered = 4 * padded * (world.size - 1) // world.size if stage == 0 else 0
        world.check(wire.nbytes["inside"] == gathered, said)
        world.check(set(wire.nbytes) <= {"agreement", "inside"}, said)
        accounts_equal_plan(world, state)


def accounts_equal_plan(world: World, state: Sharding, plan: TrafficPlan | None = None) -> None:
    stats = state.collectives.stats
    plan = plan or state.plan.traffic(footprint=state.collectives.footprint)
    said = f"{stats}, planned {plan}"
    world.check(stats.calls["all_gather"] == plan.all_gathers, said)
    world.check(stats.calls["reduce_scatter"] == plan.reduce_scatters, said)
    world.check(stats.sent_nbytes["all_gather"] == plan.all_gather_nbytes, said)
    world.check(stats.sent_nbytes["reduce_scatter"] == plan.reduce_scatter_nbytes, said)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("transport", ["hierarchical", "window"])
@pytest.mark.parametrize(
    "precision",
    ["fp32", "bf16", pytest.param(NARROWED, marks=pytest.mark.ranks(2))],
    ids=["fp32", "bf16", "fp32 reduced in bf16"],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_between_two_nodes_the_accounts_are_the_plan(comm, stage, precision, transport):
    model, half = tiny_gpt(), comm.size // 2
    optimizer = adamw(model)
    options = {"stage": stage, "transport": transport, "precision": precision}
    with (
        on_nodes(comm, [0] * half + [1] * half) as world,
        world.zeroified(model, optimizer, **options) as state,
    ):
        train_step(model, optimizer, state)
        state.collectives.stats.reset()
        train_step(model, optimizer, state)
        accounts_equal_plan(world, state)
        # by hand: over the network goes every shard of the other node once per collective
        if transport == "window" and stage == 3 and precision == "fp32":
            shards = sum(unit.layout.shard_numel for unit in state.plan.units)
            found = sum(state.collectives.stats.sent_nbytes[op] for op in OPERATIONS)
            world.check(found == 3 * 4 * shards, f"{found}, {shards}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpointed_blocks_move_no_more(world: World, stage):
    made = tiny_gpt(checkpoint_activations=True)
    with counted(world, made, stage=stage) as (model, optimizer, state, wire):
        measured(model, optimizer, state, wire)
        check(world, wire, state, state.plan.traffic())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_blocks_are_not_reduced(world: World, stage):
    made = tiny_gpt()
    made.blocks[0].requires_grad_(False)
    with counted(world, made, stage=stage) as (model, optimizer, state, wire):
        measured(model, optimizer, state, wire)
        # one more in backward: whether a rank has unfrozen something
        check(world, wire, state, state.plan.traffic(), agreements=3)
        world.check(wire.calls["reduce_scatter"] == 2, wire.calls)


@pytest.mark.ranks(2)
def test_forward_without_gradients_gathers_once(world: World):
    with counted(world, trains=False) as (model, _, state, wire):
        wire.clear()
        with torch.no_grad():
            model(tiny_tokens(world.rank))
        padded = sum(unit.layout.padded_numel for unit in state.plan.units)
        world.check(wire.calls == {"all_gather": 3}, wire.calls)
        expected = 4 * padded * (world.size - 1) // world.size
        world.check(wire.nbytes["all_gather"] == expected, wire.nbytes)


def test_parameters_kept_whole_between_micro_batches_are_gathered_once(world: World):
    """As a pipeline stage needs it; values and gradients are those of parameters that come and go."""

    def trained(state: Sharding, wire: Wire, kept: Any, optimizer: torch.optim.Optimizer) -> int:
        for step in range(2):
            wire.clear()
            with kept():
                for micro in range(3):
                    model(tiny_tokens(world.rank + 10 * micro + 100 * step)).sum().backward()
            update(optimizer)
        whole = any(unit.whole.state is UnitState.WHOLE for unit in state.units)
        world.check(not whole, "nothing stays whole after a step")
        return wire.calls["all_gather"]

    calls, values = [], []
    for keeps in (False, True):
        with counted(world) as (model, optimizer, state, wire):
            assert state.schedule is not None
            kept = state.schedule.residence.keep_whole if keeps else nullcontext
            calls.append(trained(state, wire, kept, optimizer))
            values.append([unit.gather_values() for unit in state.units])
    units = len(values[0])
    world.check(calls[1] == units < calls[0], f"{calls} for {units} units")
    world.check(same(*values), "other bits")


def test_a_step_inside_gives_back_what_was_kept_whole(world: World):
    model, plain = tiny_gpt(), tiny_gpt()
    optimizer, reference = sgd(model), sgd(plain)
    with world.zeroified(model, optimizer, stage=3, transport="flat") as state:
        assert state.schedule is not None
        with state.schedule.residence.keep_whole():
            for step in range(3):
                model(tiny_tokens(world.rank + 10 * step)).mean().backward()
                update(optimizer)
        for step in range(3):
            for rank in range(world.size):
                (plain(tiny_tokens(rank + 10 * step)).mean() / world.size).backward()
            update(reference)
        world.check_weights(model, plain, within=1e-4)
