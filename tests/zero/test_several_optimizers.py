"""Several optimizers over one model: plain torch's result, whichever steps when, and whoever's gradients are zeroed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.plan.offload import Offload
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, distance, zeroified
from tests.zero.several_models import (
    DIVISIONS,
    MODELS,
    STEPS,
    TOLERANCE,
    Side,
    by_shape,
    loss_of,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])

# --- loops, as a program writes them


def both(side: Side) -> Iterator[None]:
    first, *others = side.optimizers
    for step in range(STEPS):
        side.zero_grad()
        side.backward(step)
        for optimizer in (first, *others):
            optimizer.step()
        yield


def in_the_other_order(side: Side) -> Iterator[None]:
    for step in range(STEPS):
        side.backward(step)
        for optimizer in reversed(side.optimizers):
            optimizer.step()
        side.model.zero_grad()
        yield


def clipped_under_schedulers(side: Side) -> Iterator[None]:
    rates = [lambda step: 1 / (1 + step), lambda step: min(1.0, (1 + step) / 3)]
    schedulers = [
        LambdaLR(optimizer, [rates[place % 2]] * len(optimizer.param_groups))
        for place, optimizer in enumerate(side.optimizers)
    ]
    for step in range(STEPS):
        side.zero_grad()
        side.backward(step)
        side.clip(0.7)
        for optimizer, scheduler in zip(side.optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        yield


def one_every_second_time(side: Side) -> Iterator[None]:
    """The gradients of the other one add up meanwhile."""
    first, *others = side.optimizers
    for step in range(STEPS):
        first.zero_grad()
        side.backward(step)
        first.step()
        if step % 2:
            for optimizer in others:
                optimizer.step()
                optimizer.zero_grad()
        yield


def one_never_zeroed(side: Side) -> Iterator[None]:
    first, *others = side.optimizers
    for step in range(STEPS):
        first.zero_grad()
        side.backward(step)
        for optimizer in (*others, first):
            optimizer.step()
        yield


def by_turns(side: Side) -> Iterator[None]:
    """One steps on the gradients that the other one has left."""
    for step in range(STEPS):
        side.backward(step)
        stepped = side.optimizers[step % len(side.optimizers)]
        stepped.step()
        stepped.zero_grad()
        yield


def zeroed_in_place(side: Side) -> Iterator[None]:
    first, *others = side.optimizers
    for step in range(STEPS):
        side.backward(step)
        for optimizer in side.optimizers:
            optimizer.step()
        first.zero_grad(set_to_none=False)
        for optimizer in others:
            optimizer.zero_grad()
        first.step()  # on gradients of zero: momentum and decay go on
        for optimizer in others:
            optimizer.step()  # on none
        yield


def twice_on_one_backward(side: Side) -> Iterator[None]:
    first, *others = side.optimizers
    for step in range(STEPS):
        side.zero_grad()
        side.backward(step)
        first.step()
        for optimizer in others:
            optimizer.step()
        first.step()
        yield


def over_micro_batches(side: Side) -> Iterator[None]:
    for step in range(STEPS):
        side.zero_grad()
        with side.no_sync():
            side.backward(step)
        side.backward(step + 1)
        for optimizer in side.optimizers:
            optimizer.step()
        yield


def one_zeroed_between_micro_batches(side: Side) -> Iterator[None]:
    for step in range(STEPS):
        side.zero_grad()
        with side.no_sync():
            side.backward(step)
        side.optimizers[-1].zero_grad()
        side.backward(step + 1)
        for optimizer in side.optimizers:
            optimizer.step()
        yield


def clipped_apart(side: Side) -> Iterator[None]:
    """Each optimizer's gradients by a norm of their own, with torch's function over the model's parameters."""
    matrices = [p for p in side.model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in side.model.parameters() if p.requires_grad and p.dim() <= 1]
    for step in range(STEPS):
        side.zero_grad()
        side.backward(step)
        for optimizer, held in zip(side.optimizers, (matrices, vectors), strict=False):
            torch.nn.utils.clip_grad_norm_(held, 0.5)
            optimizer.step()
        for optimizer in side.optimizers[2:]:
            optimizer.step()
        yield


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
def test_a_loop_gives_torchs_result(
    comm: MPI.Intracomm,
    topology: Topology,
    make: Callable[[], nn.Module],
    divide: Callable[[nn.Module], tuple[Optimizer, ...]],
    loop: Callable[[Side], Iterator[None]],
    stage: int,
) -> None:
    model, plain = make(), make()
    sharded = Side(model, divide(model), range(comm.rank, comm.rank + 1), comm.size)
    whole = Side(plain, divide(plain), range(comm.size), comm.size)
    begin = {name: value.clone() for name, value in plain.state_dict().items()}
    with zeroified(model, sharded.optimizers, stage=stage, topology=topology):
        for step, _ in enumerate(zip(loop(sharded), loop(whole), strict=True)):
            with hpczero.gathered(model):
                worst = distance(model, plain)
            parallel_assert(comm, worst < TOLERANCE, f"step {step} differs by {worst} from torch")
    moved = (not torch.equal(v, begin[n]) for n, v in plain.named_parameters() if v.requires_grad)
    assert all(moved), "the loop trains every parameter"


