"""Several optimizers and gradients that are not finite: who skips, what stays, and how often the loss scale is told."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import Optimizer

import hpczero
from hpczero import Precision
from hpczero.errors import StepError
from hpczero.plan.precision import LossScale
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    MLP,
    distance,
    mlp_backward,
    mlp_input,
    raises_on_all,
    zeroified,
)
from tests.zero.several_models import TOLERANCE, by_shape, loss_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FP16 = Precision(param="fp16", loss_scale=LossScale(initial=8.0, growth_interval=3))
KINDS = {"fp16": FP16, "bf16": Precision(param="bf16", nonfinite="skip")}
PRECISIONS = pytest.mark.parametrize("precision", KINDS.values(), ids=KINDS.keys())


def poison(model: MLP, comm: MPI.Intracomm, name: str = "") -> None:
    """A backward after which the last rank's gradient of one parameter, or of the loss, is infinite."""
    if not name:
        factor = math.inf if comm.rank == comm.size - 1 else 1.0
        (model(mlp_input(comm.rank)).sum() * factor).backward()
        return
    parameter = dict(model.named_parameters())[name]
    factor = math.inf if comm.rank == comm.size - 1 else 1.0
    hook = parameter.register_hook(lambda gradient: gradient * factor)
    mlp_backward(model, comm.rank)
    hook.remove()


def values(sharding: hpczero.Sharding) -> dict[str, list[torch.Tensor]]:
    """What this rank's pieces hold, by the kind of parameter: that of the optimizers of ``by_shape``."""
    first, second = sharding.optimizers
    found = {}
    for name, optimizer in (("matrices", first), ("vectors", second)):
        with torch._C.DisableTorchFunctionSubclass():
            held = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
        found[name] = [each.as_subclass(torch.Tensor) for each in held]
    return found


def changed(
    before: dict[str, list[torch.Tensor]], after: dict[str, list[torch.Tensor]]
) -> set[str]:
    return {n for n in before if not all(map(torch.equal, before[n], after[n]))}


class Watched:
    """Which kinds of parameters change, over all ranks, and what of the counts and the scale does."""

    def __init__(self, comm: MPI.Intracomm, sharding: hpczero.Sharding) -> None:
        self.comm, self.sharding = comm, sharding

    def step(self, optimizer: Optimizer) -> tuple[set[str], int, float]:
        """Returns what changed by a step, and how many were skipped and the loss scale after it."""
        before = values(self.sharding)
        optimizer.step()
        mine = changed(before, values(self.sharding))
        everywhere = set().union(*self.comm.allgather(mine))
        return everywhere, self.sharding.skipped_steps, self.sharding.loss_scale


@STAGES
@PRECISIONS
@pytest.mark.parametrize("where", ["", "layers.1.0.weight", "layers.1.0.bias"])
@pytest.mark.parametrize("swapped", [False, True])
def test_an_overflow_skips_both_once_and_halves_the_scale_once(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    precision: Precision,
    where: str,
    swapped: bool,
) -> None:
    model = MLP()
    optimizers = by_shape(model)
    options: dict[str, Any] = {"stage": stage, "precision": precision, "topology": topology}
    with zeroified(model, optimizers, **options) as sharding:
        watched, begin = Watched(comm, sharding), sharding.loss_scale
        halved = begin / 2 if precision.loss_scale else begin
        order = optimizers[::-1] if swapped else optimizers
        poison(model, comm, where)
        found = [watched.step(optimizer) for optimizer in order]
        parallel_assert(comm, found == [(set(), 1, halved)] * 2, str(found))
        model.zero_grad()
        mlp_backward(model, comm.rank)
        found = [watched.step(optimizer) for optimizer in optimizers]
        expected = [({"matrices"}, 1, halved), ({"vectors"}, 1, halved)]
        parallel_assert(comm, found == expected, str(found))


