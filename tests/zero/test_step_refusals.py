"""What goes wrong in a step is one agreed error, or one agreed skip; nothing is updated, and zero_grad recovers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hpczero
from hpczero.errors import ConfigError, StepError
from hpczero.plan.precision import LossScale, Precision
from tests.helpers.small_models import MLP, adamw, mlp_backward, same, squares, update, values
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])

# --- the step


@STAGES
def test_unreduced_gradients_of_no_sync(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        with hpczero.no_sync(model):
            mlp_backward(model, world.rank)
        with pytest.raises(StepError, match="outside no_sync"):
            hpczero.clip_grad_norm_(model, 1.0)
        said = "3 unit.*never reduced over ranks; run the last backward .* outside no_sync"
        world.refuses_step(model, optimizer, said)
        world.check(not optimizer.state)
        world.check_trains(model, optimizer)


def test_unreduced_gradients_on_one_rank(world: World):
    with world.mlp(adamw, stage=2) as (model, optimizer):
        if world.rank == 1:  # at stage 2 nothing is gathered, so this does not hang
            with hpczero.no_sync(model):
                mlp_backward(model, world.rank)
        said = r"on rank\(s\) 1, could not take the step: rank 1: 3 unit"
        world.raises(StepError, said, optimizer.step)


def test_bad_arguments_of_clipping_and_of_the_step(world: World):
    with world.mlp(adamw, stage=3) as (model, optimizer):
        for max_norm in (0.0, math.nan, -1):
            with pytest.raises(ConfigError, match=r"max_norm: got .*, expected a number above 0"):
                hpczero.clip_grad_norm_(model, max_norm)
        with pytest.raises(ConfigError, match=r"norm_type: got 1\.0, expected 2\.0 or inf"):
            hpczero.clip_grad_norm_(model, 1.0, norm_type=1.0)
        with pytest.raises(ConfigError, match="call backward first"):
            optimizer.step(lambda: 0.0)
        with pytest.raises(ConfigError, match="call backward first"):
            optimizer.step(closure=lambda: 0.0)


# --- parameters behind our back


@torch.no_grad()
def add_to_a_bias(model: nn.Module) -> None:
    model.get_parameter("layers.1.0.bias").add_(1.0)


IN_PLACE = (
    r"'layers\.(1\.0\.bias|0\.0\.weight)' was changed in place .*gathered\(model, modifier_rank=0\)"
)
CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "in place": (add_to_a_bias, IN_PLACE),
    "load_state_dict": (lambda m: m.load_state_dict(MLP(seed=9).state_dict()), IN_PLACE),
    "initialisation": (lambda m: nn.init.zeros_(next(m.parameters())), IN_PLACE),
    "assigned": (
        lambda model: model.load_state_dict(MLP(seed=8).state_dict(), assign=True),
        "parameter 'layers.0.0.weight' came into the model after zeroify",
    ),
}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", ["all", "one"])
@pytest.mark.parametrize("change", CHANGES)
def test_change_outside_gathered(world: World, stage, ranks, change):
    act, said = CHANGES[change]
    before_backward = stage == 1
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        if not before_backward:
            mlp_backward(model, world.rank)
        if ranks == "all" or world.rank == 1:
            act(model)
        if before_backward:
            mlp_backward(model, world.rank)
        world.raises(StepError, said, optimizer.step)


@pytest.mark.parametrize("stage", [0, 2])
def test_module_inside_a_unit_that_was_cast(world: World, stage):
    """The model and its units refuse at once: test_moves_and_copies."""
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        model.get_submodule("layers.0.0").double()
        world.raises(StepError, "'layers.0.0.weight' got new memory", optimizer.step)


@pytest.mark.parametrize("transport", ["window", "flat"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_torch_moves_to_shared_memory(world: World, stage, transport):
    """``share_memory`` changes the address of a storage, and with it of all views."""
    found = []
    for shared in (False, True):
        with world.mlp(adamw, stage=stage, transport=transport) as (model, optimizer):
            if shared:
                model.share_memory()
            if shared and stage and transport == "window":
                mlp_backward(model, world.rank)
                said = "moved the parameters of .* to other memory .*HPCZERO_TRANSPORT=flat"
                world.raises(StepError, said, optimizer.step)
                return
            for _ in range(2):
                mlp_backward(model, world.rank)
                update(optimizer)
            found.append(hpczero.full_state_dict(model))
    world.check_state(*found)


@STAGES
def test_frozen_parameter_that_was_changed_in_place(world: World, stage):
    model = MLP()
    model.layers[1].requires_grad_(False)
    optimizer = adamw(model)

    def change(*_: object) -> None:  # inside the forward, where it is whole at every stage
        add_to_a_bias(model)

    with world.zeroified(model, optimizer, stage=stage):
        handle = model.layers[1][0].register_forward_pre_hook(change)  # type: ignore[index]
        mlp_backward(model, world.rank)
        handle.remove()
        said = r"parameter 'layers\.1\.0\.bias' was changed in place"
        world.raises(StepError, said, optimizer.step)


# --- gradients that are not finite


def poisoned(model: nn.Module, world: World, *, value: float = math.nan) -> None:
    """A backward in which the last rank's loss is not a number."""
    factor = value if world.rank == world.size - 1 else 1.0
    (squares(model, world.rank) * factor).backward()


