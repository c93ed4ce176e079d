"""Models that zeroify cannot shard are refused: one clear error, the same on every rank, nothing half done."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hpczero
from examples.convnet import ConvNet
from hpczero.errors import PlanError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, Refusal, adamw, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.fixture
def refused(comm: MPI.Intracomm, topology: Topology) -> Refusal:
    return Refusal(comm, topology)


@pytest.fixture
def model() -> MLP:
    return MLP()


# --- parameters and buffers


def test_mixed_dtypes_in_a_unit(refused: Refusal, model: MLP) -> None:
    model.layers[1][0].bias.data = torch.zeros(15, dtype=torch.bfloat16)  # type: ignore[index]
    said = r"unit 'layers\.1' holds torch\.float32 .*, torch\.bfloat16 \(layers\.1\.0\.bias\)"
    refused(PlanError, said, model, adamw(model), precision="bf16")


def _views(model: MLP, one: Tensor, other: Tensor) -> None:
    model.layers[1][0].weight = nn.Parameter(one)  # type: ignore[index]
    model.layers[2][0].weight = nn.Parameter(other)  # type: ignore[index]


def _rows(model: MLP) -> None:
    both = torch.randn(5, 7)
    _views(model, both[:4], both[2:])


def _columns(model: MLP) -> None:
    both = torch.randn(4, 9)
    _views(model, both[:, :7], both[:, 3:])


def _of_numpy(model: MLP) -> None:
    both = np.zeros(40, np.float32)
    _views(model, torch.from_numpy(both[:28]).view(4, 7), torch.from_numpy(both[20:]).view(4, 5))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("share", [_rows, _columns, _of_numpy])
def test_parameters_that_share_part_of_their_memory(
    refused: Refusal, model: MLP, stage: int, share: Callable[[MLP], None]
) -> None:
    share(model)
    said = r"'layers\.1\.0\.weight' and parameter 'layers\.2\.0\.weight' lie in the same memory"
    refused(PlanError, said, model, adamw(model), stage=stage)


@pytest.mark.parametrize(
    "of", [lambda: torch.randn(1, 7).expand(4, 7), lambda: torch.randn(10).unfold(0, 7, 1)]
)
def test_parameter_with_one_element_at_several_indices(
    refused: Refusal, model: MLP, of: Callable[[], Tensor]
) -> None:
    model.layers[1][0].weight = nn.Parameter(of())  # type: ignore[index]
    refused(
        PlanError, r"'layers\.1\.0\.weight' of shape \(4, 7\) has one element", model, adamw(model)
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_buffer_that_is_a_row_of_a_parameter(refused: Refusal, model: MLP, stage: int) -> None:
    model.register_buffer("row", model.get_parameter("layers.1.0.weight").detach()[1])
    said = r"buffer 'row' of module 'model' is a view of parameter 'layers\.1\.0\.weight'"
    refused(PlanError, said, model, adamw(model), stage=stage)


def test_attribute_beside_a_parameter_in_one_tensor_is_no_view_of_it(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    whole = torch.randn(16, 7, generator=torch.Generator().manual_seed(1))
    model.layers[0][0].weight, model.rest = nn.Parameter(whole[:15]), whole[15]  # type: ignore[index]
    with zeroified(model, adamw(model), stage=3, topology=topology):
        fine = torch.equal(model.rest, whole[15])
    parallel_assert(comm, fine, "values")


def test_gradients_that_are_there_already(refused: Refusal, model: MLP) -> None:
    model(torch.ones(1, 7)).sum().backward()
    refused(PlanError, "has a gradient already, which zeroify would drop", model, adamw(model))


def test_fp64_model(refused: Refusal, model: MLP) -> None:
    model.double()
    refused(PlanError, r"holds torch\.float64, expected torch\.float32", model, adamw(model))


def test_model_that_differs_by_rank(refused: Refusal) -> None:
    model = MLP((7, 15, 3) if refused.comm.rank == 1 else (7, 16, 3))
    refused(PlanError, r"rank\(s\) \[1\] built another model", model, adamw(model))


def test_frozen_parameters_that_differ_by_rank(refused: Refusal, model: MLP) -> None:
    model.layers[0].requires_grad_(refused.comm.rank == 0)
    odd = list(range(1, refused.comm.size))
    refused(PlanError, re.escape(f"rank(s) {odd} built another model"), model, adamw(model))


def test_buffers_that_differ_by_rank(refused: Refusal) -> None:
    # the same parameters: only the broadcast of running statistics would find out, by mixing them up
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if refused.comm.rank == 1:
        model[1] = nn.BatchNorm1d(4, track_running_stats=False)
    refused(PlanError, r"rank\(s\) \[1\] built another model", model, adamw(model))


# --- what other programs have wrapped or cut


class Wrapped(nn.parallel.DistributedDataParallel):
    """As DDP stands around a model; it needs no process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_model_in_ddp(refused: Refusal, model: MLP) -> None:
    said = r"module 'model' is a DistributedDataParallel, .*give zeroify the plain model.*model\.module"
    refused(PlanError, said, Wrapped(model), adamw(model))