@STAGES
def test_good_steps_of_one_backward_count_once_for_the_scale(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizers = by_shape(model)
    with zeroified(model, optimizers, stage=stage, precision=FP16, topology=topology) as sharding:
        scales = []
        for _ in range(7):
            model.zero_grad()
            mlp_backward(model, comm.rank)
            for optimizer in optimizers:
                optimizer.step()
            scales.append(sharding.loss_scale)
        expected = [8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0]
        parallel_assert(comm, scales == expected, str(scales))


@STAGES
@PRECISIONS
def test_one_that_waits_skips_its_own_step_later_and_nobody_elses(
    comm: MPI.Intracomm, topology: Topology, stage: int, precision: Precision
) -> None:
    """Its gradients hold infinity until then, as in plain torch."""
    model = MLP()
    first, second = by_shape(model)
    options: dict[str, Any] = {"stage": stage, "precision": precision, "topology": topology}
    with zeroified(model, (first, second), **options) as sharding:
        watched, begin = Watched(comm, sharding), sharding.loss_scale
        scale = begin / 2 if precision.loss_scale else begin
        poison(model, comm)
        found = [watched.step(first)]
        first.zero_grad()
        mlp_backward(model, comm.rank)
        found.append(watched.step(first))
        found.append(watched.step(second))
        second.zero_grad()
        first.zero_grad()
        mlp_backward(model, comm.rank)
        found += [watched.step(second), watched.step(first)]
        expected = [
            (set(), 1, scale),
            ({"matrices"}, 1, scale),
            (set(), 2, scale),
            ({"vectors"}, 2, scale),
            ({"matrices"}, 2, scale),
        ]
        parallel_assert(comm, found == expected, str(found))


@STAGES
@pytest.mark.parametrize("in_place", [False, True])
def test_one_that_waits_steps_again_once_its_gradients_were_zeroed(
    comm: MPI.Intracomm, topology: Topology, stage: int, in_place: bool
) -> None:
    model = MLP()
    first, second = by_shape(model)
    with zeroified(model, (first, second), stage=stage, precision=FP16, topology=topology) as s:
        watched = Watched(comm, s)
        poison(model, comm)
        first.step()
        second.zero_grad(set_to_none=not in_place)
        mlp_backward(model, comm.rank)
        found = [watched.step(second), watched.step(first)]
        expected = [({"vectors"}, 1, 4.0), ({"matrices"}, 1, 4.0)]
        parallel_assert(comm, found == expected, str(found))


@STAGES
def test_gradients_of_one_that_waits_are_kept_through_the_skip_of_another(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    """What overflowed was the other's alone: both backwards count, as in plain torch."""
    model = MLP()
    first, second = by_shape(model)
    with zeroified(model, (first, second), stage=stage, precision=FP16, topology=topology):
        poison(model, comm, "layers.2.0.weight")
        first.step()
        first.zero_grad()
        before = hpczero.full_gradients(model)["layers.2.0.bias"].clone()
        mlp_backward(model, comm.rank)
        after = hpczero.full_gradients(model)["layers.2.0.bias"]
        parallel_assert(comm, torch.allclose(after, 2 * before, rtol=1e-2), f"{before} {after}")
        parallel_assert(comm, bool(before.any()))


@STAGES
def test_without_a_loss_scale_it_is_an_error_on_all_ranks_whoever_steps(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    first, second = by_shape(model)
    with zeroified(model, (first, second), stage=stage, topology=topology) as sharding:
        before = values(sharding)
        poison(model, comm, "layers.1.0.bias")
        for optimizer in (first, second, first):
            raises_on_all(comm, StepError, "mean gradient has NaN or infinity", optimizer.step)
        parallel_assert(comm, not changed(before, values(sharding)))
        model.zero_grad()
        mlp_backward(model, comm.rank)
        first.step()
        second.step()
        everywhere = set().union(*comm.allgather(changed(before, values(sharding))))
        parallel_assert(comm, everywhere == {"matrices", "vectors"})


def test_too_many_skips_in_a_row_count_backwards_not_steps(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    optimizers = by_shape(model)
    precision = Precision(nonfinite="skip", max_skips=3)
    with zeroified(model, optimizers, precision=precision, topology=topology) as sharding:
        for _ in range(2):
            poison(model, comm)
            for optimizer in optimizers:
                optimizer.step()
        parallel_assert(comm, sharding.skipped_steps == 2)
        poison(model, comm)
        raises_on_all(comm, StepError, "3 steps in a row were skipped", optimizers[1].step)


def test_parts_of_accumulate_survive_zero_grad_of_one_optimizer(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model, plain = MLP(), MLP()
    optimizers, references = by_shape(model), by_shape(plain)
    with zeroified(model, optimizers, topology=topology):
        with hpczero.accumulate(model, 0, 2):
            loss_of(model, comm.rank, 0).backward()
        optimizers[1].zero_grad()
        with hpczero.accumulate(model, 1, 2):
            loss_of(model, comm.rank, 1).backward()
        for part in range(2):
            if part:
                references[1].zero_grad()
            for rank in range(comm.size):
                (loss_of(plain, rank, part) / (2 * comm.size)).backward()
        for optimizer in (*optimizers, *references):
            optimizer.step()
        with hpczero.gathered(model):
            worst = distance(model, plain)
        parallel_assert(comm, worst < TOLERANCE, f"differs by {worst} from torch")
        for optimizer in optimizers:
            optimizer.zero_grad()
        with hpczero.accumulate(model, 0, 2):
            loss_of(model, comm.rank, 0).backward()
        for optimizer in optimizers:  # both: the parts begin anew
            optimizer.zero_grad()
        with hpczero.accumulate(model, 0, 1):
            loss_of(model, comm.rank, 0).backward()