@STAGES
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_gradient_on_one_rank_is_an_error_on_all(world: World, stage, value):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        poisoned(model, world, value=value)
        norm = hpczero.clip_grad_norm_(model, 1.0)  # which must not hide it
        world.check(not math.isfinite(norm), norm)
        said = "gradient has NaN or infinity .*nonfinite='skip'.*Nothing was updated"
        world.refuses_step(model, optimizer, said)
        world.check(not optimizer.state)
        world.check_trains(model, optimizer)


@STAGES
@pytest.mark.parametrize("backward", [True, False])
def test_a_nonfinite_step_and_one_without_a_backward_change_nothing(world: World, stage, backward):
    precision = Precision(nonfinite="skip")
    with world.mlp(adamw, stage=stage, precision=precision) as (model, optimizer):
        sharding = hpczero.sharding(model)
        before = values(sharding)
        if backward:
            poisoned(model, world)
        optimizer.step()
        world.check(same(values(sharding), before), "a skipped step changed something")
        world.check_trains(model, optimizer)
        world.check(sharding.skipped_steps == int(backward))


def test_too_many_skips_in_a_row_are_an_error(world: World):
    precision = Precision(nonfinite="skip", max_skips=3)
    with world.mlp(adamw, stage=2, precision=precision) as (model, optimizer):
        sharding = hpczero.sharding(model)
        for poison in (True, True, False, True, True):  # a good step in between starts anew
            (poisoned(model, world) if poison else mlp_backward(model, world.rank))
            update(optimizer)
        poisoned(model, world)
        world.raises(StepError, "3 steps in a row were skipped", optimizer.step)
        world.check(sharding.skipped_steps == 5)


def test_overflow_halves_the_loss_scale_on_all_ranks_until_its_minimum(world: World):
    precision = Precision(param="fp16", loss_scale=LossScale(initial=4.0, growth_interval=2))
    with world.mlp(adamw, stage=3, precision=precision) as (model, optimizer):
        sharding = hpczero.sharding(model)
        scales = []
        for poison in (True, False, False, True, True):
            (poisoned(model, world) if poison else mlp_backward(model, world.rank))
            update(optimizer)
            scales.append(sharding.loss_scale)
        world.check(scales == [2.0, 2.0, 4.0, 2.0, 1.0], scales)
        poisoned(model, world)
        world.raises(StepError, "loss scale is at its minimum 1", optimizer.step)


# --- options that went apart


@STAGES
def test_learning_rate_that_differs_by_rank(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for step in range(3):  # rank 1 alone makes no progress
            scheduler.step(1.0 if world.rank == 1 else -float(step))
        mlp_backward(model, world.rank)
        said = "rank 1: the optimizer has lr=0.0025 in group 0, where rank 0 has lr=0.01 in group 0"
        world.refuses_step(model, optimizer, said)
        optimizer.param_groups[0].update(lr=1e-2)
        world.check_trains(model, optimizer)


# --- what came in after zeroify


@STAGES
@pytest.mark.parametrize("ranks", ["all", "one"])
def test_module_replaced_after_zeroify(world: World, stage, ranks):
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        if ranks == "all" or world.rank == 1:
            model.layers[1].late = nn.Linear(15, 15)
        mlp_backward(model, world.rank)
        on_one = r"on rank\(s\) 1, could not take the step: rank 1: "
        where = "rank 0: " if ranks == "all" else on_one
        said = f"{where}parameter 'layers.1.late.weight' came into the model after zeroify"
        world.refuses_step(model, optimizer, said)
        if hasattr(model.layers[1], "late"):
            del model.layers[1].late
        optimizer.zero_grad()
        world.check_trains(model, optimizer)


@STAGES
def test_parameter_group_added_after_zeroify(world: World, stage):
    model, late = MLP(), nn.Parameter(torch.ones(3))
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage):
        optimizer.add_param_group({"params": [late]})
        (squares(model, world.rank) * late.sum()).backward()
        said = r"group 1 of the optimizer has 1 parameter\(s\) put in after zeroify"
        world.raises(StepError, said, optimizer.step)
        world.check((late == 1).all())


@STAGES
def test_backward_of_a_graph_that_was_made_before_the_step(world: World, stage):
    # plain torch refuses it too: the saved weights are not there any more
    with world.mlp(adamw, stage=stage) as (model, optimizer):
        early = squares(model, world.rank)
        mlp_backward(model, world.rank)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        model.zero_grad()
