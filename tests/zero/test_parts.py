"""The update over long tensors: torch's result, torch's state between steps, and few calls."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hpczero.zero.update.optimizers import ELEMENTWISE
from tests.helpers.small_models import MLP, mlp_input, update
from tests.helpers.world import World
from tests.zero.parts_models import ADAM, Branches, groups_of, lengths_stepped_on, loss_of, train

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 3])
# Rates at which five steps change much, and nothing overflows.
RATES = {"Adadelta": 1.0, "Rprop": 0.01, "SGD": 0.05}


@STAGES
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("make", [MLP, Branches])
def test_every_known_optimizer_gives_torchs_result(world: World, stage, kind, make):
    model, plain = make(), make()
    options: dict[str, Any] = {"lr": RATES.get(kind.__name__, 0.01)}
    if "momentum" in kind.__init__.__annotations__:
        options["momentum"] = 0.9
    decays = "weight_decay" in kind.__init__.__annotations__
    make_optimizer: Any = kind
    optimizer, reference = (
        make_optimizer(groups_of(each) if decays else each.parameters(), **options)
        for each in (model, plain)
    )
    with world.zeroified(model, optimizer, stage=stage, transport="flat"):
        train(model, optimizer, world.own, range(5))
        train(plain, reference, range(world.size), range(5))
        # Signs of tiny gradients decide Rprop's steps.
        world.check_weights(model, plain, within=0.05 if kind.__name__ == "Rprop" else 2e-5)


@STAGES
def test_one_call_takes_as_many_tensors_as_units_have_groups(world: World, stage, monkeypatch):
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with world.zeroified(model, optimizer, stage=stage, transport="flat") as sharding:
        seen = lengths_stepped_on(monkeypatch)
        train(model, optimizer, world.own, range(2))
        held = [unit.optimized.master.numel() for unit in sharding.units if unit.shards]
    calls = [lengths for lengths in seen if lengths]
    ranks = world.size if stage == 0 else 1
    world.check(len(calls) == (2 if held else 0), f"{seen}")
    few = all(len(lengths) <= len(held) * ranks for lengths in calls)
    world.check(few, f"{calls}")


@STAGES
def test_state_between_steps_is_by_pieces_and_of_their_shapes(world: World, stage):
    model = Branches()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    with world.zeroified(model, optimizer, stage=stage, transport="flat"):
        train(model, optimizer, world.own, range(4))
        pieces = [p for group in optimizer.param_groups for p in group["params"]]
        keys = {id(key) for key in optimizer.state}
        world.check(keys == {id(p) for p in pieces})
        states = [(piece, optimizer.state[piece]) for piece in pieces]
        names = all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for _, state in states)
        world.check(names)
        shapes = all(state["exp_avg"].shape == piece.shape for piece, state in states)
        world.check(shapes)
        counts = [state["step"] for _, state in states]
        counted = all(count.dim() == 0 and float(count) in (2.0, 3.0, 4.0) for count in counts)
        world.check(counted, f"{counts}")


def test_a_step_that_raises_leaves_the_groups_as_they_were(world: World, monkeypatch):
    def broken(*args: Any, **options: Any) -> None:
        raise MemoryError("none left")

    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with world.zeroified(model, optimizer, stage=3, transport="flat"):
        before = [id(p) for p in optimizer.param_groups[0]["params"]]
        with monkeypatch.context() as patch:
            patch.setattr(ADAM, "adam", broken)
            with pytest.raises(MemoryError):
                train(model, optimizer, world.own, range(1))
        after = [id(p) for p in optimizer.param_groups[0]["params"]]
        world.check(before == after)
        keys = {id(key) for key in optimizer.state}
        world.check(keys <= set(after), "no long tensor stays a key")


def test_hook_that_comes_after_all_others_sees_the_pieces(world: World):
    seen: list[int] = []

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(sum(len(group["params"]) for group in optimizer.param_groups))

    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with world.zeroified(model, optimizer, stage=0, transport="flat"):
        torch.optim.Optimizer.register_step_pre_hook(optimizer, hook)
        train(model, optimizer, world.own, range(1))
        pieces = len(optimizer.param_groups[0]["params"])
        world.check(seen == [pieces] and pieces > 0, f"{seen} of {pieces}")


def test_step_that_somebody_has_patched_is_called(world: World, monkeypatch):
    calls: list[int] = []
    own = torch.optim.RAdam.step

    @functools.wraps(own)
    def timed(optimizer: torch.optim.RAdam, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return own(optimizer, *args, **options)

    model, plain = MLP(), MLP()
    monkeypatch.setattr(torch.optim.RAdam, "step", timed)
    optimizer, reference = (torch.optim.RAdam(m.parameters(), lr=0.01) for m in (model, plain))
    with world.zeroified(model, optimizer, stage=3, transport="flat"):
        train(model, optimizer, world.own, range(7))
        train(plain, reference, range(world.size), range(7))
        world.check_weights(model, plain, within=2e-5)
    world.check(len(calls) == 14, f"{len(calls)} calls")


def test_steps_in_inference_mode_are_torchs(world: World):
    model, plain = MLP(), MLP()
    optimizer, reference = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, plain))
    with world.zeroified(model, optimizer, stage=1, transport="flat"):
        for step in range(4):
            with torch.inference_mode(False):
                world.backward(
                    model, plain, lambda m, rank, n=step: loss_of(m, mlp_input(rank) + n, n)
                )
            with torch.inference_mode():
                update(optimizer, reference)
        world.check_weights(model, plain, within=2e-5)
