"""One step over the whole job: what is not finite on one rank is skipped by all, and loss scales stay equal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.errors import StepError
from hpczero.options.config import LayoutOptions
from hpczero.plan.precision import Precision
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all
from tests.parallel.layouts import Trained, laid_out, sizes, train_laid_out

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"tensor": 2}, {"pipeline": 2}, {"shard": "1"}],
    4: [{"tensor": 2, "pipeline": 2}, {"pipeline": 2}, {"tensor": 2, "shard": "1"}],
}


def spoil(model: Any) -> None:
    """A part of this rank's gradients becomes NaN; of the last trained unit that it owns something of."""
    shard = next(
        shard
        for unit in reversed(hpczero.sharding(model).units)
        for shard in unit.shards
        if shard.grad is not None and shard.numel()
    )
    assert shard.grad is not None, "chosen so"
    shard.grad.mul_(torch.nan)


def spoiled(
    comm: MPI.Intracomm, layout: dict[str, Any], at: tuple[int, int], **how: Any
) -> tuple[Trained, list[tuple[int, float]]]:
    """A run with a NaN at this step and rank; before each step how many were skipped, and the loss scale."""
    options, counts = LayoutOptions(**layout), list[tuple[int, float]]()

    def around(model: Any, optimizer: Any, step: int) -> None:
        if (step, comm.rank) == at:
            spoil(model)
        state = hpczero.sharding(model)
        counts.append((state.skipped_steps, state.loss_scale))

    with laid_out(comm, options) as topology:
        return train_laid_out(sizes(), topology, options, around=around, **how), counts


@pytest.mark.worth("steps that are not finite are skipped by all ranks")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_is_not_finite_on_one_rank_is_skipped_by_all(comm: MPI.Intracomm, stage: int) -> None:
    how: dict[str, Any] = {"stage": stage, "precision": Precision("bf16", nonfinite="skip")}
    for layout in LAYOUTS[comm.size]:
        parts = layout.get("tensor", 1) * layout.get("pipeline", 1)
        if stage == 0 and parts < comm.size:
            continue  # a change by one of two ranks with the same values is refused by name
        for rank in range(comm.size):
            _, counts = spoiled(comm, layout, (1, rank), steps=4, **how)
            skipped = [count for count, _ in counts]
            parallel_assert(comm, skipped == [0, 0, 1, 1], f"{layout}, NaN on {rank}: {counts}")


def test_an_overflow_on_one_rank_halves_the_loss_scale_of_all(comm: MPI.Intracomm) -> None:
    for layout in LAYOUTS[comm.size]:
        how: dict[str, Any] = {"stage": 1, "steps": 5, "precision": "fp16"}
        found, counts = spoiled(comm, layout, (2, comm.size - 1), **how)
        scales = [scale for _, scale in counts]
        everybody = comm.allgather(scales)
        parallel_assert(comm, all(each == everybody[0] for each in everybody), f"{everybody}")
        parallel_assert(comm, scales[3] == scales[2] / 2, f"{scales}")
        parallel_assert(comm, all(map(math.isfinite, found.losses)))


def test_options_that_differ_on_one_rank_are_refused_on_all(comm: MPI.Intracomm) -> None:
    for layout in LAYOUTS[comm.size]:
        options = LayoutOptions(**layout)

        def around(model: Any, optimizer: Any, step: int) -> None:
            if step == 1 and comm.rank == comm.size - 1:
                optimizer.param_groups[0]["lr"] = 1.0

        with laid_out(comm, options) as topology:
            if topology.data_sequence.size == 1:
                continue  # nobody has the same part of the model: there is nothing to compare with
            how: dict[str, Any] = {"stage": 1, "steps": 3, "around": around}
            raises_on_all(comm, StepError, "lr", train_laid_out, sizes(), topology, options, **how)


def test_the_norm_of_one_parameter_of_a_part_is_refused(comm: MPI.Intracomm) -> None:
    options = LayoutOptions(tensor=2)

    def around(model: Any, optimizer: Any, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with (
        laid_out(comm, options) as topology,
        pytest.raises(StepError, match=r"hpczero\.clip_grad_norm_"),
    ):
        train_laid_out(sizes(), topology, options, stage=1, steps=1, around=around)
