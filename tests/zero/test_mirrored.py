"""Values in half precision beside the masters on a tier: the bits of a cast, never stale, half of a pass's bytes."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero import Precision
from hpczero.checkpoint import Checkpoints, exchange, held
from hpczero.errors import StepError, TierError
from hpczero.plan.precision import LossScale
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.away_shard import MIRROR, SPARE, VALUES
from tests.helpers.late import LateAccelerator
from tests.helpers.small_models import MLP, adamw, mlp_backward, same, squares, update, values
from tests.helpers.world import World
from tests.zero.away_steps import SIZES, WINDOW, broken, on, train

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

FP16 = Precision(param="fp16", loss_scale=LossScale(initial=8.0, growth_interval=3))
PRECISIONS: dict[str, Any] = {"bf16": Precision(param="bf16", nonfinite="skip"), "fp16": FP16}


HOST = on("host")


def check_mirrors(world: World, sharding: Sharding, when: object = "") -> None:
    """Every window has a mirror, which is what a cast of its values gives. Collective."""
    wrong, found = [], 0
    for unit in sharding.units:
        if unit.away is None:
            continue
        assert unit.away.mirrored
        store = unit.away.store
        store.make_room(SPARE)
        for place in unit.away.places:
            staged = store.tier.fetch(place, [VALUES, MIRROR]).wait()
            mirror = staged[MIRROR].view(unit.away.dtype_of(MIRROR))
            cast = staged[VALUES].view(torch.float32).to(mirror.dtype)
            if not torch.equal(mirror.view(torch.int16), cast.view(torch.int16)):
                wrong.append(place.record.name)
            store.tier.evict(staged, [])
            found += 1
    world.check(found and not wrong, f"{when}: of {found} windows: {wrong}")


def poison(model: nn.Module, rank: int) -> None:
    """A backward whose gradient overflows."""
    (squares(model, rank) * math.inf).backward()


def backward(model: nn.Module, rank: int) -> Tensor:
    loss = squares(model, rank)
    loss.backward()
    return loss.detach()


def trained(world: World, precision: Any, **options: Any) -> list[Any]:
    """Losses, and values after steps with all that a loop may do between them."""
    model = MLP(SIZES)
    options = {"stage": 3, "precision": precision, **options}
    if options["transport"] != "window":  # whose memory is the host's
        options["device"] = LateAccelerator()
    found: list[Any] = []
    with world.zeroified(model, adamw(model, fused=True), **options) as sharding:
        (optimizer,) = sharding.optimizers
        for step in range(8):
            if step % 3 == 1:
                with hpczero.no_sync(model):
                    backward(model, world.rank)
            elif step % 3 == 2:
                backward(model, world.rank)
            found.append(backward(model, world.rank))
            if step == 4:
                poison(model, world.rank)
            hpczero.clip_grad_norm_(model, 0.05)
            update(optimizer)
            if step == 5:
                with hpczero.gathered(model, modifier_rank=0), torch.no_grad():
                    next(model.parameters())[:3].mul_(1.7)
            if sharding.away.store is not None:
                check_mirrors(world, sharding, f"step {step}")
        assert sharding.skipped_steps == 1
        with torch.no_grad():
            found.append(squares(model, world.rank))
        found += values(sharding)
    return found


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS.keys())
@pytest.mark.parametrize("medium", ["host", "disk", "host's step"])
@pytest.mark.parametrize("transport", ["auto", "flat", "window"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_the_bits_are_those_of_memory(world: World, folder, fraction, transport, medium, precision):
    """Accumulation, clipping, a skipped step, values changed inside of gathered; beside a device that is late."""
    kept = trained(world, precision, transport=transport)
    step: Any = "host" if medium == "host's step" else "device"
    where = "disk" if medium == "disk" else "host"
    offload = on(where, folder, fraction=fraction, step=step)
    found = trained(world, precision, transport=transport, offload=offload)
    world.check(same(kept, found), "other bits")


class Partly(nn.Module):
    """A frozen block, a block of which one parameter is frozen, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(61, 61) for _ in range(4))
        self.layers[0].requires_grad_(False)
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: Tensor, most: int) -> Tensor:
        for layer in self.layers[:most]:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS.keys())
def test_frozen_and_unused_parameters_keep_what_they_are(world: World, precision):
    ended = []
    for offload in (None, HOST):
        model = Partly()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        options = {"offload": offload, "stage": 3, "precision": precision}
        with world.zeroified(model, optimizer, **options) as sharding:
            for step in range(5):
                torch.manual_seed(10 * step + world.rank)
                model(torch.randn(3, 61), 3 + step % 2).square().mean().backward()
                update(optimizer)
                if offload is not None:
                    check_mirrors(world, sharding, step)
            ended.append(values(sharding))
    world.check(same(*ended), "other bits")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("step", ["device", "host"])
