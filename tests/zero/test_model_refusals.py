"""Models that zeroify cannot shard are refused: one clear error, the same on every rank, nothing half done."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hpczero
from examples.convnet import ConvNet
from hpczero.errors import PlanError
from tests.helpers.small_models import MLP, adamw
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.fixture
def model() -> MLP:
    return MLP()


# --- parameters and buffers


def test_mixed_dtypes_in_a_unit(world: World, model):
    model.layers[1][0].bias.data = torch.zeros(15, dtype=torch.bfloat16)
    said = r"unit 'layers\.1' holds torch\.float32 .*, torch\.bfloat16 \(layers\.1\.0\.bias\)"
    world.refuses(PlanError, said, model, adamw(model), precision="bf16")


def test_model_that_is_refused_for_inference_trains_on(world: World, model):
    def zeroify() -> None:
        hpczero.zeroify(model, None, stage=2, secondary=True, topology=world.topology)

    world.raises(PlanError, "secondary: ", zeroify)
    world.check(all(parameter.requires_grad for parameter in model.parameters()))
    with world.zeroified(model, None):
        world.check(not any(parameter.requires_grad for parameter in model.parameters()))


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
def test_parameters_that_share_part_of_their_memory(world: World, model, stage, share):
    share(model)
    said = r"'layers\.1\.0\.weight' and parameter 'layers\.2\.0\.weight' lie in the same memory"
    world.refuses(PlanError, said, model, adamw(model), stage=stage)


@pytest.mark.parametrize(
    "of", [lambda: torch.randn(1, 7).expand(4, 7), lambda: torch.randn(10).unfold(0, 7, 1)]
)
def test_parameter_with_one_element_at_several_indices(world: World, model, of):
    model.layers[1][0].weight = nn.Parameter(of())
    world.refuses(
        PlanError, r"'layers\.1\.0\.weight' of shape \(4, 7\) has one element", model, adamw(model)
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_buffer_that_is_a_row_of_a_parameter(world: World, model, stage):
    model.register_buffer("row", model.get_parameter("layers.1.0.weight").detach()[1])
    said = r"buffer 'row' of module 'model' is a view of parameter 'layers\.1\.0\.weight'"
    world.refuses(PlanError, said, model, adamw(model), stage=stage)


def test_attribute_beside_a_parameter_in_one_tensor_is_no_view_of_it(world: World):
    model = MLP()
    whole = torch.randn(16, 7, generator=torch.Generator().manual_seed(1))
    model.layers[0][0].weight, model.rest = nn.Parameter(whole[:15]), whole[15]  # type: ignore[index]
    with world.zeroified(model, adamw(model), stage=3):
        fine = torch.equal(model.rest, whole[15])
    world.check(fine, "values")


def test_gradients_that_are_there_already(world: World, model):
    model(torch.ones(1, 7)).sum().backward()
    world.refuses(
        PlanError, "has a gradient already, which zeroify would drop", model, adamw(model)
    )


def test_fp64_model(world: World, model):
    model.double()
    world.refuses(PlanError, r"holds torch\.float64, expected torch\.float32", model, adamw(model))


def test_model_that_differs_by_rank(world: World):
    model = MLP((7, 15, 3) if world.rank == 1 else (7, 16, 3))
    world.refuses(PlanError, r"rank\(s\) \[1\] built another model", model, adamw(model))


def test_frozen_parameters_that_differ_by_rank(world: World, model):
    model.layers[0].requires_grad_(world.rank == 0)
    odd = list(range(1, world.size))
    world.refuses(PlanError, re.escape(f"rank(s) {odd} built another model"), model, adamw(model))


def test_buffers_that_differ_by_rank(world: World):
    # the same parameters: only the broadcast of running statistics would find out, by mixing them up
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if world.rank == 1:
        model[1] = nn.BatchNorm1d(4, track_running_stats=False)
    world.refuses(PlanError, r"rank\(s\) \[1\] built another model", model, adamw(model))


# --- what other programs have wrapped or cut


class Wrapped(nn.parallel.DistributedDataParallel):
    """As DDP stands around a model; it needs no process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def test_model_in_ddp(world: World, model):
    said = r"module 'model' is a DistributedDataParallel, .*give zeroify the plain model.*model\.module"
    world.refuses(PlanError, said, Wrapped(model), adamw(model))


