"""Training on nodes with different numbers of ranks: the bits of flat, and the bytes of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import hpczero
from hpczero import Sharding
from tests.helpers.small_models import tiny_tokens, update
from tests.helpers.world import World, on_nodes

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3, 4, 5)]

NODES = {3: [0, 0, 1], 4: [0, 0, 0, 1], 5: [0, 0, 1, 1, 2]}
OPERATIONS = ("all_gather", "reduce_scatter")


@pytest.fixture
def world(comm) -> Iterator[World]:
    """On nodes with different numbers of ranks."""
    with on_nodes(comm, NODES[comm.size]) as world:
        yield world


def trained(sharding: Sharding, model: Any, optimizer: Any, steps: int = 3) -> list[bytes]:
    """Losses and gathered weights after some steps, as bytes."""
    found = []
    for step in range(steps):
        tokens = tiny_tokens(sharding.topology.rank + 10 * step)
        loss = model(tokens, tokens)
        loss.backward()
        found.append(loss.detach().numpy().tobytes())
        hpczero.clip_grad_norm_(model, 1.0)
        update(optimizer)
    state = hpczero.full_state_dict(model) or {}
    return found + [value.numpy().tobytes() for value in state.values()]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_transport_trains_to_the_bits_of_flat(world: World, stage, precision):
    found = {}
    for transport in ("flat", "hierarchical", "window", "auto"):
        options = {"transport": transport, "stage": stage, "precision": precision}
        with world.gpt(**options) as (model, optimizer, sharding):
            found[transport] = trained(sharding, model, optimizer)
    odd = [name for name, bits in found.items() if bits != found["flat"]]
    world.check(not odd, f"{odd} differ from flat")


def settle(model: nn.Module, stage: int) -> None:
    """Wait for what a step has left on its way; at stage 3 nothing is."""
    if stage < 3:
        for parameter in model.parameters():
            parameter.detach()


@pytest.mark.parametrize("transport", ["hierarchical", "window"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_and_messages_between_nodes_are_the_plan(world: World, stage, precision, transport):
    options = {"transport": transport, "stage": stage, "precision": precision}
    with world.gpt(**options) as (model, optimizer, sharding):
        trained(sharding, model, optimizer, steps=1)
        between: Any = sharding.collectives
        settle(model, stage)
        before = sum(between._rails.messages)
        between.stats.reset()
        tokens = tiny_tokens(world.rank)
        model(tokens, tokens).backward()
        optimizer.step()
        settle(model, stage)
        footprint = between.footprint
        plan = sharding.plan.traffic(footprint=footprint)
        stats, said = between.stats, f"{between.stats}, planned {plan}"
        world.check(stats.calls["all_gather"] == plan.all_gathers, said)
        world.check(stats.sent_nbytes["all_gather"] == plan.all_gather_nbytes, said)
        world.check(stats.sent_nbytes["reduce_scatter"] == plan.reduce_scatter_nbytes, said)
        sent = sum(between._rails.messages) - before
        world.check(sent == plan.messages, f"{sent} messages; {said}")
        if transport == "window" and stage == 2 and precision == "fp32":
            # By hand: over the network goes what a node lacks, once in each direction; nothing else is sent.
            shards = sum(unit.layout.shard_numel for unit in sharding.plan.units)
            nodes, mine = world.topology.num_nodes, world.topology.world.local_size
            expected = 4 * shards * ((nodes - 1) * mine + world.size - mine)
            mine = sum(stats.sent_nbytes[o] for o in OPERATIONS)
            found = world.topology.world.node.allreduce(mine)
            world.check(found == expected, f"{found}, {expected}")


@pytest.mark.parametrize("transport", ["hierarchical", "window"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_held_are_the_plan(world: World, stage, precision, transport):
    tokens = tiny_tokens(world.rank)
    sizes = {"vocab_size": 512, "context": 64, "layers": 4, "hidden": 64, "heads": 4}
    options = {"transport": transport, "stage": stage, "precision": precision}
    with world.gpt(sizes, **options) as (model, optimizer, sharding):
        for _ in range(3):
            sharding.memory.reset_peak()
            optimizer.zero_grad()
            model(tokens, tokens).backward()
            optimizer.step()
        plan = sharding.plan.memory(footprint=sharding.collectives.footprint)
        held, peak = sharding.memory.current, sharding.memory.peak.get("unsharded", 0)
        kinds = ("parameters", "master", "gradients")
        pairs = {kind: (held.get(kind, 0), getattr(plan, kind)) for kind in kinds}
        world.check(all(a == b for a, b in pairs.values()), f"held and planned: {pairs}")
        exchange, said = held.get("exchange", 0), f"{dict(held)}, planned {plan}"
        if transport == "hierarchical":
            world.check(exchange == plan.exchange, said)
        else:  # places begin at pages
            world.check(0 <= exchange - plan.exchange <= 0.03 * plan.exchange, said)
        world.check(peak <= 1.03 * plan.unsharded, f"peak {peak}, planned {plan}")
