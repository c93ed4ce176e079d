"""The secondary copy: backward gathers parameters inside the node, never old ones, and no bit of a training changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hpczero
from hpczero.errors import ConfigError, PlanError
from tests.helpers.small_models import MLP, adamw, mlp_steps, same, tiny_gpt, tiny_tokens, update
from tests.helpers.world import World, on_nodes

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]


@pytest.fixture
def world(comm) -> Iterator[World]:
    """Two nodes where the ranks divide; else one rank on each."""
    on_node = 1 if comm.size % 2 else comm.size // 2
    with on_nodes(comm, [rank // on_node for rank in range(comm.size)]) as world:
        yield world


def step(model: Any, optimizer: Any, number: int, rank: int, micro: int = 1) -> list[torch.Tensor]:
    """Losses of one step over ``micro`` micro-batches, and the gradients that it takes."""
    losses = []
    for part in range(micro):
        tokens = tiny_tokens(100 * number + 10 * part + rank)
        with hpczero.accumulate(model, part, micro):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        losses.append(loss.detach())
    gradients = hpczero.full_gradients(model)
    update(optimizer)
    return [*losses, *gradients.values()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["window", "hierarchical"])
def test_a_training_keeps_every_bit(world: World, transport, precision):
    found: list[list[torch.Tensor]] = [[], []]
    for secondary in (False, True):
        options = {"transport": transport, "precision": precision, "secondary": secondary}
        with world.gpt(**options) as (model, optimizer, _):
            for number in range(4):
                found[secondary] += step(model, optimizer, number, world.rank, micro=2)
    world.check(same(*found))


def test_a_step_asks_other_nodes_once_for_each_unit(world: World):
    """The tied head is used last in forward and first in backward; all else is gathered twice without the copy."""
    counts: list[Counter[str]] = []
    sent: list[int] = []
    nodes = world.topology.num_nodes
    for secondary in (False, True):
        with world.gpt(secondary=secondary) as (model, optimizer, sharding):
            step(model, optimizer, 0, world.rank)
            stats = sharding.collectives.stats
            stats.reset()
            tokens = tiny_tokens(world.rank)
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            counts.append(Counter(stats.calls))
            sent.append(stats.sent_nbytes["all_gather"] + stats.sent_nbytes["regather"])
            units = sharding.units
            shards = {unit.spec.name: unit.spec.layout.shard_numel * 4 for unit in units}
            # The part that a rank has of its node's copy: of every unit as many shards as there are nodes.
            held = sharding.memory.current.get("secondary", 0)
            world.check(held == (nodes * sum(shards.values()) if secondary else 0), held)
    without, with_copy = counts
    again = without["all_gather"] - len(units)
    world.check(again > 0, without)
    world.check(with_copy["all_gather"] == len(units), with_copy)
    world.check(with_copy["regather"] == again, with_copy)
    spared = sum(shards.values()) - (shards["root"] if again < len(units) else 0)
    world.check(sent[0] - sent[1] == (nodes - 1) * spared, f"{sent}, {world.topology.local_size}")


@pytest.mark.parametrize("how", ["gathered", "load", "no step"])
def test_values_that_change_between_two_passes_are_not_the_old_ones(world: World, how, folder):
    found = []
    for secondary in (False, True):
        with world.gpt(secondary=secondary) as (model, optimizer, _):
            step(model, optimizer, 0, world.rank)
            saved = hpczero.checkpoint.save(folder / str(secondary), model, optimizer, step=1)
            step(model, optimizer, 1, world.rank)
            tokens = tiny_tokens(world.rank)
            with torch.no_grad():
                model(tokens[:, :-1])  # the copy is of these values
            if how == "gathered":
                with hpczero.gathered(model, modifier_rank=0), torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.5)
            elif how == "load":
                hpczero.checkpoint.load(saved, model, optimizer)
            found.append(step(model, optimizer, 2, world.rank))
    world.check(same(*found))


def test_a_unit_that_is_unfrozen_has_one_copy(world: World):
    held = []
    for late in (True, False):
        model = MLP()
        model.layers[1].requires_grad_(not late)
        optimizer = adamw(model)
        with world.zeroified(model, optimizer, secondary=True) as sharding:
            mlp_steps(model, optimizer, world.rank)
            model.layers[1].requires_grad_(True)
            mlp_steps(model, optimizer, world.rank, 2)
            held.append(sharding.memory.current["secondary"])
    world.check(held[0] == held[1], held)


@pytest.mark.ranks(4)
def test_beside_replicas(comm):
    """Two replicas of shards over two nodes each."""
    found: list[list[torch.Tensor]] = [[], []]
    with on_nodes(comm, [0, 1, 2, 3], mesh=hpczero.Mesh(replicate=2, shard=2)) as world:
        for secondary in (False, True):
            with world.gpt(secondary=secondary) as (model, optimizer, sharding):
                for number in range(3):
                    found[secondary] += step(model, optimizer, number, world.rank)
                calls = sharding.collectives.stats.calls
                world.check(bool(calls["regather"]) == secondary, calls)
        world.check(same(*found))


def test_what_cannot_have_one_is_refused(world: World):
    model = tiny_gpt()
    optimizer = adamw(model)
    world.refuses(PlanError, "use stage=3", model, optimizer, stage=2, secondary=True)
    flat = {"transport": "flat", "secondary": True}
    world.refuses(ConfigError, "the transport is flat", model, optimizer, **flat)
