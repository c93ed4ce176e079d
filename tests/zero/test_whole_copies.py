"""Copies of the whole model: values under the model's own names, mean gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hpczero
from examples.convnet import ConvNet
from hpczero.plan.layout import ShardLayout
from hpczero.zero.units.gradients import whole_copy
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_input, tiny_gpt, tiny_tokens, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
PRECISIONS = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@STAGES
@PRECISIONS
def test_full_state_dict_loads_into_a_plain_model_with_tied_names(
    comm: MPI.Intracomm, topology: Topology, stage: int, precision: str
) -> None:
    model = tiny_gpt()
    optimizer, tokens = adamw(model), tiny_tokens(comm.rank)
    options: dict[str, Any] = {"stage": stage, "precision": precision, "topology": topology}
    with zeroified(model, optimizer, **options):
        model(tokens, tokens).backward()
        optimizer.step()
        state = hpczero.full_state_dict(model)
        parallel_assert(comm, (state is not None) == (comm.rank == 0))
        plain = tiny_gpt(seed=5)
        fine = True
        if state is not None:
            fine = all(value.dtype is torch.float32 for value in state.values())
            fine = fine and state["lm_head.weight"] is state["wte.weight"]
            fine = fine and list(state) == list(plain.state_dict())
            plain.load_state_dict(state)  # strict
        parallel_assert(comm, fine)
        if precision == "fp32":
            trained = model(tiny_tokens(0)).detach()
            same = comm.rank > 0 or torch.equal(plain(tiny_tokens(0)), trained)
            parallel_assert(comm, same, "the copy computes something else")


@pytest.mark.parametrize("stage", [0, 3])
def test_full_state_dict_has_the_buffers(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    torch.manual_seed(1)
    model = ConvNet(width=2, blocks=2)
    optimizer = adamw(model)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(comm.rank))
    labels = torch.arange(4)
    with zeroified(model, optimizer, stage=stage, topology=topology):
        model(images, labels).backward()
        optimizer.step()
        state = hpczero.full_state_dict(model)
        mean = model.get_buffer("stem_norm.running_mean")
        # the running statistics of rank 0, on all ranks after the step
        parallel_assert(comm, comm.bcast(mean.tolist(), root=0) == mean.tolist())
        model.eval()
        output = model(images).detach()
        if state is not None:
            plain = ConvNet(width=2, blocks=2)
            plain.load_state_dict(state)  # strict: buffers and all
            plain.eval()
            fine = float(state["stem_norm.running_mean"].abs().sum()) > 0
            fine = fine and int(state["stem_norm.num_batches_tracked"]) == 1
            fine = fine and torch.allclose(plain(images), output, rtol=1e-6)
        else:
            fine = comm.rank > 0
        parallel_assert(comm, fine)


@pytest.mark.parametrize("stage", [0, 3])
def test_full_state_dict_is_a_copy(comm: MPI.Intracomm, topology: Topology, stage: int) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        state = hpczero.full_state_dict(model)
        if state is not None:
            for value in state.values():
                value.zero_()
        again = hpczero.full_state_dict(model)
        plain = dict(MLP().named_parameters())
        fine = again is None or all(torch.equal(again[name], plain[name]) for name in plain)
        parallel_assert(comm, fine)


def test_full_gradients_are_the_mean_over_ranks_on_every_rank(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model, plain = MLP(), MLP()
    model.layers[0].requires_grad_(False)
    losses = [plain(mlp_input(rank)).square().sum() for rank in range(comm.size)]
    (torch.stack(losses).sum() / comm.size).backward()
    with zeroified(model, adamw(model), stage=3, topology=topology):
        parallel_assert(comm, hpczero.full_gradients(model) == {})
        model(mlp_input(comm.rank)).square().sum().backward()
        found = hpczero.full_gradients(model)
        trainable = [name for name, _ in plain.named_parameters() if "layers.0" not in name]
        parallel_assert(comm, list(found) == trainable, str(list(found)))
        for name, gradient in found.items():
            expected = plain.get_parameter(name).grad
            assert expected is not None
            close = torch.allclose(gradient, expected, rtol=1e-5, atol=1e-6)
            parallel_assert(comm, close, name)


class Made(TorchDispatchMode):
    """Counts the operations that make whole tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_copy_of_what_every_rank_has_is_made_once(
    comm: MPI.Intracomm, dtype: torch.dtype
) -> None:
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
def test_full_state_dict_of_a_model_whose_own_takes_no_arguments(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = OwnState()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        state = hpczero.full_state_dict(model)
    plain = OwnState().state_dict()
    fine = state is None or list(state) == list(plain)
    fine = fine and (state is None or all(torch.equal(state[k], plain[k]) for k in plain))
    parallel_assert(comm, fine)
