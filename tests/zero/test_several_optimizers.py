"""Several optimizers over one model: plain torch's result, whichever steps when, and whoever's gradients are zeroed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.plan.offload import Offload
from tests.helpers.small_models import MLP, distance, update
from tests.helpers.world import World
from tests.zero.several_models import DIVISIONS, MODELS, STEPS, TOLERANCE, Side, by_shape, loss_of

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])

# --- a step of a loop, as a program writes it


def both(side: Side, step: int) -> None:
    side.zero_grad()
    side.backward(step)
    side.step(*side.optimizers)


def in_the_other_order(side: Side, step: int) -> None:
    side.backward(step)
    side.step(*reversed(side.optimizers))
    side.model.zero_grad()


def clipped_under_schedulers(side: Side, step: int) -> None:
    if not step:
        rates = [lambda step: 1 / (1 + step), lambda step: min(1.0, (1 + step) / 3)]
        side.schedulers = [
            LambdaLR(optimizer, [rates[place % 2]] * len(optimizer.param_groups))
            for place, optimizer in enumerate(side.optimizers)
        ]
    side.zero_grad()
    side.backward(step)
    side.clip(0.7)
    side.step(*side.optimizers)
    for scheduler in side.schedulers:
        scheduler.step()


def one_every_second_time(side: Side, step: int) -> None:
    """The gradients of the other one add up meanwhile."""
    first, *others = side.optimizers
    first.zero_grad()
    side.backward(step)
    first.step()
    if step % 2:
        update(*others)


def one_never_zeroed(side: Side, step: int) -> None:
    first, *others = side.optimizers
    first.zero_grad()
    side.backward(step)
    side.step(*others, first)


def by_turns(side: Side, step: int) -> None:
    """One steps on the gradients that the other one has left."""
    side.backward(step)
    update(side.optimizers[step % len(side.optimizers)])


def zeroed_in_place(side: Side, step: int) -> None:
    first, *others = side.optimizers
    side.backward(step)
    side.step(*side.optimizers)
    first.zero_grad(set_to_none=False)
    for optimizer in others:
        optimizer.zero_grad()
    side.step(*side.optimizers)  # the first on gradients of zero: momentum and decay go on


def twice_on_one_backward(side: Side, step: int) -> None:
    side.zero_grad()
    side.backward(step)
    side.step(*side.optimizers, side.optimizers[0])


def over_micro_batches(side: Side, step: int) -> None:
    side.zero_grad()
    with side.no_sync():
        side.backward(step)
    side.backward(step + 1)
    side.step(*side.optimizers)


def one_zeroed_between_micro_batches(side: Side, step: int) -> None:
    side.zero_grad()
    with side.no_sync():
        side.backward(step)
    side.optimizers[-1].zero_grad()
    side.backward(step + 1)
    side.step(*side.optimizers)


def clipped_apart(side: Side, step: int) -> None:
    """Each optimizer's gradients by a norm of their own, with torch's function over the model's parameters."""
    trained = [p for p in side.model.parameters() if p.requires_grad]
    side.zero_grad()
    side.backward(step)
    for place, optimizer in enumerate(side.optimizers):
        if place < 2:  # the matrices, then the vectors
            held = [p for p in trained if (p.dim() > 1) == (place == 0)]
            torch.nn.utils.clip_grad_norm_(held, 0.5)
        optimizer.step()


LOOPS = (
    both,
    in_the_other_order,
    clipped_under_schedulers,
    one_every_second_time,
    one_never_zeroed,
    by_turns,
    zeroed_in_place,
    twice_on_one_backward,
    over_micro_batches,
    one_zeroed_between_micro_batches,
    clipped_apart,
)


@STAGES
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS.keys())
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_loop_gives_torchs_result(world: World, make, divide, loop, stage):
    model, plain = make(), make()
    sharded = Side(model, divide(model), world.own, world.size)
    whole = Side(plain, divide(plain), range(world.size), world.size)
    begin = {name: value.clone() for name, value in plain.state_dict().items()}
    with world.zeroified(model, sharded.optimizers, stage=stage):
        for step in range(STEPS):
            loop(sharded, step)
            loop(whole, step)
            with hpczero.gathered(model):
                worst = distance(model, plain)
            world.check(worst < TOLERANCE, f"step {step} differs by {worst} from torch")
    moved = (not torch.equal(v, begin[n]) for n, v in plain.named_parameters() if v.requires_grad)
    assert all(moved), "the loop trains every parameter"


@STAGES
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("transport", ["auto", "flat"])
def test_two_optimizers_are_as_one_with_two_groups(world: World, stage, clip, precision, transport):
    model, other = MLP(), MLP()
    parts = [[p for p in each.parameters() if p.dim() > 1] for each in (model, other)]
    rest = [[p for p in each.parameters() if p.dim() == 1] for each in (model, other)]
    groups: list[dict[str, Any]] = [{"params": parts[0]}, {"params": rest[0], "lr": 1e-3}]
    one = AdamW(groups, lr=1e-2)
    two = AdamW(parts[1], lr=1e-2), AdamW(rest[1], lr=1e-3)
    options: dict[str, Any] = {"stage": stage}
    options |= {"precision": precision, "transport": transport}
    with world.zeroified(model, one, **options), world.zeroified(other, two, **options):
        for step in range(STEPS):
            for each, optimizers in ((model, (one,)), (other, two)):
                loss_of(each, world.rank, step).backward()
                if clip:
                    hpczero.clip_grad_norm_(each, clip)
                update(*optimizers)
        values = [hpczero.full_state_dict(each) for each in (model, other)]
    world.check_state(*values)


def weights_after(
    world: World,
    divide: Callable[[nn.Module], tuple[Optimizer, ...]],
    loop: Callable[[Side, int], None],
    **options: Any,
) -> dict[str, Tensor] | None:
    model = MLP()
    side = Side(model, divide(model), world.own, world.size)
    with world.zeroified(model, side.optimizers, **options):
        for step in range(STEPS):
            loop(side, step)
        return hpczero.full_state_dict(model)


def test_stages_give_the_same_bits(world: World):
    found = [weights_after(world, by_shape, one_every_second_time, stage=n) for n in range(4)]
    for values in found[1:]:
        world.check_state(values, found[0])


@STAGES
def test_state_of_each_comes_back_by_torchs_own_calls(world: World, stage):
    def with_a_stop(side: Side, step: int) -> None:
        both(side, step)
        for optimizer in side.optimizers if step == 2 else ():
            optimizer.load_state_dict(optimizer.state_dict())

    expected = weights_after(world, by_shape, both, stage=stage)
    world.check_state(weights_after(world, by_shape, with_a_stop, stage=stage), expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS.keys())
def test_what_rests_on_the_host_gives_the_same_bits(world: World, divide, loop, stage):
    rests = Offload("host", "host", "host" if stage == 3 else "device")
    near = weights_after(world, divide, loop, stage=stage)
    world.check_state(weights_after(world, divide, loop, stage=stage, offload=rests), near)
