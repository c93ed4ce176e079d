"""fp32 training with unusual orders of forward, backward and step equals one process at every stage."""

from __future__ import annotations

import pytest
import torch

from tests.equality import cases, models
from tests.equality.cases import Case, Lane, gpt_case
from tests.equality.test_models import evaluate

pytestmark = pytest.mark.mpi


def stack(**changes) -> Case:
    """Training of the stack of blocks."""
    return Case(lambda: models.seeded(models.Stack), **changes)


def test_two_forwards_before_one_backward(equals_one_process):
    def program(lane: Lane) -> float:
        loss = (lane.loss(0) + lane.loss(1)) / 2
        lane.backward(loss)
        return loss.item()

    equals_one_process(stack(program=program))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_forward_forward_backward_backward(equals_one_process, order):
    def program(lane: Lane) -> float:
        losses = [lane.loss(micro) / 2 for micro in (0, 1)]
        for index in order:
            lane.backward(losses[index])
        return sum(loss.item() for loss in losses)

    equals_one_process(stack(program=program))


def test_backward_twice_through_one_graph(equals_one_process):
    def program(lane: Lane) -> float:
        loss = lane.loss()
        lane.backward(loss, retain_graph=True)
        lane.backward(loss)
        return loss.item()

    equals_one_process(stack(program=program))


def test_forward_without_backward(equals_one_process):
    def program(lane: Lane) -> float:
        dropped = lane.loss(1)
        loss = lane.loss(0)
        lane.backward(loss)
        return loss.item() + dropped.item()

    equals_one_process(stack(program=program))


def test_evaluation_between_steps(equals_one_process):
    equals_one_process(gpt_case(lambda: models.gpt(dropout=0.1), between=evaluate))


def test_evaluation_between_forward_and_backward(equals_one_process):
    def program(lane: Lane) -> float:
        loss = lane.loss()
        with torch.no_grad():
            other = lane.loss(1)
        lane.backward(loss)
        return loss.item() + other.item()

    equals_one_process(stack(program=program))


@pytest.mark.parametrize(
    "program", [cases.accumulate, cases.accumulate_without_sync], ids=["reduced", "no_sync"]
)
class TestAccumulation:
    """Three micro-batches, reduced each by itself or once at the end."""

    def test_of_a_gpt(self, equals_one_process, program):
        equals_one_process(gpt_case(models.gpt, program=program, max_norm=4.5))

    def test_of_checkpointed_blocks_with_kept_gradients(self, equals_one_process, program):
        equals_one_process(
            Case(
                lambda: models.seeded(models.CheckpointedStack),
                program=program,
                zero_grad=cases.keep_gradients,
            )
        )

    def test_of_parameters_that_only_some_ranks_and_micro_batches_use(
        self, equals_one_process, program
    ):
        def batch(place):
            x, y = cases.vectors(place)
            return x, (place.rank + place.micro + place.step) % 3, y

        equals_one_process(
            Case(lambda: models.seeded(models.BranchedStack), batch=batch, program=program)
        )

    def test_of_batch_statistics(self, equals_one_process, program):
        def momentum(model):
            return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

        equals_one_process(
            Case(
                models.convnet,
                batch=cases.images,
                loss=cases.own_loss,
                optimizer=momentum,
                program=program,
                between=evaluate,
                steps=5,
            )
        )


def test_gradients_kept_as_zeros_between_steps(equals_one_process):
    def batch(place):
        x, y = cases.vectors(place)
        return x, (3, 1, 2, 0)[place.step % 4], y

    equals_one_process(
        Case(
            lambda: models.seeded(models.BranchedStack), batch=batch, zero_grad=cases.keep_gradients
        )
    )
