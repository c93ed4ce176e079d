"""Models that zeroify cannot shard are refused: one clear error, the same on every rank, nothing half done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


# --- parameters, buffers and modules


def _put(model: Any, *weights: Tensor) -> None:
    """As weights of the layers but the first."""
    for layer, weight in zip(model.layers[1:], weights, strict=False):
        layer[0].weight = nn.Parameter(weight)


def _rows(model: MLP) -> None:
    both = torch.randn(5, 7)
    _put(model, both[:4], both[2:])


def _columns(model: MLP) -> None:
    both = torch.randn(4, 9)
    _put(model, both[:, :7], both[:, 3:])


def _of_numpy(model: MLP) -> None:
    both = np.zeros(40, np.float32)
    _put(model, torch.from_numpy(both[:28]).view(4, 7), torch.from_numpy(both[20:]).view(4, 5))


class Wrapped(nn.parallel.DistributedDataParallel):
    """As DDP stands around a model; it needs no process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def _cut_by_fsdp2(model: MLP) -> None:
    from torch.distributed.fsdp import FSDPModule

    part = model.layers[0]
    part.__class__ = type("FSDPPart", (FSDPModule, type(part)), {})


def _values(dtype: torch.dtype) -> Callable[[MLP], None]:
    """A parameter that cannot be trained."""
    values = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    return lambda model: model.register_parameter("values", values)


def _embedding(kind: Any = nn.Embedding, **options: Any) -> Callable[[MLP], nn.Module]:
    return lambda model: nn.Sequential(kind(5, 3, **options), nn.Linear(3, 1))


SHARE = r"'layers\.1\.0\.weight' and parameter 'layers\.2\.0\.weight' lie in the same memory"
SEVERAL = r"'layers\.1\.0\.weight' of shape \(4, 7\) has one element"
MAX_NORM = r"module '0' \(%s\) has max_norm=1, .*max_norm=None"
WHOLE = "parameter 'values' is torch.%s, .*make it a buffer: register_buffer"
DDP = r"module 'model' is a DistributedDataParallel, .*give zeroify the plain model.*model\.module"

# What is done to an MLP, or made in its place, and what is said of it.
REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "mixed dtypes": (
        lambda m: setattr(m.layers[1][0].bias, "data", torch.zeros(15, dtype=torch.bfloat16)),
        r"unit 'layers\.1' holds torch\.float32 .*, torch\.bfloat16 \(layers\.1\.0\.bias\)",
    ),
    "fp64": (lambda m: m.double(), r"holds torch\.float64, expected torch\.float32"),
    "rows that overlap": (_rows, SHARE),
    "columns that overlap": (_columns, SHARE),
    "arrays that overlap": (_of_numpy, SHARE),
    "expanded": (lambda m: _put(m, torch.randn(1, 7).expand(4, 7)), SEVERAL),
    "unfolded": (lambda m: _put(m, torch.randn(10).unfold(0, 7, 1)), SEVERAL),
    "buffer that is a row of a parameter": (
        lambda m: m.register_buffer("row", m.get_parameter("layers.1.0.weight").detach()[1]),
        r"buffer 'row' of module 'model' is a view of parameter 'layers\.1\.0\.weight'",
    ),
    "gradients": (
        lambda m: m(torch.ones(1, 7)).sum().backward(),
        "has a gradient already, which zeroify would drop",
    ),
    "in DDP": (Wrapped, DDP),
    "cut by FSDP2": (_cut_by_fsdp2, r"module 'layers\.0' is a FSDPModule, which"),
    "changes its weight": (_embedding(max_norm=1.0), MAX_NORM % "Embedding"),
    "bag": (_embedding(nn.EmbeddingBag, max_norm=1.0), MAX_NORM % "EmbeddingBag"),
    "integers": (_values(torch.int64), WHOLE % "int64"),
    "truths": (_values(torch.bool), WHOLE % "bool"),
    "complex": (_values(torch.complex64), r"'values' is torch.complex64, .*torch\.view_as_real"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_is_refused(world: World, case):
    act, said = REFUSED[case]
    model: nn.Module = MLP()
    made = act(model)
    model = made if isinstance(made, nn.Module) else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    precision = "bf16" if case == "mixed dtypes" else "fp32"
    world.refuses(PlanError, said, model, torch.optim.SGD(trained, lr=0.1), precision=precision)


def test_model_that_is_refused_for_inference_trains_on(world: World):
    model = MLP()

    def zeroify() -> None:
        hpczero.zeroify(model, None, stage=2, secondary=True, topology=world.topology)

    world.raises(PlanError, "secondary: ", zeroify)
    world.check(all(parameter.requires_grad for parameter in model.parameters()))
    with world.zeroified(model, None):
        world.check(not any(parameter.requires_grad for parameter in model.parameters()))


def test_attribute_beside_a_parameter_in_one_tensor_is_no_view_of_it(world: World):
    model = MLP()
    whole = torch.randn(16, 7, generator=torch.Generator().manual_seed(1))
    model.layers[0][0].weight, model.rest = nn.Parameter(whole[:15]), whole[15]  # type: ignore[index]
    with world.zeroified(model, adamw(model), stage=3):
        fine = torch.equal(model.rest, whole[15])
    world.check(fine, "values")


def other_sizes(rank: int) -> nn.Module:
    return MLP((7, 15, 3) if rank == 1 else (7, 16, 3))


def frozen_otherwise(rank: int) -> nn.Module:
    model = MLP()
    model.layers[0].requires_grad_(rank != 1)
    return model


def other_buffers(rank: int) -> nn.Module:
    # the same parameters: only the broadcast of running statistics would find out, by mixing them up
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=rank != 1))


@pytest.mark.parametrize("make", [other_sizes, frozen_otherwise, other_buffers])
def test_model_that_differs_by_rank(world: World, make):
    model = make(world.rank)
    world.refuses(PlanError, r"rank\(s\) \[1\] built another model", model, adamw(model))


def test_frozen_embedding_may_be_sparse(world: World):
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True).requires_grad_(False), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with world.zeroified(model, optimizer, stage=3):
        model(torch.arange(5)).sum().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_module_that_has_seen_no_input(world: World):
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"parameter '1\.weight' is uninitialized: .* Call the model once before"
    world.raises(PlanError, said, world.zeroified(model, optimizer).__enter__)


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
    said = r"on rank\(s\) 1, could not initialise unit 'layers\.1': no such weight"
    start = world.zeroified(model, adamw(model), initialize=initialize).__enter__
    world.raises(PlanError, said, start)
    # units before it were filled already; what is left is refused, not half used
    with pytest.raises(PlanError, match="MLP was not zeroified"):
        hpczero.sharding(model)