@STAGES
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("transport", ["auto", "flat"])
def test_two_optimizers_of_one_kind_give_the_bits_of_one_with_two_groups(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    clip: float | None,
    precision: str,
    transport: str,
) -> None:
    model, other = MLP(), MLP()
    parts = [[p for p in each.parameters() if p.dim() > 1] for each in (model, other)]
    rest = [[p for p in each.parameters() if p.dim() == 1] for each in (model, other)]
    groups: list[dict[str, Any]] = [{"params": parts[0]}, {"params": rest[0], "lr": 1e-3}]
    one = AdamW(groups, lr=1e-2)
    two = AdamW(parts[1], lr=1e-2), AdamW(rest[1], lr=1e-3)
    options: dict[str, Any] = {"stage": stage, "topology": topology}
    options |= {"precision": precision, "transport": transport}
    with zeroified(model, one, **options), zeroified(other, two, **options):
        for step in range(STEPS):
            for each, optimizers in ((model, (one,)), (other, two)):
                loss_of(each, comm.rank, step).backward()
                if clip:
                    hpczero.clip_grad_norm_(each, clip)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        values = [hpczero.full_state_dict(each) for each in (model, other)]
    if values[0] is not None and values[1] is not None:
        differ = [
            name for name, value in values[0].items() if not torch.equal(value, values[1][name])
        ]
        assert not differ, f"other bits in {differ}"


def test_stages_give_the_same_bits(comm: MPI.Intracomm, topology: Topology) -> None:
    found = []
    for stage in range(4):
        model = MLP()
        side = Side(model, by_shape(model), range(comm.rank, comm.rank + 1), comm.size)
        with zeroified(model, side.optimizers, stage=stage, topology=topology):
            for _ in one_every_second_time(side):
                pass
            found.append(hpczero.full_state_dict(model))
    expected = found[0] or {}
    for values in found[1:]:
        same = (torch.equal(value, expected[name]) for name, value in (values or {}).items())
        assert all(same)


@STAGES
def test_state_of_each_comes_back_by_torchs_own_calls(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    found = []
    for stops in (False, True):
        model = MLP()
        side = Side(model, by_shape(model), range(comm.rank, comm.rank + 1), comm.size)
        with zeroified(model, side.optimizers, stage=stage, topology=topology):
            for step, _ in enumerate(both(side)):
                if stops and step == 2:
                    for optimizer in side.optimizers:
                        saved = optimizer.state_dict()
                        optimizer.load_state_dict(saved)
            found.append(hpczero.full_state_dict(model))
    if found[0] is not None and found[1] is not None:
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS.keys())
def test_what_rests_on_the_host_gives_the_same_bits(
    comm: MPI.Intracomm,
    topology: Topology,
    divide: Callable[[nn.Module], tuple[Optimizer, ...]],
    loop: Callable[[Side], Iterator[None]],
    stage: int,
) -> None:
    rests = Offload(
        optimizer="host", gradients="host", parameters="host" if stage == 3 else "device"
    )
    found = []
    for offload in (None, rests):
        model = MLP()
        side = Side(model, divide(model), range(comm.rank, comm.rank + 1), comm.size)
        with zeroified(model, side.optimizers, stage=stage, topology=topology, offload=offload):
            for _ in loop(side):
                pass
            found.append(hpczero.full_state_dict(model))
    near, away = found
    if near is not None and away is not None:
        differ = [name for name, value in near.items() if not torch.equal(value, away[name])]
        assert not differ, f"other bits in {differ}"
