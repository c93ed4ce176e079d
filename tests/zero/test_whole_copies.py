"""Copies of the whole model: values under the model's own names, mean gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hpczero
from hpczero.plan.layout import ShardLayout
from hpczero.zero.units.gradients import whole_copy
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, squares, tiny_gpt, tiny_tokens
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@STAGES
@PRECISIONS
def test_full_state_dict_loads_into_a_plain_model_with_tied_names(world: World, stage, precision):
    tokens = tiny_tokens(world.rank)
    with world.gpt(stage=stage, precision=precision) as (model, optimizer, _):
        model(tokens, tokens).backward()
        optimizer.step()
        state = hpczero.full_state_dict(model)
        world.check((state is not None) == (world.rank == 0))
        plain = tiny_gpt(seed=5)
        fine = True
        if state is not None:
            fine = all(value.dtype is torch.float32 for value in state.values())
            fine = fine and state["lm_head.weight"] is state["wte.weight"]
            fine = fine and list(state) == list(plain.state_dict())
            plain.load_state_dict(state)  # strict
        world.check(fine)
        if precision == "fp32":
            trained = model(tiny_tokens(0)).detach()
            same = world.rank > 0 or torch.equal(plain(tiny_tokens(0)), trained)
            world.check(same, "the copy computes something else")


@pytest.mark.parametrize("stage", [0, 3])
def test_full_state_dict_is_a_copy(world: World, stage):
    with world.mlp(adamw, stage=stage) as (model, _):
        state = hpczero.full_state_dict(model)
        if state is not None:
            for value in state.values():
                value.zero_()
        world.check_state(hpczero.full_state_dict(model), MLP().state_dict())


def test_full_gradients_are_the_mean_over_ranks_on_every_rank(world: World):
    model, plain = MLP(), MLP()
    model.layers[0].requires_grad_(False)
    with world.zeroified(model, adamw(model), stage=3):
        world.check(hpczero.full_gradients(model) == {})
        world.backward(model, plain, squares)
        found = hpczero.full_gradients(model)
        trainable = [name for name, _ in plain.named_parameters() if "layers.0" not in name]
        world.check(list(found) == trainable, list(found))
        world.check_gradients(model, plain)


class Made(TorchDispatchMode):
    """Counts the operations that make whole tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_copy_of_what_every_rank_has_is_made_once(comm, dtype):
    layout = ShardLayout.pack([("weight", (3,))], comm.size)
    values = torch.ones(layout.padded_numel, dtype=dtype)
    no_transport: Any = None
    with Made() as made:
        copy = whole_copy(values, layout, no_transport, name="unit")
    parallel_assert(comm, made.count == 1 and copy.dtype is torch.float32)
    copy.zero_()
    parallel_assert(comm, bool(values.all()), "not a copy")


class OwnState(MLP):
    """Its ``state_dict`` takes no arguments, and renames."""

    def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {f"mine.{name}": value for name, value in super().state_dict().items()}


@STAGES
def test_full_state_dict_of_a_model_whose_own_takes_no_arguments(world: World, stage):
    model = OwnState()
    with world.zeroified(model, adamw(model), stage=stage):
        state = hpczero.full_state_dict(model)
    plain = OwnState().state_dict()
    world.check_state(state, plain)
    world.check(state is None or list(state) == list(plain))
