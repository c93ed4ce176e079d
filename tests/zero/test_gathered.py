"""Whole parameters outside the model: read, and changed on one rank for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import ConfigError, StepError
from tests.helpers.small_models import MLP, adamw, mlp_input, mlp_steps, same_state
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "flat"])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def masters(model: nn.Module) -> dict[str, Tensor]:
    """fp32 values by name on every rank. Collective."""
    return {
        slot.name: flat[slot.offset : slot.stop].view(slot.shape)
        for unit in hpczero.sharding(model).units
        for flat in [unit.gather_values()]
        for slot in unit.spec.layout.slots
    }


# --- reading


@STAGES
@PRECISIONS
def test_parameters_are_whole_inside_and_given_back_outside(world: World, stage, precision):
    model, plain = MLP(), MLP()
    with world.zeroified(model, adamw(model), stage=stage, precision=precision) as sharding:
        with hpczero.gathered(model):
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            world.check(all(torch.equal(a, b.to(dtype)) for a, b in pairs))
            norm = sum(float(p.detach().float().norm()) for p in model.parameters())
        world.check(world.comm.allgather(norm) == [norm] * world.size)
        world.check(sharding.memory.current.get("unsharded", 0) == 0)
        model(mlp_input(world.rank)).sum().backward()  # and reading is not a change
        sharding.optimizer.step()  # type: ignore[union-attr]


# --- changing


@STAGES
@PRECISIONS
def test_changes_of_the_modifier_rank_reach_ranks_and_masters(world: World, stage, precision):
    model = MLP()
    model.layers[0].requires_grad_(False)
    optimizer, root = adamw(model), world.size - 1
    with world.zeroified(model, optimizer, stage=stage, precision=precision):
        before = masters(model)
        changed = ("layers.0.0.weight", "layers.2.0.bias")  # frozen, trainable
        with hpczero.gathered(model, modifier_rank=root), torch.no_grad():
            for name in changed:
                model.get_parameter(name).fill_(0.75 if world.rank == root else -1.0)
            with hpczero.gathered(model):  # of a helper that reads
                pass
        after = masters(model)
        for name, value in after.items():
            # what was not touched keeps its fp32 digits
            expected = torch.full_like(value, 0.75) if name in changed else before[name]
            world.check(torch.equal(value, expected), name)
        model(mlp_input(world.rank)).sum().backward()
        optimizer.step()  # is not refused, and starts from the new values
        moved = (masters(model)["layers.2.0.bias"] - 0.75).abs()
        world.check(bool(((moved > 0) & (moved < 0.02)).all()), moved)


@STAGES
def test_change_without_a_modifier_rank_is_refused(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, _):
        before = masters(model)

        def change() -> None:
            with hpczero.gathered(model), hpczero.gathered(model), torch.no_grad():
                if world.rank == 1:
                    next(model.parameters()).zero_()

        said = r"changed inside gathered\(model\) without a modifier_rank.*modifier_rank=0"
        world.raises(StepError, said, change)
        with hpczero.gathered(model, modifier_rank=0):  # makes all ranks equal again
            pass
        world.check(same_state(masters(model), before))


def _by_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def _by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def _two_weights(model: nn.Module) -> tuple[Tensor, Tensor]:
    return model.get_parameter("layers.0.0.weight"), model.get_parameter("layers.1.0.weight")


def _exchanged(model: nn.Module) -> None:
    one, other = _two_weights(model)
    one.data, other.data = other.data, one.data


def _transposed(model: nn.Module) -> None:
    for parameter in _two_weights(model):
        parameter.data = parameter.data.t()


def _columns_of_one_matrix(model: nn.Module) -> None:
    one, other = _two_weights(model)
    one.data, other.data = torch.cat([one.data * 0.5, other.data * 2.0], dim=1).chunk(2, dim=1)


CHANGES = [_by_vector, _by_data, _exchanged, _transposed, _columns_of_one_matrix]


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("change", CHANGES, ids=lambda act: act.__name__)
def test_values_in_other_memory_are_taken_over(world: World, stage, transport, change):
    square = (7, 7, 7, 3)
    model, plain = MLP(square), MLP(square)
    optimizer = adamw(model)

    def unannounced() -> None:
        with hpczero.gathered(model):
            change(model)

    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        with hpczero.gathered(model, modifier_rank=0):
            change(model)
        change(plain)
        world.check(same_state(masters(model), dict(plain.named_parameters())))
        world.check_trains(model, optimizer, MLP(square))
        world.raises(StepError, "changed inside gathered", unannounced)


@STAGES
@TRANSPORTS
def test_a_backup_kept_by_data_survives_what_took_its_place(world: World, stage, transport):
    backup: dict[str, Tensor] = {}
    with world.mlp(adamw, stage=stage, transport=transport) as (model, optimizer):
        mlp_steps(model, optimizer, world.rank)
        before = masters(model)
        with hpczero.gathered(model, modifier_rank=0):
            for name, parameter in model.named_parameters():
                backup[name] = parameter.data
                parameter.data = torch.zeros_like(parameter)
        world.check(not any(bool(v.any()) for v in masters(model).values()))
        with hpczero.gathered(model, modifier_rank=0):
            for name, parameter in model.named_parameters():
                parameter.data = backup[name]
        world.check(same_state(masters(model), before))
        world.check_trains(model, optimizer)


@STAGES
def test_values_of_another_dtype_are_refused_on_all_ranks(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, _):

        def widen() -> None:
            with hpczero.gathered(model, modifier_rank=0):
                if world.rank == 0:
                    parameter = next(model.parameters())
                    parameter.data = parameter.data.double()

        world.raises(StepError, "was given torch.float64", widen)


@pytest.mark.parametrize("modifier_rank", [-1, 99])
def test_a_modifier_rank_that_is_none_is_refused(world: World, modifier_rank):
    with world.mlp(adamw) as (model, _), pytest.raises(ConfigError, match="modifier_rank: got"):
        hpczero.gathered(model, modifier_rank=modifier_rank).__enter__()


@STAGES
def test_changes_are_used_by_a_forward_inside_and_kept(world: World, stage):
    model, other = MLP(), MLP(seed=77)
    with world.zeroified(model, adamw(model), stage=stage):
        with hpczero.gathered(model, modifier_rank=1), torch.no_grad():
            model.load_state_dict(other.state_dict())
            world.check(torch.equal(model(mlp_input(0)), other(mlp_input(0))))
        world.check(same_state(masters(model), dict(other.named_parameters())))


@pytest.mark.parametrize("stage", [0, 3])
def test_step_inside_is_refused(world: World, stage):
    # at stage 3 the values written back at the end would be those from before the step
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        model(mlp_input(world.rank)).sum().backward()
        with hpczero.gathered(model, modifier_rank=0):
            said = r"optimizer\.step\(\) inside `with hpczero\.gathered"
            world.raises(StepError, said, optimizer.step)
        optimizer.step()


@STAGES
def test_state_dict_taken_inside_can_be_used_afterwards(world: World, stage):
    model = MLP()
    model.tied = model.layers[1]
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    with world.zeroified(model, adamw(model), stage=stage):
        with hpczero.gathered(model):
            state = model.state_dict()
        world.check(same_state(state, plain))  # at stage 3 views would crash here
        shared = state["tied.0.weight"].data_ptr() == state["layers.1.0.weight"].data_ptr()
        world.check(shared)


@STAGES
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
def test_gathered_in_inference_mode_leaves_a_model_that_trains(world: World, stage, transport):
    with world.mlp(adamw, stage=stage, transport=transport) as (model, optimizer):
        expected = model(mlp_input(0)).detach()
        with torch.inference_mode(), hpczero.gathered(model):
            world.check(torch.equal(model(mlp_input(0)), expected))
        with torch.inference_mode(), hpczero.gathered(model, modifier_rank=0):
            next(model.parameters()).mul_(0.5)
        world.check_trains(model, optimizer)


@STAGES
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
@pytest.mark.parametrize("place", ["block", "layer", "model"])
@pytest.mark.parametrize("changes", [False, True])
def test_gathered_inside_of_a_forward_keeps_what_is_used(
    world: World, stage, transport, place, changes
):
    model = MLP()
    seen: list[float] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        with torch.no_grad(), hpczero.gathered(model, modifier_rank=0 if changes else None):
            seen.append(float(model.get_parameter("layers.2.0.weight").sum()))

    block = model.get_submodule("layers.1")
    chosen = {"block": block, "layer": block.get_submodule("0"), "model": model}[place]
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        chosen.register_forward_hook(look)
        world.check_trains(model, optimizer, MLP())
        held = [u.spec.name for u in hpczero.sharding(model).units if u.whole.state.name == "WHOLE"]
        world.check(not held or stage < 3, f"still whole: {held}")
    world.check(bool(seen))
