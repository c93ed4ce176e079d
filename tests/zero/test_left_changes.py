"""Changes of whole parameters that would be lost, or reach some ranks only: found, and refused on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import StepError
from hpczero.zero.units.guard import _guarded
from tests.helpers.small_models import MLP, adamw, mlp_backward, mlp_input, same
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["window", "flat"])
SQUARE = (7, 7, 7, 3)


# --- behind hpczero's back, and then saved


def _in_place(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def _other_memory(model: nn.Module) -> None:
    parameter = next(model.parameters())
    parameter.data = parameter.data * 0.5


def _transposed(model: nn.Module) -> None:
    parameter = next(model.parameters())
    parameter.data = parameter.data.t()


@pytest.mark.parametrize("stage", [0, 2])
@TRANSPORTS
@pytest.mark.parametrize("change", [_in_place, _other_memory, _transposed])
def test_changes_outside_gathered_are_not_saved(world: World, folder, stage, transport, change):
    model = MLP(sizes=SQUARE)
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        if world.rank == 1:
            change(model)
        said = r"rank 1: parameter 'layers\.0\.0\.weight' (was changed in place|got new memory)"
        for use in (
            lambda: hpczero.full_state_dict(model),
            lambda: hpczero.checkpoint.save(folder, model, optimizer, step=1),
        ):
            world.raises(StepError, said, use)


@STAGES
def test_values_are_read_inside_gathered_and_while_frozen(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, _):
        plain = MLP().state_dict()
        with hpczero.gathered(model):
            world.check_state(hpczero.full_state_dict(model), plain)
        model.requires_grad_(False)  # for a while
        world.check_state(hpczero.full_state_dict(model), plain)


# --- inside gathered


def _part_of_another(one: Tensor, other: Tensor) -> None:
    other.data = one.data[:3]


def _one_for_both(one: Tensor, other: Tensor) -> None:
    value = torch.randn(7, 7)
    one.data, other.data = value, value.t()[:3]


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("tie", [_part_of_another, _one_for_both])
def test_parameters_that_share_memory_are_refused(world: World, stage, transport, tie):
    model = MLP(sizes=SQUARE)
    with world.zeroified(model, adamw(model), stage=stage, transport=transport):

        def change() -> None:
            with hpczero.gathered(model, modifier_rank=0):
                if world.rank == 0:
                    tie(*(model.get_parameter(f"layers.{i}.0.weight") for i in (0, 2)))

        two = r"'layers\.(0|2)\.0\.weight' and 'layers\.(0|2)\.0\.weight'"
        said = f"rank 0: parameters {two} share memory.*tie them before zeroify"
        world.raises(StepError, said, change)


@pytest.mark.parametrize("stage", [0, 2])
def test_tensors_swapped_outside_are_refused_by_the_step(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        mlp_backward(model, world.rank)
        parameter = next(model.parameters())
        _guarded.pop(parameter)  # torch itself refuses while there is a weak reference
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        world.raises(StepError, "torch swapped the tensor", optimizer.step)


# --- blocks that did not end well


def _leave_by_exception(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    with contextlib.suppress(ValueError), hpczero.gathered(model, modifier_rank=0):
        change(model)
        raise ValueError


def _leave_refused(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    with contextlib.suppress(StepError), hpczero.gathered(model):
        if hpczero.sharding(model).topology.is_root:  # the others know of it all the same
            change(model)


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("change", [_in_place, _other_memory])
@pytest.mark.parametrize("leave", [_leave_by_exception, _leave_refused])
@pytest.mark.parametrize("way_out", ["block", "checkpoint"])
def test_changes_of_a_block_that_was_left(
    world: World, folder, stage, transport, change, leave, way_out
):
    model = MLP()
    optimizer = adamw(model)

    def read() -> None:
        with hpczero.gathered(model):
            pass

    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        hpczero.checkpoint.save(folder, model, optimizer, step=0)
        mlp_backward(model, world.rank)
        leave(model, change)
        said = r"the last `with hpczero\.gathered\(model\)` block was left.*load a checkpoint"
        for use in (
            lambda: hpczero.full_state_dict(model),
            lambda: hpczero.checkpoint.save(folder, model, optimizer, step=1),
            optimizer.step,
            read,
        ):
            world.raises(StepError, said, use)
        with pytest.raises(StepError, match="block was left"):
            model(mlp_input(0))
        if way_out == "checkpoint":
            hpczero.checkpoint.load(folder, model, optimizer)
        else:
            with hpczero.gathered(model, modifier_rank=0):
                model.load_state_dict(MLP().state_dict())
        with torch.no_grad():
            world.check(torch.equal(model(mlp_input(0)), MLP()(mlp_input(0))))
        world.check_trains(model, optimizer)


@STAGES
@TRANSPORTS
def test_a_block_left_without_a_change_is_forgotten(world: World, stage, transport):
    with world.mlp(adamw, stage=stage, transport=transport) as (model, optimizer):
        with torch.no_grad():
            _leave_by_exception(model, lambda model: model(mlp_input(0)))
        world.check_trains(model, optimizer)


# --- buffers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.register_buffer("scale", torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(x * self.get_buffer("scale"))
        return result


@STAGES
@TRANSPORTS
def test_buffers_of_the_modifier_rank_reach_all_ranks(world: World, stage, transport):
    model, root = Scaled(), world.size - 1
    with world.zeroified(model, adamw(model), stage=stage, transport=transport):
        with hpczero.gathered(model, modifier_rank=root):
            if world.rank == root:
                state = {name: value.clone() * 3 for name, value in model.state_dict().items()}
                model.load_state_dict(state)
        world.check(bool((model.get_buffer("scale") == 3).all()))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("value", [torch.ones(7).double(), torch.ones(2), None])
def test_buffers_that_one_rank_replaced_are_refused_by_name(world: World, stage, value):
    model = Scaled()
    with world.zeroified(model, adamw(model), stage=stage):

        def replace() -> None:
            with hpczero.gathered(model, modifier_rank=1):
                if world.rank == 1:
                    model._buffers["scale"] = value

        said = r"rank 0: .*buffer scale \(7,\) torch\.float32.*where rank 1 has|on rank\(s\).*buffer scale"
        world.raises(StepError, said, replace)


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_pointer_writes_in_gathered_is_seen(world: World, stage, transport, precision):
    model = MLP()
    optimizer = adamw(model)

    def write() -> None:
        value = model.get_parameter("layers.1.0.weight").detach()
        value.view(torch.int16).numpy()[0, 0] ^= 1  # no version counter sees it

    def unannounced() -> None:
        with hpczero.gathered(model):
            if world.rank == world.size - 1:
                write()

    with world.zeroified(model, optimizer, stage=stage, transport=transport, precision=precision):
        with hpczero.gathered(model):
            pass
        world.raises(StepError, "changed inside gathered", unannounced)
        with hpczero.gathered(model, modifier_rank=0):
            if world.rank == 0:
                write()
        with hpczero.gathered(model):
            values = [parameter.detach().clone() for parameter in model.parameters()]
        world.check(same(values, world.comm.bcast(values)), "ranks differ")
