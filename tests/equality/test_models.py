"""fp32 training of awkward models equals one process at every stage."""

from __future__ import annotations

import pytest
from torch import nn

from tests.compat import hidden, outputs
from tests.compat.construct import net
from tests.equality import cases, models
from tests.equality.cases import Case, Place, gpt_case, seeded_case
from tests.helpers.small_models import seeded

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    "build",
    [
        models.tied_stack,  # across units
        models.IdleStack,  # parameters unused on all ranks are left alone
        models.StoppedStack,
        models.TwiceStack,
        models.CheckpointedStack,
    ],
)
def test_stack_of_blocks_with_a_habit(equals_one_process, build):
    equals_one_process(seeded_case(build))


def test_gpt(equals_one_process):
    equals_one_process(gpt_case(models.gpt))


def test_gpt_with_rotary_positions_dropout_and_checkpointed_blocks(equals_one_process):
    def build():
        return models.gpt(
            positions="rotary", tie_embeddings=False, dropout=0.1, checkpoint_activations=True
        )

    equals_one_process(gpt_case(build))


# --- units


def wide(place: Place) -> cases.Batch:
    return cases.vectors(place, width=7)


def test_mlp_with_parameters_smaller_than_the_world_and_without_elements(equals_one_process):
    def rule(model):
        return [("first",), ("second",)]

    equals_one_process(seeded_case(models.AwkwardMLP, batch=wide, rule=rule))


def test_sequential_mlp_whose_layers_share_a_unit(equals_one_process):
    def build():
        return nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 3))

    equals_one_process(seeded_case(build, batch=wide))


def test_the_whole_model_as_one_unit(equals_one_process):
    equals_one_process(seeded_case(models.Stack, rule=lambda model: []))


def test_every_layer_a_unit(equals_one_process):
    def rule(model):
        return [(name,) for name, module in model.named_modules() if isinstance(module, nn.Linear)]

    equals_one_process(seeded_case(models.Stack, rule=rule))


# --- batch statistics


def test_batch_norm_takes_each_ranks_batch_and_running_statistics_follow_rank_0(equals_one_process):
    equals_one_process(cases.convnet_case(between=cases.evaluate))


def test_batch_norm_with_its_running_statistics(equals_one_process):
    equals_one_process(cases.convnet_case(lambda: models.convnet().eval()))


# --- what is not used, or not trained


def test_frozen_layer_at_the_bottom_and_frozen_parameters_inside_a_unit(equals_one_process):
    def build():
        model = seeded(models.Stack)
        model.entry.requires_grad_(False)
        model.block(0).requires_grad_(False)
        model.block(1).inner.weight.requires_grad_(False)
        model.block(2).outer.bias.requires_grad_(False)
        return model

    equals_one_process(Case(build))


def test_parameters_of_the_root_unused_on_some_ranks(equals_one_process):
    def batch(place):
        x, y = cases.vectors(place)
        return x, 1 + (place.rank + place.step) % 3, y

    equals_one_process(seeded_case(models.BranchedStack, batch=batch))


def test_units_unused_on_some_ranks_where_parameters_are_whole(equals_one_process):
    # Stage 3 gathers a unit when it is called, so there every rank has to call it.
    def batch(place):
        x, y = cases.vectors(place)
        return x, 0b001 | (0b010 << (place.rank + place.step) % 2), y

    equals_one_process(seeded_case(models.SkippingStack, batch=batch, stages=(0, 1, 2)))


def test_units_unused_in_some_steps(equals_one_process):
    def batch(place):
        x, y = cases.vectors(place)
        return x, (0b111, 0b101, 0b110)[place.step % 3], y

    equals_one_process(
        seeded_case(models.SkippingStack, batch=batch, zero_grad=cases.keep_gradients)
    )


def test_inputs_and_outputs_of_units_that_the_loss_does_not_use(equals_one_process):
    equals_one_process(seeded_case(models.TwoHeadedStack, loss=cases.error_of_the_first))


# --- results that are no tensors of the block's own


@pytest.mark.parametrize(
    "build",
    [
        net(hidden.PostsAll, call=hidden.taken_from_board),
        net(outputs.Table, outputs.ReadsTables),
    ],
    ids=["in a list of the program's", "views of parameters"],
)
def test_results_that_nobody_sees_or_that_share_memory(equals_one_process, build):
    equals_one_process(Case(build, batch=lambda place: cases.vectors(place, width=6)))
