"""What goes wrong in a step is one agreed error, or one agreed skip; nothing is updated, and zero_grad recovers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.errors import ConfigError, StepError
from hpczero.plan.precision import LossScale, Precision
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    MLP,
    adamw,
    check_trains,
    mlp_backward,
    mlp_input,
    raises_on_all,
    same,
    values,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


# --- the step


@STAGES
def test_unreduced_gradients_of_no_sync(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        before = values(sharding)
        with hpczero.no_sync(model):
            mlp_backward(model, comm.rank)
        said = "3 unit.*never reduced over ranks; run the last backward .* outside no_sync"
        raises_on_all(comm, StepError, said, optimizer.step)
        parallel_assert(comm, same(values(sharding), before) and not optimizer.state)
        check_trains(comm, model, optimizer)


def test_unreduced_gradients_on_one_rank(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=2, topology=topology):
        if comm.rank == 1:  # at stage 2 nothing is gathered, so this does not hang
            with hpczero.no_sync(model):
                mlp_backward(model, comm.rank)
        said = r"on rank\(s\) 1, could not take the step: rank 1: 3 unit"
        raises_on_all(comm, StepError, said, optimizer.step)


def test_clipping_with_unreduced_gradients(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=3, topology=topology):
        with hpczero.no_sync(model):
            mlp_backward(model, comm.rank)
        with pytest.raises(StepError, match="outside no_sync"):
            hpczero.clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize(
    "options", [{"max_norm": 0.0}, {"max_norm": float("nan")}, {"max_norm": -1}]
)
def test_bad_max_norm(comm: MPI.Intracomm, topology: Topology, options: dict[str, float]) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=3, topology=topology):
        with pytest.raises(ConfigError, match=r"max_norm: got .*, expected a number above 0"):
            hpczero.clip_grad_norm_(model, **options)
        with pytest.raises(ConfigError, match=r"norm_type: got 1\.0, expected 2\.0 or inf"):
            hpczero.clip_grad_norm_(model, 1.0, norm_type=1.0)


def test_closure(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=3, topology=topology):
        for call in (
            lambda: optimizer.step(lambda: 0.0),
            lambda: optimizer.step(closure=lambda: 0.0),
        ):
            with pytest.raises(ConfigError, match="call backward first"):
                call()


# --- parameters behind our back


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("ranks", ["all", "one"])
def test_change_in_place_outside_gathered(
    comm: MPI.Intracomm, topology: Topology, stage: int, ranks: str
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        mlp_backward(model, comm.rank)
        if ranks == "all" or comm.rank == 1:
            with torch.no_grad():
                model.layers[1].get_parameter("0.bias").add_(1.0)
        said = r"'layers\.1\.0\.bias' was changed in place .*gathered\(model, modifier_rank=0\)"
        raises_on_all(comm, StepError, said, optimizer.step)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "load_state_dict": lambda model: model.load_state_dict(MLP(seed=9).state_dict()),
    "initialisation": lambda model: nn.init.zeros_(next(model.parameters())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_stock_ways_to_change_parameters_are_noticed(
    comm: MPI.Intracomm, topology: Topology, change: Callable[[nn.Module], object]
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=1, topology=topology):
        change(model)
        mlp_backward(model, comm.rank)
        raises_on_all(comm, StepError, "'layers.0.0.weight' was changed in place", optimizer.step)


@pytest.mark.parametrize("stage", [0, 2])
def test_module_inside_a_unit_that_was_cast(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    # the model and its units refuse at once: test_moves_and_copies
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        model.get_submodule("layers.0.0").double()
        raises_on_all(comm, StepError, "'layers.0.0.weight' got new memory", optimizer.step)


@pytest.mark.parametrize("transport", ["window", "flat"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_that_torch_moves_to_shared_memory(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    """``share_memory`` changes the address of a storage, and with it of all views."""
    found = []
    for shared in (False, True):
        model = MLP()
        optimizer = adamw(model)
        with zeroified(model, optimizer, stage=stage, topology=topology, transport=transport):
            if shared:
                model.share_memory()
            for _ in range(2):
                mlp_backward(model, comm.rank)
                if shared and stage and transport == "window":
                    said = "moved the parameters of .* to other memory .*HPCZERO_TRANSPORT=flat"
                    raises_on_all(comm, StepError, said, optimizer.step)
                    return
                optimizer.step()
                optimizer.zero_grad()
            found.append(hpczero.full_state_dict(model) or {})
    same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    parallel_assert(comm, same)


@STAGES
def test_frozen_parameter_that_was_changed_in_place(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    model.layers[1].requires_grad_(False)
    optimizer = adamw(model)
    frozen = model.layers[1].get_parameter("0.bias")

    def change(*_: object) -> None:  # inside the forward, where it is whole at every stage
        with torch.no_grad():
            frozen.add_(1.0)

    with zeroified(model, optimizer, stage=stage, topology=topology):
        handle = model.layers[1][0].register_forward_pre_hook(change)  # type: ignore[index]
        mlp_backward(model, comm.rank)
        handle.remove()
        said = r"parameter 'layers\.1\.0\.bias' was changed in place"
        raises_on_all(comm, StepError, said, optimizer.step)


# --- gradients that are not finite


def poisoned(model: nn.Module, comm: MPI.Intracomm, *, value: float = float("nan")) -> None:
    """A backward in which the last rank's loss is not a number."""
    factor = value if comm.rank == comm.size - 1 else 1.0
    (model(mlp_input(comm.rank)).sum() * factor).backward()


