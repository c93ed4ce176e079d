"""What zeroify cannot shard is refused: one clear error, the same on every rank, nothing half done, nothing stuck."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import ConfigError, HpcZeroError, PlanError
from hpczero.models import ConvNet
from hpczero.plan.rules import whole_model
from tests.helpers.parallel import parallel_assert
from tests.small_models import MLP, adamw, raises_on_all, tiny_gpt, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


class Refusal:
    """Asks that ``zeroify`` refuses, agreed by all ranks, and leaves model and optimizer as they were."""

    def __init__(self, comm: MPI.Intracomm, topology: Topology) -> None:
        self.comm = comm
        self.topology = topology

    def __call__(
        self,
        kind: type[HpcZeroError],
        pattern: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        **options: Any,
    ) -> None:
        before = self._identity(model, optimizer)
        options = {"topology": self.topology, **options}
        raises_on_all(
            self.comm, kind, pattern, lambda: hpczero.zeroify(model, optimizer, **options)
        )
        same = self._identity(model, optimizer) == before
        parallel_assert(self.comm, same, "the model or the optimizer was changed")

    @staticmethod
    def _identity(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        """Which objects and which memory they consist of, and how many hooks they carry."""
        parameters = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
        stepped = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        return [parameters, stepped, hooks]


@pytest.fixture
def refused(comm: MPI.Intracomm, topology: Topology) -> Refusal:
    return Refusal(comm, topology)


@pytest.fixture
def model() -> MLP:
    return MLP()


# --- options


def test_stage_7(refused: Refusal, model: MLP) -> None:
    refused(ConfigError, "stage: got 7, expected 0", model, adamw(model), stage=7)


def test_unknown_precision(refused: Refusal, model: MLP) -> None:
    said = "precision: got 'fp8', expected one of fp32, bf16, fp16"
    refused(ConfigError, said, model, adamw(model), precision="fp8")


def test_option_that_is_wrong_on_one_rank(refused: Refusal, model: MLP) -> None:
    stage = 7 if refused.comm.rank == 1 else 3
    said = r"on rank\(s\) 1, could not plan the model: stage: got 7"
    refused(ConfigError, said, model, adamw(model), stage=stage)


@pytest.mark.parametrize("option", [{"stage": 2}, {"precision": "bf16"}, {"rule": whole_model}])
def test_option_that_differs_by_rank(refused: Refusal, model: MLP, option: dict[str, Any]) -> None:
    options: dict[str, Any] = option if refused.comm.rank == 1 else {}
    said = r"rank\(s\) \[1\] built another model, optimizer, stage or precision than rank 0"
    refused(PlanError, said, model, adamw(model), **options)


def test_transport_over_another_topology(refused: Refusal, model: MLP) -> None:
    other = hpczero.Topology.create(refused.comm)
    transport = hpczero.Flat(other)
    refused(PlanError, "another topology", model, adamw(model), transport=transport)
    transport.close()
    other.free()


def test_transport_that_rounds_elsewhere_than_the_precision(
    refused: Refusal, model: MLP, topology: Topology
) -> None:
    transport = hpczero.Flat(topology, node_dtype=torch.bfloat16)
    said = "round each node's sum to torch.bfloat16, but precision.reduce is 'fp32'"
    refused(PlanError, said, model, adamw(model), transport=transport, topology=topology)
    transport.close()


# --- optimizers


class HomeMade(torch.optim.Optimizer):
    """Normalises whole matrices, for all we know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


