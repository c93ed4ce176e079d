"""Whole parameters outside the model: read, and changed on one rank for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import ConfigError, StepError
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
TRANSPORTS = pytest.mark.parametrize("transport", ["auto", "flat"])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


def equal_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def masters(model: nn.Module) -> dict[str, Tensor]:
    """fp32 values by name on every rank. Collective."""
    return {
        slot.name: flat[slot.offset : slot.stop].view(slot.shape)
        for unit in hpczero.sharding(model).units
        for flat in [unit.gather_values()]
        for slot in unit.spec.layout.slots
    }


# --- reading


@STAGES
@PRECISIONS
def test_parameters_are_whole_inside_and_given_back_outside(
    comm: MPI.Intracomm, topology: Topology, stage: int, precision: str
) -> None:
    model, plain = MLP(), MLP()
    options: dict[str, Any] = {"stage": stage, "precision": precision, "topology": topology}
    with zeroified(model, adamw(model), **options) as sharding:
        in_flight = "unsharded"
        with hpczero.gathered(model):
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            parallel_assert(comm, all(torch.equal(a, b.to(dtype)) for a, b in pairs))
            norm = sum(float(p.detach().float().norm()) for p in model.parameters())
        parallel_assert(comm, comm.allgather(norm) == [norm] * comm.size)
        parallel_assert(comm, sharding.memory.current.get(in_flight, 0) == 0)
        model(mlp_input(comm.rank)).sum().backward()  # and reading is not a change
        sharding.optimizer.step()  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", [0, 3])
def test_forward_inside_leaves_the_parameters_whole(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model, plain, x = MLP(), MLP(), mlp_input(0)
    with zeroified(model, adamw(model), stage=stage, topology=topology) as sharding:
        with torch.no_grad(), hpczero.gathered(model):
            with hpczero.gathered(model):
                parallel_assert(comm, torch.equal(model(x), plain(x)))
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            parallel_assert(comm, all(torch.equal(a, b) for a, b in pairs))
        parallel_assert(comm, sharding.memory.current.get("unsharded", 0) == 0)


# --- changing


@STAGES
@PRECISIONS
def test_changes_of_the_modifier_rank_reach_all_ranks_and_the_masters(
    comm: MPI.Intracomm, topology: Topology, stage: int, precision: str
) -> None:
    model = MLP()
    model.layers[0].requires_grad_(False)
    optimizer, root = adamw(model), comm.size - 1
    options: dict[str, Any] = {"stage": stage, "precision": precision, "topology": topology}
    with zeroified(model, optimizer, **options):
        before = masters(model)
        changed = ("layers.0.0.weight", "layers.2.0.bias")  # frozen, trainable
        with hpczero.gathered(model, modifier_rank=root), torch.no_grad():
            for name in changed:
                model.get_parameter(name).fill_(0.75 if comm.rank == root else -1.0)
            with hpczero.gathered(model):  # of a helper that reads
                pass
        after = masters(model)
        for name, value in after.items():
            # what was not touched keeps its fp32 digits
            expected = torch.full_like(value, 0.75) if name in changed else before[name]
            parallel_assert(comm, torch.equal(value, expected), name)
        model(mlp_input(comm.rank)).sum().backward()
        optimizer.step()  # is not refused, and starts from the new values
        moved = (masters(model)["layers.2.0.bias"] - 0.75).abs()
        parallel_assert(comm, bool(((moved > 0) & (moved < 0.02)).all()), str(moved))


@STAGES
def test_change_without_a_modifier_rank_is_refused(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        before = masters(model)

        def change() -> None:
            with hpczero.gathered(model), hpczero.gathered(model), torch.no_grad():
                if comm.rank == 1:
                    next(model.parameters()).zero_()

        said = r"changed inside gathered\(model\) without a modifier_rank.*modifier_rank=0"
        raises_on_all(comm, StepError, said, change)
        with hpczero.gathered(model, modifier_rank=0):  # makes all ranks equal again
            pass
        parallel_assert(comm, equal_state(masters(model), before))


def _by_vector(model: torch.nn.Module) -> None:
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(vector * 0.5, model.parameters())


def _by_data(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("halve", [_by_vector, _by_data], ids=lambda act: act.__name__)
def test_values_in_other_memory_are_taken_over(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    transport: str,
    halve: Callable[[torch.nn.Module], None],
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology, transport=transport):
        before = masters(model)
        with hpczero.gathered(model, modifier_rank=0):
            halve(model)
        expected = {name: value * 0.5 for name, value in before.items()}
        parallel_assert(comm, equal_state(masters(model), expected))
        mlp_backward(model, comm.rank)
        optimizer.step()

        def unannounced() -> None:
            with hpczero.gathered(model):
                halve(model)

        raises_on_all(comm, StepError, "changed inside gathered", unannounced)


def _swap(model: torch.nn.Module) -> None:
    one, other = model.get_parameter("layers.0.0.weight"), model.get_parameter("layers.1.0.weight")
    one.data, other.data = other.data, one.data


@STAGES
@TRANSPORTS
def test_parameters_exchange_their_values(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model = MLP(sizes=(7, 7, 7, 3))
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology, transport=transport):
        before = masters(model)
        with hpczero.gathered(model, modifier_rank=0):
            _swap(model)
        one, other = "layers.0.0.weight", "layers.1.0.weight"
        expected = {**before, one: before[other], other: before[one]}
        parallel_assert(comm, equal_state(masters(model), expected))
        check_trains(comm, model, optimizer, MLP(sizes=(7, 7, 7, 3)))


@STAGES
@TRANSPORTS
def test_a_backup_kept_by_data_survives_what_took_its_place(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model = MLP()
    optimizer = adamw(model)
    backup: dict[str, Tensor] = {}
    with zeroified(model, optimizer, stage=stage, topology=topology, transport=transport):
        mlp_backward(model, comm.rank)
        optimizer.step()
        optimizer.zero_grad()
        before = masters(model)
        with hpczero.gathered(model, modifier_rank=0):
            for name, parameter in model.named_parameters():
                backup[name] = parameter.data
                parameter.data = torch.zeros_like(parameter)
        parallel_assert(comm, not any(bool(v.any()) for v in masters(model).values()))
        with hpczero.gathered(model, modifier_rank=0):
            for name, parameter in model.named_parameters():
                parameter.data = backup[name]
        parallel_assert(comm, equal_state(masters(model), before))
        check_trains(comm, model, optimizer)


@STAGES
def test_values_of_another_dtype_are_refused_on_all_ranks(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=stage, topology=topology):

        def widen() -> None:
            with hpczero.gathered(model, modifier_rank=0):
                if comm.rank == 0:
                    parameter = next(model.parameters())
                    parameter.data = parameter.data.double()

        raises_on_all(comm, StepError, "was given torch.float64", widen)


@pytest.mark.parametrize("modifier_rank", [-1, 99])
def test_a_modifier_rank_that_is_none_is_refused(
    comm: MPI.Intracomm, topology: Topology, modifier_rank: int
) -> None:
    model = MLP()
    with (
        zeroified(model, adamw(model), stage=3, topology=topology),
        pytest.raises(ConfigError, match="modifier_rank: got"),
        hpczero.gathered(model, modifier_rank=modifier_rank),
    ):
        pass


@STAGES
def test_changes_are_used_by_a_forward_inside_and_kept(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model, other = MLP(), MLP(seed=77)
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        with hpczero.gathered(model, modifier_rank=1), torch.no_grad():
            model.load_state_dict(other.state_dict())
            parallel_assert(comm, torch.equal(model(mlp_input(0)), other(mlp_input(0))))
        parallel_assert(comm, equal_state(masters(model), dict(other.named_parameters())))


@pytest.mark.parametrize("stage", [0, 3])
def test_step_inside_is_refused(comm: MPI.Intracomm, topology: Topology, stage: int) -> None:
    # at stage 3 the values written back at the end would be those from before the step
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        model(mlp_input(comm.rank)).sum().backward()
        with hpczero.gathered(model, modifier_rank=0):
            said = r"optimizer\.step\(\) inside `with hpczero\.gathered"
            raises_on_all(comm, StepError, said, optimizer.step)
        optimizer.step()


def test_weights_of_a_plain_model_can_be_loaded_inside(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model, other = MLP(), MLP(seed=77)
    with zeroified(model, adamw(model), stage=3, topology=topology):
        with hpczero.gathered(model, modifier_rank=0):
            if comm.rank == 0:
                model.load_state_dict(other.state_dict())
        parallel_assert(comm, torch.equal(model(mlp_input(0)), other(mlp_input(0))))


@STAGES
def test_state_dict_taken_inside_can_be_used_afterwards(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = MLP()
    model.tied = model.layers[1]
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        with hpczero.gathered(model):
            state = model.state_dict()
        parallel_assert(comm, equal_state(state, plain))  # at stage 3 views would crash here
        shared = state["tied.0.weight"].data_ptr() == state["layers.1.0.weight"].data_ptr()
        parallel_assert(comm, shared)


@STAGES
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
def test_gathered_in_inference_mode_leaves_a_model_that_trains(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    model = MLP()
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, transport=transport, topology=topology):
        expected = model(mlp_input(0)).detach()
        with torch.inference_mode(), hpczero.gathered(model):
            parallel_assert(comm, torch.equal(model(mlp_input(0)), expected))
        with torch.inference_mode(), hpczero.gathered(model, modifier_rank=0):
            next(model.parameters()).mul_(0.5)
        check_trains(comm, model, optimizer)


@STAGES
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
@pytest.mark.parametrize("place", ["block", "layer", "model"])
@pytest.mark.parametrize("changes", [False, True])
def test_gathered_inside_of_a_forward_leaves_what_is_in_use(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    transport: str,
    place: str,
    changes: bool,
) -> None:
    model = MLP()
    seen: list[float] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        with torch.no_grad(), hpczero.gathered(model, modifier_rank=0 if changes else None):
            seen.append(float(model.get_parameter("layers.2.0.weight").sum()))

    block = model.get_submodule("layers.1")
    chosen = {"block": block, "layer": block.get_submodule("0"), "model": model}[place]
    optimizer = adamw(model)
    with zeroified(model, optimizer, stage=stage, topology=topology, transport=transport):
        chosen.register_forward_hook(look)
        check_trains(comm, model, optimizer, MLP())
        held = [u.spec.name for u in hpczero.sharding(model).units if u.whole.state.name == "WHOLE"]
        parallel_assert(comm, not held or stage < 3, f"still whole: {held}")
    parallel_assert(comm, bool(seen))