def test_part_that_fsdp2_has_cut(refused: Refusal, model: MLP) -> None:
    from torch.distributed.fsdp import FSDPModule

    part = model.layers[0]
    part.__class__ = type("FSDPPart", (FSDPModule, type(part)), {})
    refused(PlanError, r"module 'layers\.0' is a FSDPModule, which", model, adamw(model))


# --- modules


class Numbers(nn.Module):
    """Holds a parameter that cannot be trained."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.values = nn.Parameter(values, requires_grad=False)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
def test_embedding_that_changes_its_own_weight(
    refused: Refusal, stage: int, embedding: Callable[..., nn.Module]
) -> None:
    model = nn.Sequential(embedding(5, 3, max_norm=1.0), nn.Linear(3, 1))
    said = rf"module '0' \({embedding.__name__}\) has max_norm=1, .*max_norm=None"
    refused(PlanError, said, model, adamw(model), stage=stage)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
def test_embedding_with_sparse_gradients(
    refused: Refusal, stage: int, embedding: Callable[..., nn.Module]
) -> None:
    model = nn.Sequential(embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(
        PlanError, r"module '0' .* has sparse=True.*sparse=False", model, optimizer, stage=stage
    )


def test_frozen_embedding_may_be_sparse(comm: MPI.Intracomm, topology: Topology) -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True).requires_grad_(False), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with zeroified(model, optimizer, stage=3, topology=topology):
        model(torch.arange(5)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_parameter_of_whole_numbers(refused: Refusal, dtype: torch.dtype) -> None:
    model = Numbers(torch.ones(4, dtype=dtype))
    said = f"parameter 'values' is {dtype}, .*make it a buffer: register_buffer"
    refused(PlanError, said, model, adamw(model.linear))


def test_parameter_of_complex_numbers(refused: Refusal) -> None:
    model = Numbers(torch.ones(4, dtype=torch.complex64))
    said = r"parameter 'values' is torch.complex64, .*torch\.view_as_real"
    refused(PlanError, said, model, adamw(model.linear))


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_module_that_has_seen_no_input(comm: MPI.Intracomm, topology: Topology) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"parameter '1\.weight' is uninitialized: .* Call the model once before"
    raises_on_all(
        comm, PlanError, said, lambda: hpczero.zeroify(model, optimizer, topology=topology)
    )


NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral_norm of old": torch.nn.utils.spectral_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "orthogonal": torch.nn.utils.parametrizations.orthogonal,
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("norm", NORMED.values(), ids=NORMED)
def test_weight_made_from_fp32_buffers_in_half_precision(
    refused: Refusal, norm: Callable[[nn.Module], nn.Module], precision: str
) -> None:
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    said = rf"buffers in fp32 .*does not mix them with {precision} weights; train in fp32"
    refused(PlanError, said, model, adamw(model), precision=precision)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_of_old_on_the_meta_device(refused: Refusal) -> None:
    with torch.device("meta"):
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)))
    said = r"module '0' \(Linear\) has torch.nn.utils.weight_norm .*parametrizations.weight_norm"
    refused(PlanError, said, model, adamw(model), initialize=constant)


# --- meta device


def on_meta() -> MLP:
    with torch.device("meta"):
        return MLP()


def constant(name: str, tensor: Tensor) -> None:
    tensor.fill_(0.5)


def test_meta_model_without_initialize(refused: Refusal) -> None:
    model = on_meta()
    said = r"6 parameter\(s\) are on the meta device, first 'layers\.0\.0\.weight'; pass initialize"
    refused(PlanError, said, model, adamw(model))


def test_buffer_on_the_meta_device(refused: Refusal) -> None:
    with torch.device("meta"):
        model = ConvNet(width=2, blocks=1)
    said = "buffer.* on the meta device, first 'stem_norm.running_mean'"
    refused(PlanError, said, model, adamw(model), initialize=constant)


def test_initialize_that_differs_by_rank(refused: Refusal) -> None:
    def initialize(name: str, tensor: Tensor) -> None:
        tensor.fill_(float(refused.comm.rank == 1))

    model = on_meta()
    said = r"initialize gave different values for unit 'layers\.0' .*keyed by \(seed, name\)"
    refused(PlanError, said, model, adamw(model), initialize=initialize)


def test_initialize_that_fails_on_one_rank(comm: MPI.Intracomm, topology: Topology) -> None:
    def initialize(name: str, tensor: Tensor) -> None:
        if comm.rank == 1 and name == "layers.1.0.bias":
            raise PlanError("no such weight: layers.1.0.bias")
        tensor.zero_()

    model = on_meta()
    optimizer = adamw(model)
    raises_on_all(
        comm,
        PlanError,
        r"on rank\(s\) 1, could not initialise unit 'layers\.1': no such weight",
        lambda: hpczero.zeroify(model, optimizer, topology=topology, initialize=initialize),
    )
    # units before it were filled already; what is left is refused, not half used
    with pytest.raises(PlanError, match="MLP was not zeroified"):
        hpczero.sharding(model)
