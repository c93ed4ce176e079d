"""fp32 training with unusual orders of forward, backward and step equals one process at every stage."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import hpczero
from tests.equality import cases, models
from tests.equality.cases import Lane, gpt_case, seeded_case

pytestmark = pytest.mark.mpi


def two_forwards_before_one_backward(lane: Lane) -> float:
    loss = (lane.loss(0) + lane.loss(1)) / 2
    lane.backward(loss)
    return loss.item()


def first_in_first_out(lane: Lane, order: tuple[int, int] = (0, 1)) -> float:
    losses = [lane.loss(micro) / 2 for micro in (0, 1)]
    for index in order:
        lane.backward(losses[index])
    return sum(loss.item() for loss in losses)


def last_in_first_out(lane: Lane) -> float:
    return first_in_first_out(lane, order=(1, 0))


def backward_twice_through_one_graph(lane: Lane) -> float:
    loss = lane.loss()
    lane.backward(loss, retain_graph=True)
    lane.backward(loss)
    return loss.item()


def forward_without_backward(lane: Lane) -> float:
    dropped = lane.loss(1)
    loss = lane.loss(0)
    lane.backward(loss)
    return loss.item() + dropped.item()


def evaluation_between_forward_and_backward(lane: Lane) -> float:
    loss = lane.loss()
    with torch.no_grad():
        other = lane.loss(1)
    lane.backward(loss)
    return loss.item() + other.item()


@pytest.mark.parametrize(
    "program",
    [
        two_forwards_before_one_backward,
        first_in_first_out,
        last_in_first_out,
        backward_twice_through_one_graph,
        forward_without_backward,
        evaluation_between_forward_and_backward,
    ],
    ids=lambda program: program.__name__,
)
def test_order_of_passes(equals_one_process, program):
    equals_one_process(seeded_case(models.Stack, program=program))


# --- weights read inside gathered


def gathered_weights(lane: Lane) -> Tensor:
    """A penalty made of them, by hpczero's ranks and by the one process alike."""
    inside = hasattr(lane.model, "_hpczero_sharding")
    with hpczero.gathered(lane.model) if inside else nullcontext():
        return 0.02 * torch.stack([p.square().sum() for p in lane.model.parameters()]).sum()


def penalty_after_the_loss(lane: Lane) -> float:
    loss = lane.loss()
    lane.backward(loss)
    penalty = gathered_weights(lane)
    lane.backward(penalty)
    return loss.item() + penalty.item()


def penalty_before_the_loss(lane: Lane) -> float:
    penalty, loss = gathered_weights(lane), lane.loss()
    lane.backward(loss)
    lane.backward(penalty)
    return loss.item() + penalty.item()


def penalty_with_the_loss(lane: Lane) -> float:
    loss = lane.loss() + gathered_weights(lane)
    lane.backward(loss)
    return loss.item()


def penalty_with_the_loss_twice(lane: Lane) -> float:
    return penalty_with_the_loss(lane) + penalty_with_the_loss(lane)


def penalty_instead_of_the_loss(lane: Lane) -> float:
    penalty = gathered_weights(lane)
    lane.backward(penalty)
    return penalty.item()


def gathered_between_forward_and_backward(lane: Lane) -> float:
    loss = lane.loss()
    gathered_weights(lane)
    lane.backward(loss)
    return loss.item()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "program",
    [
        penalty_after_the_loss,
        penalty_before_the_loss,
        penalty_with_the_loss,
        penalty_with_the_loss_twice,
        penalty_instead_of_the_loss,
        gathered_between_forward_and_backward,
    ],
    ids=lambda program: program.__name__,
)
def test_weights_gathered_among_the_passes(equals_one_process, program):
    transports = ("window", "flat", "hierarchical")
    equals_one_process(seeded_case(models.Stack, program=program, transports=transports, steps=3))


def test_evaluation_between_steps(equals_one_process):
    equals_one_process(gpt_case(lambda: models.gpt(dropout=0.1), between=cases.evaluate))


@pytest.mark.parametrize(
    "program", [cases.accumulate, cases.accumulate_without_sync], ids=["reduced", "no_sync"]
)
class TestAccumulation:
    """Three micro-batches, reduced each by itself or once at the end."""

    def test_of_a_gpt(self, equals_one_process, program):
        equals_one_process(gpt_case(models.gpt, program=program, max_norm=4.5))

    def test_of_checkpointed_blocks_with_kept_gradients(self, equals_one_process, program):
        changes = {"program": program, "zero_grad": cases.keep_gradients}
        equals_one_process(seeded_case(models.CheckpointedStack, **changes))

    def test_of_parameters_that_only_some_ranks_and_micro_batches_use(
        self, equals_one_process, program
    ):
        def batch(place):
            x, y = cases.vectors(place)
            return x, (place.rank + place.micro + place.step) % 3, y

        changes = {"program": program, "batch": batch}
        equals_one_process(seeded_case(models.BranchedStack, **changes))

    def test_of_batch_statistics(self, equals_one_process, program):
        equals_one_process(cases.convnet_case(program=program, between=cases.evaluate, steps=5))


def test_gradients_kept_as_zeros_between_steps(equals_one_process):
    def batch(place):
        x, y = cases.vectors(place)
        return x, (3, 1, 2, 0)[place.step % 4], y

    changes = {"batch": batch, "zero_grad": cases.keep_gradients}
    equals_one_process(seeded_case(models.BranchedStack, **changes))