def test_what_is_loaded_or_imported_is_mirrored(world: World, folder, monkeypatch, step, precision):
    """Many rounds, and windows that are closed before all of their elements have passed."""
    monkeypatch.setattr(exchange, "ROUND_NBYTES", 3000)
    monkeypatch.setattr(held, "OPEN_NBYTES", WINDOW // 2)
    options: dict[str, Any] = {"stage": 3, "precision": precision}
    model = MLP(SIZES)
    with world.zeroified(model, adamw(model), **options) as sharding:
        mlp_backward(model, world.rank)
        next(iter(sharding.optimizers)).step()
        Checkpoints(folder / "saved", model).save(1)
        expected = values(sharding)
        state = hpczero.full_state_dict(model)
    if world.rank == 0:
        torch.save(state, folder / "weights.pt")
    world.comm.Barrier()
    offload = on("host", step=step)
    for imports in (False, True):
        model = MLP(SIZES, seed=8)
        with world.zeroified(model, adamw(model), offload=offload, **options) as sharding:
            mlp_backward(model, world.rank)
            (optimizer,) = sharding.optimizers
            optimizer.step()
            if imports:
                hpczero.checkpoint.import_weights(folder / "weights.pt", model)
            else:
                hpczero.checkpoint.load(folder / "saved", model)
            check_mirrors(world, sharding)
            world.check(same(values(sharding), expected))
            with hpczero.gathered(model):
                whole = [p.detach().reshape(-1).clone() for p in model.parameters()]
            cast = [v.to(whole[0].dtype) for v in expected]
            world.check(torch.equal(torch.cat(whole), torch.cat(cast)), "in a pass")


def test_values_that_are_no_number_are_those_of_a_cast_and_no_mark(world: World):
    """The first elements of shards are where a failed tier leaves its mark."""
    for precision in ("bf16", "fp16"):
        model = MLP(SIZES)
        options = {"offload": HOST, "stage": 3, "precision": precision}
        with world.zeroified(model, adamw(model), **options) as sharding:
            for unit in sharding.units:
                with unit.owned_values(changes=True) as here:
                    bits = here.view(torch.int32)
                    for place, pattern in enumerate((0x7FC12345, -1, 0x7F800001, 0x7FFFFFFF)):
                        bits[place :: max(len(bits) // 5, 1)] = pattern
                unit.publish()
            check_mirrors(world, sharding, precision)
            with hpczero.gathered(model):
                lost = sum(int(p.detach().isnan().sum()) for p in model.parameters())
            world.check(lost, "no NaN was left")


def mirrors_fail(sharding: Sharding, *, here: bool) -> AbstractContextManager[None]:
    """Writes of mirrors, and of nothing else, fail inside, where ``here``."""
    shards = [unit.away for unit in sharding.units if unit.away is not None]
    begins = {place.offsets[MIRROR] for shard in shards for place in shard.places}
    return broken(sharding, "_write", here=here, when=lambda _, offset: offset in begins)


@pytest.mark.parametrize("medium", ["host", "disk"])
def test_a_mirror_that_cannot_be_written_is_one_error(world: World, folder, medium):
    """In a step, in a change of values, and in a load."""
    model = MLP(SIZES)
    (folder / "scratch").mkdir(exist_ok=True)
    offload = on(medium, folder / "scratch")
    here = world.rank == world.size - 1
    options = {"offload": offload, "stage": 3, "precision": "bf16"}
    with world.zeroified(model, adamw(model), **options) as sharding:
        (optimizer,) = sharding.optimizers
        train(model, optimizer, world.rank, range(1))
        saved = Checkpoints(folder, model)
        saved.save(1)
        before = values(sharding)

        mlp_backward(model, world.rank)
        with mirrors_fail(sharding, here=here):
            world.raises(TierError, "input/output error", optimizer.step)
        world.raises(StepError, "load a checkpoint", lambda: hpczero.full_state_dict(model))
        with mirrors_fail(sharding, here=here):
            world.raises(TierError, "input/output error", saved.load)
        world.raises(StepError, "load a checkpoint", lambda: hpczero.full_state_dict(model))
        saved.load()
        check_mirrors(world, sharding)
        world.check(same(values(sharding), before), "not what was saved")

        with (
            mirrors_fail(sharding, here=here),
            hpczero.gathered(model, modifier_rank=0),
            torch.no_grad(),
        ):
            next(model.parameters()).add_(1)  # is written after this, and told when it is read
        world.raises(TierError, "", lambda: mlp_backward(model, world.rank))
        optimizer.zero_grad()
        saved.load()
        check_mirrors(world, sharding)
        mlp_backward(model, world.rank)
        optimizer.step()
        check_mirrors(world, sharding)


def test_what_was_begun_ahead_or_is_forgotten_is_never_read(world: World):
    model = MLP(SIZES)
    with world.zeroified(model, adamw(model), offload=HOST, stage=3, precision="bf16") as sharding:
        for unit in sharding.units:
            assert unit.away is not None
            found = torch.empty(unit.spec.layout.shard_numel, dtype=torch.bfloat16)
            unit.rest.start()
            unit.rest.write(torch.full(found.shape, 0.7))
            unit.rest.read(found)
            world.check(torch.equal(found, torch.full_like(found, 0.7)), "of before")
            unit.away.drop([VALUES])
            left = [part for part in (VALUES, MIRROR) if unit.away.has(part)]
            world.check(not left, f"{left}")


def test_values_are_read_where_a_step_that_was_cut_off_left_no_mirror(world: World):
    model = MLP(SIZES)
    with world.zeroified(model, adamw(model), offload=HOST, stage=3, precision="bf16") as sharding:
        for unit in sharding.units:
            assert unit.away is not None
            found = torch.empty(unit.spec.layout.shard_numel, dtype=torch.bfloat16)
            unit.rest.read(found)
            tier, place = unit.away.store.tier, unit.away.places[0]
            tier.evict(tier.fetch(place, [VALUES], fresh=[MIRROR]).wait(), [])
            again = torch.zeros_like(found)
            unit.rest.start()
            unit.rest.read(again)
            world.check(torch.equal(found, again), unit.spec.name)
