"""What is kept of a parameter after ``gathered`` stays what it was there, whatever it is a view of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from tests.helpers.small_models import MLP, adamw, mlp_input
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])

NAME = "layers.1.0.weight"
KEPT: dict[str, Callable[[nn.Module], Any]] = {
    "detach": lambda model: model.get_parameter(NAME).detach(),
    "data": lambda model: model.get_parameter(NAME).data,
    "view": lambda model: model.get_parameter(NAME).detach().view(-1)[3:].view(2, -1),
    "numpy": lambda model: model.get_parameter(NAME).detach().numpy(),
    "state_dict": lambda model: model.state_dict()[NAME],
    "state_dict of a unit": lambda model: model.get_submodule("layers.1").state_dict()["0.weight"],
    "state_dict inside one": lambda model: model.get_submodule("layers.1.0").state_dict()["weight"],
}


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_what_is_kept_can_be_read_afterwards(world: World, stage, transport, keep):
    model = MLP()
    expected = torch.as_tensor(keep(MLP())).clone()
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage, transport=transport) as sharding:
        with hpczero.gathered(model):
            kept = keep(model)
        world.check(torch.equal(torch.as_tensor(kept), expected))
        world.check(sharding.memory.current.get("unsharded", 0) == 0, "memory is held")
        world.check_trains(model, optimizer)
        if stage == 3:  # below, parameters stay where they are, as in plain torch
            world.check(torch.equal(torch.as_tensor(kept), expected), "it changed")


@pytest.mark.parametrize("transport", ["flat", "hierarchical"])  # window: memory of all ranks
def test_array_kept_of_a_forward_does_not_hold_the_unit(world: World, transport):
    model, arrays = MLP(), []
    optimizer = adamw(model)
    keep = lambda module, *_: arrays.append(module[0].weight.detach().numpy())  # noqa: E731
    handle = model.layers[1].register_forward_hook(keep)
    with world.zeroified(model, optimizer, stage=3, transport=transport) as sharding:
        model(mlp_input(world.rank)).sum().backward()
        handle.remove()
        world.check(sharding.memory.current.get("unsharded", 0) == 0, "memory is held")
        expected = MLP().get_parameter(NAME).detach()
        world.check(torch.equal(torch.as_tensor(arrays[0]), expected))
        world.check_trains(model, optimizer)


@STAGES
@TRANSPORTS
def test_state_dict_shows_the_parameters_themselves(world: World, stage, transport):
    # as in plain torch, where writing into it is a way to set parameters
    with world.mlp(adamw, stage=stage, transport=transport) as (model, _):
        with hpczero.gathered(model, modifier_rank=0):
            model.state_dict()[NAME].fill_(0.25)
        state = hpczero.full_state_dict(model)
        world.check(state is None or bool((state[NAME] == 0.25).all()))


@TRANSPORTS
def test_graph_that_was_begun_before_or_inside_gathered(world: World, transport):
    x, plain = mlp_input(0), MLP()
    (plain(x).square().sum() + plain(2 * x).square().sum()).backward()
    with world.mlp(adamw, stage=3, transport=transport) as (model, optimizer):
        before = model(x).square().sum()
        with hpczero.gathered(model):
            inside = model(2 * x).square().sum()
        (before + inside).backward()
        world.check_gradients(model, plain)
        world.check_trains(model, optimizer)


class Table(nn.Module):
    """Returns views of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(21.0).view(7, 3))

    def forward(self, n: int) -> list[Tensor]:
        return [self.rows[:n], self.rows.detach().expand(2, -1, -1)]


class Lookup(nn.Module):
    """Uses them when the block has run; gives them away too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Table(), nn.Linear(3, 3), Table()))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        views = self.blocks[0](2)
        x = self.blocks[1](x + views[0])
        return x * views[1][0, :2] + self.blocks[2](2)[0], views


@pytest.mark.parametrize("nodes", [1, 2])
@TRANSPORTS
def test_view_that_a_block_returns_can_be_used_without_gradients(comm, transport, nodes):
    if comm.size % nodes or (transport == "window" and nodes > 1):
        pytest.skip("needs another number of ranks")
    places = [rank * nodes // comm.size for rank in range(comm.size)]
    world = World(comm, hpczero.Topology.create(comm, places))
    plain, model = Lookup(), Lookup()
    model.load_state_dict(plain.state_dict())
    x = torch.ones(2, 3)
    state = world.comm.bcast(plain.state_dict(), root=0)
    plain.load_state_dict(state)
    options: dict[str, Any] = {"stage": 3, "transport": transport}
    options["rule"] = lambda _: [(f"blocks.{place}",) for place in range(3)]
    with world.zeroified(model, adamw(model), **options) as sharding, torch.no_grad():
        for _ in range(2):
            world.check(torch.allclose(model(x)[0], plain(x)[0]))
            alone = model.blocks[0](3)
            if transport != "hierarchical" or nodes == 1:  # else it may lie in memory of the node
                world.check(torch.equal(alone[0], Table()(3)[0]), "called alone")
        world.check(sharding.memory.current.get("unsharded", 0) == 0, "memory is held")
    world.topology.free()


@TRANSPORTS
@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_graph_of_parameters_outlives_gathered(world: World, transport, modifier_rank):
    def penalty(model: nn.Module) -> Tensor:
        if modifier_rank is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        squares = [parameter.square().sum() for parameter in model.parameters()]
        return torch.stack([*squares, (model.get_parameter(NAME).t() * 2).exp().sum()]).sum()

    model, plain = MLP(), MLP()
    penalty(plain).backward()
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=3, transport=transport) as sharding:
        with hpczero.gathered(model, modifier_rank=modifier_rank):
            loss = penalty(model)
            kept = model.get_parameter(NAME).detach()
        loss.backward()
        world.check_gradients(model, plain)
        before = plain.get_parameter(NAME).detach()
        optimizer.step()
        world.check(sharding.memory.current.get("unsharded", 0) == 0, "memory is held")
        if transport != "window":
            world.check(torch.equal(kept, before), "what was kept changed")
        world.check_trains(model, optimizer)


@TRANSPORTS
def test_graph_that_one_rank_keeps_is_waited_for_by_all(world: World, transport):
    with world.mlp(adamw, stage=3, transport=transport) as (model, optimizer):
        with hpczero.gathered(model):
            loss = next(model.parameters()).sum()
        if world.rank:
            del loss  # logged on rank 0 alone
        world.check_trains(model, optimizer)


def test_graph_from_before_gathered_does_not_hold_units(world: World):
    with world.mlp(adamw, stage=3, transport="flat") as (model, _):
        sharding = hpczero.sharding(model)
        loss = model(mlp_input(world.rank)).sum()
        loss.backward()
        with hpczero.gathered(model):
            model.state_dict()
        held = sharding.memory.current.get("unsharded", 0)
        world.check(held == 0, f"{loss} is old, and {held} bytes stay")