@STAGES
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_gradient_on_one_rank_is_an_error_on_all(
    comm: MPI.Intracomm, topology: Topology, stage: int, value: float
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        before = values(sharding)
        poisoned(model, comm, value=value)
        norm = hpczero.clip_grad_norm_(model, 1.0)  # which must not hide it
        parallel_assert(comm, not math.isfinite(norm), str(norm))
        said = "gradient has NaN or infinity .*nonfinite='skip'.*Nothing was updated"
        raises_on_all(comm, StepError, said, optimizer.step)
        parallel_assert(comm, same(values(sharding), before) and not optimizer.state)
        check_trains(comm, model, optimizer)


@STAGES
def test_nonfinite_step_is_skipped_by_all_ranks_together(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = adamw(model)
    precision = Precision(nonfinite="skip")
    options: dict[str, Any] = {"stage": stage, "precision": precision, "topology": topology}
    with zeroified(model, optimizer, **options) as sharding:
        before = values(sharding)
        poisoned(model, comm)
        optimizer.step()
        parallel_assert(comm, sharding.skipped_steps == 1)
        parallel_assert(comm, same(values(sharding), before), "a skipped step changed something")
        check_trains(comm, model, optimizer)
        parallel_assert(comm, sharding.skipped_steps == 1)


def test_too_many_skips_in_a_row_are_an_error(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    optimizer = adamw(model)
    precision = Precision(nonfinite="skip", max_skips=3)
    with zeroified(model, optimizer, stage=2, precision=precision, topology=topology) as sharding:
        for poison in (True, True, False, True, True):  # a good step in between starts anew
            (poisoned(model, comm) if poison else mlp_backward(model, comm.rank))
            optimizer.step()
            optimizer.zero_grad()
        poisoned(model, comm)
        raises_on_all(comm, StepError, "3 steps in a row were skipped", optimizer.step)
        parallel_assert(comm, sharding.skipped_steps == 5)


def test_overflow_halves_the_loss_scale_on_all_ranks_until_its_minimum(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    optimizer = adamw(model)
    precision = Precision(param="fp16", loss_scale=LossScale(initial=4.0, growth_interval=2))
    with zeroified(model, optimizer, stage=3, precision=precision, topology=topology) as sharding:
        scales = []
        for poison in (True, False, False, True, True):
            (poisoned(model, comm) if poison else mlp_backward(model, comm.rank))
            optimizer.step()
            optimizer.zero_grad()
            scales.append(sharding.loss_scale)
        parallel_assert(comm, scales == [2.0, 2.0, 4.0, 2.0, 1.0], str(scales))
        poisoned(model, comm)
        raises_on_all(comm, StepError, "loss scale is at its minimum 1", optimizer.step)


@STAGES
def test_step_without_a_backward_changes_nothing(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        before = values(sharding)
        optimizer.step()
        parallel_assert(comm, same(values(sharding), before))


# --- options that went apart


@STAGES
def test_learning_rate_that_differs_by_rank(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for step in range(3):  # rank 1 alone makes no progress
            scheduler.step(1.0 if comm.rank == 1 else -float(step))
        before = values(sharding)
        mlp_backward(model, comm.rank)
        said = "rank 1: the optimizer has lr=0.0025 in group 0, where rank 0 has lr=0.01 in group 0"
        raises_on_all(comm, StepError, said, optimizer.step)
        parallel_assert(comm, same(values(sharding), before))
        optimizer.param_groups[0].update(lr=1e-2)
        check_trains(comm, model, optimizer)


# --- what came in after zeroify


@STAGES
@pytest.mark.parametrize("ranks", ["all", "one"])
def test_module_replaced_after_zeroify(
    comm: MPI.Intracomm, topology: Topology, stage: int, ranks: str
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology) as sharding:
        before = values(sharding)
        if ranks == "all" or comm.rank == 1:
            model.layers[1].late = nn.Linear(15, 15)
        mlp_backward(model, comm.rank)
        where = (
            "rank 0: " if ranks == "all" else r"on rank\(s\) 1, could not take the step: rank 1: "
        )
        said = f"{where}parameter 'layers.1.late.weight' came into the model after zeroify"
        raises_on_all(comm, StepError, said, optimizer.step)
        parallel_assert(comm, same(values(sharding), before))
        if hasattr(model.layers[1], "late"):
            del model.layers[1].late
        optimizer.zero_grad()
        check_trains(comm, model, optimizer)


@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_assigned_by_load_state_dict(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        model.load_state_dict(MLP(seed=8).state_dict(), assign=True)
        mlp_backward(model, comm.rank)
        said = "parameter 'layers.0.0.weight' came into the model after zeroify"
        raises_on_all(comm, StepError, said, optimizer.step)


@STAGES
def test_parameter_group_added_after_zeroify(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model, late = MLP(), nn.Parameter(torch.ones(3))
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        optimizer.add_param_group({"params": [late]})
        (model(mlp_input(comm.rank)) * late).square().sum().backward()
        said = r"group 1 of the optimizer has 1 parameter\(s\) put in after zeroify"
        raises_on_all(comm, StepError, said, optimizer.step)
        parallel_assert(comm, bool((late == 1).all()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_backward_of_a_graph_that_was_made_before_the_step(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    # plain torch refuses it too: the saved weights are not there any more
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        early = model(mlp_input(comm.rank)).sum()
        mlp_backward(model, comm.rank)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        model.zero_grad()