class Elementwise(HomeMade):
    hpczero_elementwise = True


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def only_matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4, bias=False))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
    "Muon": lambda model: torch.optim.Muon(matrices(model)),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "SparseAdam": lambda model: torch.optim.SparseAdam(model.parameters()),
    "HomeMade": lambda model: HomeMade(model.parameters()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_that_is_not_elementwise(refused: Refusal, name: str) -> None:
    model = only_matrices()
    refused(PlanError, f"optimizer {name} .*AdamW", model, OPTIMIZERS[name](model))


def test_home_made_optimizer_that_says_it_is_elementwise_is_taken(
    comm: MPI.Intracomm, topology: Topology, model: MLP
) -> None:
    optimizer, x = Elementwise(model.parameters()), torch.ones(2, 7)
    plain = copy.deepcopy(model)
    plain_optimizer = Elementwise(plain.parameters())
    plain(x).sum().backward()
    plain_optimizer.step()
    with zeroified(model, optimizer, stage=3, topology=topology):
        model(x).sum().backward()
        optimizer.step()
        with hpczero.gathered(model):
            pairs = zip(model.parameters(), plain.parameters(), strict=True)
            close = all(torch.allclose(a, b, rtol=1e-6) for a, b in pairs)
        parallel_assert(comm, close)


def test_optimizer_built_from_another_model(refused: Refusal, model: MLP) -> None:
    said = r"optimizer holds 6 tensor\(s\) that are not parameters of this model"
    refused(PlanError, said, model, adamw(copy.deepcopy(model)))


def test_optimizer_that_misses_a_trainable_parameter(refused: Refusal, model: MLP) -> None:
    optimizer = torch.optim.SGD(model.layers[0].parameters())
    said = r"4 trainable parameter\(s\) are in no optimizer group, first 'layers\.1\.0\.weight'"
    refused(PlanError, said, model, optimizer)


def test_optimizer_that_has_stepped(refused: Refusal, model: MLP) -> None:
    optimizer = adamw(model)
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    refused(PlanError, "AdamW has taken steps already", model, optimizer)


def test_optimizer_groups_that_differ_by_rank(refused: Refusal, model: MLP) -> None:
    first, *others = model.parameters()
    cut = others if refused.comm.rank == 1 else [first, *others]
    rest = [first] if refused.comm.rank == 1 else []
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": cut}]
    said = r"rank\(s\) \[1\] built another model, optimizer"
    refused(PlanError, said, model, torch.optim.SGD(groups, lr=0.1))


def test_learning_rate_that_differs_by_rank(refused: Refusal, model: MLP) -> None:
    lr = 0.1 if refused.comm.rank == 1 else 0.2
    refused(PlanError, r"rank\(s\) \[1\] built another", model, adamw(model, lr=lr))


def test_optimizer_class_that_differs_by_rank(refused: Refusal, model: MLP) -> None:
    kind: Any = torch.optim.Adam if refused.comm.rank == 1 else torch.optim.AdamW
    optimizer = kind(model.parameters(), weight_decay=0.0)
    refused(PlanError, r"rank\(s\) \[1\] built another", model, optimizer)


# --- models


def test_mixed_dtypes_in_a_unit(refused: Refusal, model: MLP) -> None:
    model.layers[1][0].bias.data = torch.zeros(15, dtype=torch.bfloat16)  # type: ignore[index]
    said = r"unit 'layers\.1' holds torch\.float32 .*, torch\.bfloat16 \(layers\.1\.0\.bias\)"
    refused(PlanError, said, model, adamw(model), precision="bf16")


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


@pytest.mark.parametrize("stage", [0, 3])
def test_second_zeroify(refused: Refusal, model: MLP, stage: int) -> None:
    with zeroified(model, adamw(model), stage=stage, topology=refused.topology):
        said = "module 'model' was zeroified already"
        again = torch.optim.SGD(model.parameters())
        call = lambda: hpczero.zeroify(model, again, topology=refused.topology)  # noqa: E731
        raises_on_all(refused.comm, PlanError, said, call)
        outer = nn.Sequential(model)
        again = torch.optim.SGD(outer.parameters())
        call = lambda: hpczero.zeroify(outer, again, topology=refused.topology)  # noqa: E731
        raises_on_all(refused.comm, PlanError, "module '0' was zeroified already", call)


def test_zeroify_again_after_release(comm: MPI.Intracomm, topology: Topology, model: MLP) -> None:
    with zeroified(model, adamw(model), stage=2, topology=topology):
        pass
    with zeroified(model, adamw(model), stage=2, topology=topology) as sharding:
        model(torch.ones(1, 7)).sum().backward()
        parallel_assert(comm, sharding.units[0].has_gradient)


def test_call_on_a_model_that_was_not_zeroified(comm: MPI.Intracomm, model: MLP) -> None:
    with pytest.raises(PlanError, match="MLP was not zeroified"):
        hpczero.clip_grad_norm_(model, 1.0)


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


def test_rule_that_names_an_unknown_module(refused: Refusal) -> None:
    model = tiny_gpt()
    options: dict[str, Any] = {"rule": lambda model: [("blocks.9",)]}
    refused(PlanError, r"names module 'blocks\.9'", model, adamw(model), **options)


def test_inference_without_an_optimizer_freezes_everything(
    comm: MPI.Intracomm, topology: Topology, model: MLP
) -> None:
    expected = MLP()(torch.ones(2, 7))
    with zeroified(model, None, stage=3, topology=topology) as sharding:
        found = model(torch.ones(2, 7))
        parallel_assert(comm, torch.equal(found, expected) and not found.requires_grad)
        parallel_assert(comm, not sharding.plan.trainable_units)
