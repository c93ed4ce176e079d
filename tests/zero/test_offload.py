"""Offload: what rests elsewhere gives the bits of what stays; what cannot rest there is refused; bytes are as planned.

That every optimizer, model and loop of ``tests/equality`` gives the same bits from a tier is tested there, on 3 ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero import Offload
from hpczero.errors import PlanError, StepError
from tests.helpers.small_models import MLP, adamw, mlp_backward, mlp_steps, update
from tests.helpers.world import World
from tests.zero.away_steps import Maker, check_bits, on

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

RESTS = "rests on a memory tier"  # what is said of it
MAKERS: dict[str, Maker] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam foreach amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("medium", ["host", "disk"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_bits_are_those_of_memory(
    world: World, folder, parts, medium, make, transport, precision
):
    """Optimizer alone, with gradients, with parameters."""
    stage = 3 if parts == 3 else 1 + world.size % 3
    offload = on(medium, folder, parts, buffers=3 + parts)
    options = {"stage": stage, "transport": transport, "precision": precision}
    check_bits(world, make, offload, sizes=(7, 15, 15, 3), **options)


@pytest.mark.parametrize("window", [2**14, 2**16, 2**20])
@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_window_and_horizon_do_not_matter(world: World, folder, window, ahead):
    offload = on("disk", folder, window=window, ahead=ahead)
    check_bits(world, MAKERS["AdamW fused"], offload, stage=3)


@pytest.mark.parametrize("fraction", [0.0, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("medium", ["host", "disk"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_any_fraction_gives_the_bits_of_memory(
    world: World, folder, parts, medium, precision, fraction
):
    stage = 3 if parts == 3 else 1 + world.size % 3
    offload = on(medium, folder, parts, fraction=fraction)
    check_bits(world, MAKERS["AdamW fused"], offload, stage=stage, precision=precision)


def test_the_units_that_backward_reduces_last_stay_in_memory(world: World, folder):
    model = MLP((7, 31, 33, 3))
    optimizer = adamw(model)
    offload = on("host", folder, fraction=0.5)
    with world.zeroified(model, optimizer, stage=3, offload=offload) as sharding:
        away = [unit.away is not None for unit in sharding.units]
        assert away == sorted(away)
        sizes = [unit.spec.layout.numel for unit in sharding.units]
        gone = sum(size for size, there in zip(sizes, away, strict=True) if there)
        assert 0.5 <= gone / sum(sizes) < 1.0
        mlp_backward(model, world.rank)
        optimizer.step()
        for unit in sharding.units:
            for piece in unit.shards:
                if unit.away is None:
                    assert optimizer.state[piece]["exp_avg"].shape == piece.shape
                elif piece.numel():
                    with pytest.raises(StepError, match=RESTS):
                        optimizer.state[piece]["exp_avg"]
        optimizer.param_groups[0]["params"].append(optimizer.param_groups[0]["params"][0])
        mlp_backward(model, world.rank)
        world.raises(StepError, "every piece once", optimizer.step)


def test_nothing_of_a_shard_stays_in_memory_between_steps(world: World, folder):
    with world.mlp(adamw, stage=3, offload=on("disk", folder)) as (model, optimizer):
        sharding = hpczero.sharding(model)
        for _ in range(2):
            mlp_backward(model, world.rank)
            held = sharding.memory.current
            world.check(not held.get("gradients") and not held.get("parameters"), held)
            update(optimizer)
        states = [value for state in optimizer.state.values() for value in dict.values(state)]
        world.check(all(value.dim() == 0 for value in states), "more than counters")
        with torch._C.DisableTorchFunctionSubclass():
            pieces = optimizer.param_groups[0]["params"]
            held_nbytes = sum(piece.untyped_storage().nbytes() for piece in pieces)
        world.check(held_nbytes == 0, f"{held_nbytes} bytes of masters")
        world.check(not os.listdir(folder), "a file of the tier has a name")


def test_what_rests_elsewhere_is_not_read_by_accident(world: World, folder):
    with world.mlp(adamw, stage=3, offload=on("disk", folder)) as (model, optimizer):
        mlp_backward(model, world.rank)
        pieces = optimizer.param_groups[0]["params"]
        reads: list[Callable[[], object]] = [
            lambda: pieces[0] + 1,
            lambda: pieces[0].grad.mul_(2),
            lambda: repr(pieces[0]),
            lambda: torch._foreach_mul_([p.grad for p in pieces], 2.0),
            lambda: setattr(pieces[0], "grad", None),
        ]
        for read in reads if pieces else ():
            with pytest.raises(StepError, match=RESTS):
                read()
        optimizer.step()
        with pytest.raises(StepError, match=RESTS):
            optimizer.state_dict()


def test_torchs_own_clipping_and_scaling_work_where_gradients_rest_elsewhere(world: World, folder):
    found = []
    for offload in (None, on("disk", folder)):
        with world.mlp(adamw, stage=3, offload=offload) as (model, optimizer):
            for _ in range(3):
                mlp_backward(model, world.rank)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
                hpczero.clip_grad_norm_(model, 0.01, norm_type=float("inf"))
                update(optimizer)
            found.append(hpczero.full_state_dict(model))
    world.check_state(*found)


@pytest.mark.parametrize(
    ("stage", "offload", "text"),
    [
        (0, Offload("host"), "stage 1, 2 or 3"),
        (2, Offload("host", "host", "host"), "expected stage 3"),
        (3, Offload("disk"), "without a folder"),
        (3, Offload("device", "host"), "optimizer on the device"),
        (3, Offload("host", "disk"), "one medium"),
        (3, Offload("tape"), "expected one of device, host, disk"),  # type: ignore[arg-type]
        (3, Offload("host", window=100), "at least"),
    ],
)
def test_what_does_not_go_together_is_refused(world: World, stage, offload, text):
    model = MLP()
    world.refuses(PlanError, text, model, adamw(model), stage=stage, offload=offload)


@pytest.mark.parametrize("step", ["device", "host"])
def test_an_offload_that_saves_nothing_is_refused(world: World, step):
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.refuses(PlanError, "saves nothing", model, optimizer, offload=Offload("host", step=step))


def test_state_that_comes_later_is_refused_with_what_to_do(world: World, folder):
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with world.zeroified(model, optimizer, stage=3, offload=on("host", folder)):
        mlp_steps(model, optimizer, world.rank)
        optimizer.param_groups[0]["momentum"] = 0.9
        mlp_backward(model, world.rank)
        world.raises(StepError, "momentum", optimizer.step)


def test_a_released_model_leaves_no_piece_that_can_be_read(world: World, folder):
    with world.mlp(adamw, stage=3, offload=on("disk", folder)) as (model, optimizer):
        mlp_backward(model, world.rank)
        optimizer.step()
    pieces = [piece for piece in optimizer.param_groups[0]["params"] if piece.numel()]
    for read in (optimizer.step, *(piece.neg for piece in pieces)) if pieces else ():
        with pytest.raises(StepError, match=RESTS):
            read()


class Halves(nn.Module):
    """Two layers, of which the first is used on demand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(60, 61), nn.Linear(60, 61)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.second(x).square().mean()
        return y + self.first(x).mean() if both else y


def test_state_of_parameters_without_gradients_is_kept_too(world: World, folder):
    """The first unit has no gradient in the first steps, so some windows have state and others have none."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step + world.rank)
            model(torch.randn(3, 60), step > 3).backward()
            update(optimizer)

    kinds = [None, on("disk", folder)]
    weights = []
    for i, saving in enumerate(kinds):
        for j, loading in enumerate(kinds):
            model = Halves()
            optimizer = adamw(model)
            with world.zeroified(model, optimizer, stage=3, rule=lambda _: [], offload=saving):
                train(model, optimizer, range(3))
                hpczero.checkpoint.Checkpoints(folder / f"{i}{j}", model).save(3)
            model = Halves()
            optimizer = adamw(model)
            with world.zeroified(model, optimizer, stage=3, rule=lambda _: [], offload=loading):
                hpczero.checkpoint.load(folder / f"{i}{j}", model)
                train(model, optimizer, range(3, 6))
                weights.append(hpczero.full_state_dict(model))
    for found in weights:
        world.check_state(weights[0], found)
