"""Changes of whole parameters that would be lost, or reach some ranks only: found, and refused on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import StepError
from hpczero.zero.units.guard import _guarded
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import (
    MLP,
    adamw,
    check_trains,
    mlp_backward,
    mlp_input,
    raises_on_all,
    zeroified,
)

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

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
def test_changes_outside_gathered_are_not_saved_without_a_word(
    comm: MPI.Intracomm,
    topology: Topology,
    tmp_path: Path,
    stage: int,
    transport: str,
    change: Callable[[nn.Module], None],
) -> None:
    folder = Path(comm.bcast(str(tmp_path), root=0))
    model = MLP(sizes=SQUARE)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, transport=transport, topology=topology):
        if comm.rank == 1:
            change(model)
        said = r"rank 1: parameter 'layers\.0\.0\.weight' (was changed in place|got new memory)"
        for use in (
            lambda: hpczero.full_state_dict(model),
            lambda: hpczero.checkpoint.save(folder, model, optimizer, step=1),
        ):
            raises_on_all(comm, StepError, said, use)


@STAGES
def test_values_are_read_inside_gathered_and_while_frozen(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        plain = MLP().state_dict()
        with hpczero.gathered(model):
            state = hpczero.full_state_dict(model)
        model.requires_grad_(False)  # for a while
        frozen = hpczero.full_state_dict(model)
        fine = all(
            found is None or all(torch.equal(found[n], plain[n]) for n in plain)
            for found in (state, frozen)
        )
        parallel_assert(comm, fine)


# --- inside gathered


@STAGES
@TRANSPORTS
def test_transposed_values_are_taken_over(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model, plain = MLP(sizes=SQUARE), MLP(sizes=SQUARE)
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, transport=transport, topology=topology):
        with hpczero.gathered(model, modifier_rank=0):
            _transposed(model)
        _transposed(plain)
        with torch.no_grad():
            parallel_assert(comm, torch.allclose(model(mlp_input(0)), plain(mlp_input(0))))
        check_trains(comm, model, optimizer, MLP(sizes=SQUARE))

        def unannounced() -> None:
            with hpczero.gathered(model):
                _transposed(model)

        raises_on_all(comm, StepError, "changed inside gathered", unannounced)


def _part_of_another(model: nn.Module) -> None:
    one, other = model.get_parameter("layers.0.0.weight"), model.get_parameter("layers.2.0.weight")
    other.data = one.data[:3]


def _one_for_both(model: nn.Module) -> None:
    one, other = model.get_parameter("layers.0.0.weight"), model.get_parameter("layers.2.0.weight")
    value = torch.randn(7, 7)
    one.data, other.data = value, value.t()[:3]


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("tie", [_part_of_another, _one_for_both])
def test_parameters_that_share_memory_are_refused(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    transport: str,
    tie: Callable[[nn.Module], None],
) -> None:
    model = MLP(sizes=SQUARE)
    with zeroified(model, adamw(model), stage=stage, transport=transport, topology=topology):

        def change() -> None:
            with hpczero.gathered(model, modifier_rank=0):
                if comm.rank == 0:
                    tie(model)

        said = (
            r"rank 0: parameters 'layers\.(0|2)\.0\.weight' and 'layers\.(0|2)\.0\.weight' share memory"
            r".*tie them before zeroify"
        )
        raises_on_all(comm, StepError, said, change)


@STAGES
def test_columns_of_one_matrix_are_not_shared(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP(sizes=SQUARE)
    optimizer = adamw(model)
    both = torch.randn(7, 14, generator=torch.Generator().manual_seed(8))
    with zeroified(model, optimizer, stage=stage, topology=topology):
        with hpczero.gathered(model, modifier_rank=0):
            parts = both.chunk(2, dim=1)
            for name, part in zip(("layers.0.0.weight", "layers.1.0.weight"), parts, strict=True):
                model.get_parameter(name).data = part
        state = hpczero.full_state_dict(model)
        fine = state is None or torch.equal(state["layers.1.0.weight"], both[:, 7:])
        parallel_assert(comm, fine)
        check_trains(comm, model, optimizer, MLP(sizes=SQUARE))


@pytest.mark.parametrize("stage", [0, 2])
def test_tensors_swapped_outside_are_refused_by_the_step(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        mlp_backward(model, comm.rank)
        parameter = next(model.parameters())
        _guarded.pop(parameter)  # torch itself refuses while there is a weak reference
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        raises_on_all(comm, StepError, "torch swapped the tensor", optimizer.step)


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
def test_changes_of_a_block_that_did_not_end_well_stand_nowhere(
    comm: MPI.Intracomm,
    topology: Topology,
    tmp_path: Path,
    stage: int,
    transport: str,
    change: Callable[[nn.Module], None],
    leave: Callable[[nn.Module, Callable[[nn.Module], None]], None],
    way_out: str,
) -> None:
    folder = Path(comm.bcast(str(tmp_path), root=0))
    model = MLP()
    optimizer = adamw(model)

    def read() -> None:
        with hpczero.gathered(model):
            pass

    with zeroified(model, optimizer, stage=stage, transport=transport, topology=topology):
        hpczero.checkpoint.save(folder, model, optimizer, step=0)
        mlp_backward(model, comm.rank)
        leave(model, change)
        said = r"the last `with hpczero\.gathered\(model\)` block was left.*load a checkpoint"
        for use in (
            lambda: hpczero.full_state_dict(model),
            lambda: hpczero.checkpoint.save(folder, model, optimizer, step=1),
            optimizer.step,
            read,
        ):
            raises_on_all(comm, StepError, said, use)
        with pytest.raises(StepError, match="block was left"):
            model(mlp_input(0))
        if way_out == "checkpoint":
            hpczero.checkpoint.load(folder, model, optimizer)
        else:
            with hpczero.gathered(model, modifier_rank=0):
                model.load_state_dict(MLP().state_dict())
        with torch.no_grad():
            parallel_assert(comm, torch.equal(model(mlp_input(0)), MLP()(mlp_input(0))))
        check_trains(comm, model, optimizer)


@STAGES
@TRANSPORTS
def test_a_block_left_without_a_change_is_forgotten(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, transport=transport, topology=topology):
        with torch.no_grad():
            _leave_by_exception(model, lambda model: model(mlp_input(0)))
        check_trains(comm, model, optimizer)


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
def test_buffers_of_the_modifier_rank_reach_all_ranks(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model, root = Scaled(), comm.size - 1
    with zeroified(model, adamw(model), stage=stage, transport=transport, topology=topology):
        with hpczero.gathered(model, modifier_rank=root):
            if comm.rank == root:
                state = {name: value.clone() * 3 for name, value in model.state_dict().items()}
                model.load_state_dict(state)
        parallel_assert(comm, bool((model.get_buffer("scale") == 3).all()))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("value", [torch.ones(7).double(), torch.ones(2), None])
def test_buffers_that_one_rank_replaced_are_refused_by_name(
    comm: MPI.Intracomm, topology: Topology, stage: int, value: Tensor | None
) -> None:
    model = Scaled()
    with zeroified(model, adamw(model), stage=stage, topology=topology):

        def replace() -> None:
            with hpczero.gathered(model, modifier_rank=1):
                if comm.rank == 1:
                    model._buffers["scale"] = value

        said = r"rank 0: .*buffer scale \(7,\) torch\.float32.*where rank 1 has|on rank\(s\).*buffer scale"
        raises_on_all(comm, StepError, said, replace)


# --- parameters on the meta device


@STAGES
def test_a_model_on_the_meta_device_is_filled(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    with torch.device("meta"):
        model = nn.Linear(7, 3)
    options: dict[str, Any] = {"initialize": lambda _, values: values.fill_(0.5)}
    with zeroified(model, adamw(model), stage=stage, topology=topology, **options):
        state = hpczero.full_state_dict(model)
        parallel_assert(comm, state is None or bool((state["weight"] == 0.5).all()))


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_numpy_or_a_pointer_writes_in_gathered_is_seen(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str, precision: str
) -> None:
    model = MLP()
    optimizer = adamw(model)
    options: dict[str, Any] = {"stage": stage, "transport": transport, "precision": precision}

    def write() -> None:
        value = model.get_parameter("layers.1.0.weight").detach()
        value.view(torch.int16).numpy()[0, 0] ^= 1  # no version counter sees it

    def unannounced() -> None:
        with hpczero.gathered(model):
            if comm.rank == comm.size - 1:
                write()

    with zeroified(model, optimizer, topology=topology, **options):
        with hpczero.gathered(model):
            pass
        raises_on_all(comm, StepError, "changed inside gathered", unannounced)
        with hpczero.gathered(model, modifier_rank=0):
            if comm.rank == 0:
                write()
        with hpczero.gathered(model):
            values = [parameter.detach().clone() for parameter in model.parameters()]
        first = comm.bcast(values)
        same = all(torch.equal(a, b) for a, b in zip(values, first, strict=True))
        parallel_assert(comm, same, "ranks differ")