def test_part_that_fsdp2_has_cut(world: World, model):
    from torch.distributed.fsdp import FSDPModule

    part = model.layers[0]
    part.__class__ = type("FSDPPart", (FSDPModule, type(part)), {})
    world.refuses(PlanError, r"module 'layers\.0' is a FSDPModule, which", model, adamw(model))


# --- modules


class Numbers(nn.Module):
    """Holds a parameter that cannot be trained."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.values = nn.Parameter(values, requires_grad=False)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
def test_embedding_that_changes_its_own_weight(world: World, stage, embedding):
    model = nn.Sequential(embedding(5, 3, max_norm=1.0), nn.Linear(3, 1))
    said = rf"module '0' \({embedding.__name__}\) has max_norm=1, .*max_norm=None"
    world.refuses(PlanError, said, model, adamw(model), stage=stage)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
def test_embedding_with_sparse_gradients(world: World, stage, embedding):
    model = nn.Sequential(embedding(5, 3, sparse=True), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.refuses(
        PlanError, r"module '0' .* has sparse=True.*sparse=False", model, optimizer, stage=stage
    )


def test_frozen_embedding_may_be_sparse(world: World):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True).requires_grad_(False), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with world.zeroified(model, optimizer, stage=3):
        model(torch.arange(5)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_parameter_of_whole_numbers(world: World, dtype):
    model = Numbers(torch.ones(4, dtype=dtype))
    said = f"parameter 'values' is {dtype}, .*make it a buffer: register_buffer"
    world.refuses(PlanError, said, model, adamw(model.linear))


def test_parameter_of_complex_numbers(world: World):
    model = Numbers(torch.ones(4, dtype=torch.complex64))
    said = r"parameter 'values' is torch.complex64, .*torch\.view_as_real"
    world.refuses(PlanError, said, model, adamw(model.linear))


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_module_that_has_seen_no_input(world: World):
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"parameter '1\.weight' is uninitialized: .* Call the model once before"
    world.raises(
        PlanError, said, lambda: hpczero.zeroify(model, optimizer, topology=world.topology)
    )


NORMED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral_norm of old": torch.nn.utils.spectral_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "orthogonal": torch.nn.utils.parametrizations.orthogonal,
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("norm", NORMED.values(), ids=NORMED)
def test_weight_made_from_fp32_buffers_in_half_precision(world: World, norm, precision):
    model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    said = rf"buffers in fp32 .*does not mix them with {precision} weights; train in fp32"
    world.refuses(PlanError, said, model, adamw(model), precision=precision)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_of_old_on_the_meta_device(world: World):
    with torch.device("meta"):
        model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)))
    said = r"module '0' \(Linear\) has torch.nn.utils.weight_norm .*parametrizations.weight_norm"
    world.refuses(PlanError, said, model, adamw(model), initialize=constant)


# --- meta device


def on_meta() -> MLP:
    with torch.device("meta"):
        return MLP()


def constant(name: str, tensor: Tensor) -> None:
    tensor.fill_(0.5)


def test_meta_model_without_initialize(world: World):
    model = on_meta()
    said = r"6 parameter\(s\) are on the meta device, first 'layers\.0\.0\.weight'; pass initialize"
    world.refuses(PlanError, said, model, adamw(model))


def test_buffer_on_the_meta_device(world: World):
    with torch.device("meta"):
        model = ConvNet(width=2, blocks=1)
    said = "buffer.* on the meta device, first 'stem_norm.running_mean'"
    world.refuses(PlanError, said, model, adamw(model), initialize=constant)


def test_initialize_that_differs_by_rank(world: World):
    def initialize(name: str, tensor: Tensor) -> None:
        tensor.fill_(float(world.rank == 1))

    model = on_meta()
    said = r"initialize gave different values for unit 'layers\.0' .*keyed by \(seed, name\)"
    world.refuses(PlanError, said, model, adamw(model), initialize=initialize)


def test_initialize_that_fails_on_one_rank(world: World):
    def initialize(name: str, tensor: Tensor) -> None:
        if world.rank == 1 and name == "layers.1.0.bias":
            raise PlanError("no such weight: layers.1.0.bias")
        tensor.zero_()

    model = on_meta()
    optimizer = adamw(model)
    world.raises(
        PlanError,
        r"on rank\(s\) 1, could not initialise unit 'layers\.1': no such weight",
        lambda: hpczero.zeroify(model, optimizer, topology=world.topology, initialize=initialize),
    )
    # units before it were filled already; what is left is refused, not half used
    with pytest.raises(PlanError, match="MLP was not zeroified"):
        hpczero.sharding(model)
