"""The host's own step on what rests in its memory: the bits of an update in memory, beside a device that is late.

The device is the late twin: what is copied without a wait behind it gives wrong bits. Its arithmetic is the host's, so
both sides round alike.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hpczero
from hpczero import Offload
from hpczero.errors import PlanError, StepError, TierError
from hpczero.tier.host import Opening
from hpczero.zero.units import away_shard
from tests.checkpoint.programs import state_digests
from tests.helpers import late
from tests.helpers.late import LateAccelerator
from tests.helpers.small_models import MLP, adamw, mlp_backward, same_state
from tests.helpers.world import World
from tests.zero.away_steps import SIZES, Maker, broken, check_bits, on, train, trained

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

MAKERS: dict[str, Maker] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adam foreach amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, amsgrad=True),
    "SGD fused momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, foreach=False),
    "Adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True),
}


def host(parts: int, **options: Any) -> Offload:
    return on("host", parts=parts, step="host", **options)


def late_bits(world: World, offload: Offload, make: Maker, **options: Any) -> None:
    """A training beside a late device gives the bits of memory."""
    check_bits(world, make, offload, device=LateAccelerator(), **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_bits_are_those_of_an_update_in_memory(world: World, parts, make, transport, precision):
    stage = 3 if parts == 3 else 1 + world.size % 3
    options = {"stage": stage, "transport": transport, "precision": precision}
    late_bits(world, host(parts), make, **options)


@pytest.mark.parametrize("fraction", [0.2, 0.6])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_both_sides_step_at_once(world: World, parts, precision, fraction):
    offload = host(parts, fraction=fraction)
    late_bits(world, offload, MAKERS["AdamW fused"], stage=3, precision=precision)


def test_on_the_host_itself_too(world: World):
    check_bits(world, MAKERS["AdamW fused"], host(3), stage=3, device="cpu")


@pytest.mark.parametrize("what", ["arrival of values", "arrival of gradients"])
def test_the_late_twin_sees_a_wait_that_is_missing(world: World, monkeypatch, what):
    """Else the tests above would prove nothing."""
    monkeypatch.setattr(late, "LATE_S", 20e-3)
    options: Any = {"stage": 2, "precision": "bf16", "device": LateAccelerator()}
    kept = trained(world, MAKERS["AdamW fused"], **options)
    if what == "arrival of values":
        monkeypatch.setattr(away_shard.Near, "settle", lambda self: None)
    else:
        monkeypatch.setattr(Opening, "wait", lambda self: self._staged)
    try:
        found = trained(world, MAKERS["AdamW fused"], offload=host(2), **options)
    except StepError as error:
        if "NaN or infinity" not in str(error):
            raise
        return  # memory that nothing reached yet may hold NaN, and every rank is told
    differ = world.comm.allreduce(not same_state(kept, found))
    world.check(differ > 0, "the same bits without the wait")


def test_an_implementation_that_nobody_chose_is_the_fused_one(world: World):
    nobody: Maker = lambda p: torch.optim.AdamW(p, lr=1e-2)  # noqa: E731
    options: Any = {"stage": 2, "device": LateAccelerator()}
    fused = trained(world, MAKERS["AdamW fused"], **options)
    loops = trained(world, nobody, **options)
    found = trained(world, nobody, offload=host(2), **options)
    world.check_state(found, fused)
    world.check(world.rank > 0 or not same_state(loops, found), "nothing was chosen")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_checkpoint_is_that_of_memory_and_goes_on(world: World, folder, parts, precision):
    options = {"stage": 3, "precision": precision}
    offload = host(parts, fraction=1.0 if parts > 1 else 0.6)
    files, ends = [], []
    for place, where in enumerate((None, offload)):
        model = MLP(SIZES)
        optimizer = adamw(model, fused=True)
        with world.zeroified(model, optimizer, device=LateAccelerator(), offload=where, **options):
            train(model, optimizer, world.rank, range(3))
            path = hpczero.checkpoint.Checkpoints(folder / str(place), model).save(3)
            world.comm.Barrier()
            files.append(state_digests(path))
            train(model, optimizer, world.rank, range(3, 6))
            ends.append(hpczero.full_state_dict(model))
    world.check(files[0] == files[1], "other bytes in the file")
    for place, where in ((0, offload), (1, None)):
        model = MLP(SIZES, seed=5)
        optimizer = adamw(model, fused=True)
        with world.zeroified(model, optimizer, device=LateAccelerator(), offload=where, **options):
            train(model, optimizer, world.rank, range(1))
            hpczero.checkpoint.load(folder / str(place), model)
            train(model, optimizer, world.rank, range(3, 6))
            ends.append(hpczero.full_state_dict(model))
    world.check(all(same_state(ends[0], end) for end in ends), "another end")


def test_values_that_a_program_changes_are_those_that_are_stepped_on(world: World):
    ends = []
    for offload in (None, host(2)):
        model = MLP(SIZES)
        optimizer = adamw(model, fused=True)
        with world.zeroified(model, optimizer, offload=offload, stage=3, device=LateAccelerator()):
            for _ in range(3):
                train(model, optimizer, world.rank, range(2))
                with hpczero.gathered(model, modifier_rank=0):
                    for parameter in model.parameters():
                        parameter.data.mul_(0.9)
            ends.append(hpczero.full_state_dict(model))
    world.check_state(*ends)


def test_a_gradient_that_does_not_come_down_is_one_error(world: World, folder):
    model = MLP(SIZES)
    optimizer = adamw(model)
    options: Any = {"stage": 3, "device": LateAccelerator(), "offload": host(2)}
    with world.zeroified(model, optimizer, **options) as sharding:
        train(model, optimizer, world.rank, range(1))
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(1)
        before = hpczero.full_state_dict(model)
        with broken(sharding, "_write", here=world.rank == world.size - 1):
            mlp_backward(model, world.rank)
            world.raises(TierError, "input/output error", optimizer.step)
        world.raises(StepError, "load a checkpoint", lambda: hpczero.full_state_dict(model))
        saved.load()
        world.check_state(hpczero.full_state_dict(model), before)
        optimizer.zero_grad()
        train(model, optimizer, world.rank, range(2))


@pytest.mark.parametrize(
    ("offload", "text"),
    [
        (Offload("disk", folder="anywhere", step="host"), "optimizer on host"),
        (Offload(step="host"), "optimizer on host"),
        (Offload("host", step="nobody"), "expected one of device, host"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_go_together_is_refused(world: World, offload, text):
    model = MLP()
    world.refuses(PlanError, text, model, adamw(model), offload=offload)
