"""Options, optimizers and calls that zeroify refuses: one clear error, the same on every rank, nothing half done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.errors import ConfigError, PlanError
from hpczero.plan.rules import whole_model
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, Refusal, adamw, raises_on_all, tiny_gpt, zeroified

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


# --- options


def test_stage_7(refused: Refusal, model: MLP) -> None:
    refused(ConfigError, "stage: got 7, expected 0", model, adamw(model), stage=7)


def test_unknown_precision(refused: Refusal, model: MLP) -> None:
    said = "precision: got 'fp8', expected one of fp32, bf16, fp16"
    refused(ConfigError, said, model, adamw(model), precision="fp8")


@pytest.mark.parametrize("offload", ["disk", {"optimizer": "disk"}, {}])
def test_offload_that_is_none(refused: Refusal, model: MLP, offload: Any) -> None:
    refused(PlanError, r"offload: got .*Offload\('host'\)", model, adamw(model), offload=offload)


def test_option_that_is_wrong_on_one_rank(refused: Refusal, model: MLP) -> None:
    stage = 7 if refused.comm.rank == 1 else 3
    said = r"on rank\(s\) 1, could not plan the model: stage: got 7"
    refused(ConfigError, said, model, adamw(model), stage=stage)


@pytest.mark.parametrize("option", [{"stage": 2}, {"precision": "bf16"}, {"rule": whole_model}])
def test_option_that_differs_by_rank(refused: Refusal, model: MLP, option: dict[str, Any]) -> None:
    options: dict[str, Any] = option if refused.comm.rank == 1 else {}
    what = {
        "stage": "the stage",
        "precision": "the precision",
        "rule": "the units that a rule makes",
    }
    said = r"rank\(s\) \[1\] built another model, optimizer, stage or precision than rank 0"
    said += f".*What differs: .*{what[next(iter(option))]}"
    refused(PlanError, said, model, adamw(model), **options)


def test_optimizer_that_differs_by_rank_is_what_differs(refused: Refusal, model: MLP) -> None:
    kind = torch.optim.SGD if refused.comm.rank == 1 else torch.optim.RMSprop
    said = "What differs: the optimizer or its groups. Every rank must build the same"
    refused(PlanError, said, model, kind(model.parameters(), lr=0.1))


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


def test_rule_that_names_an_unknown_module(refused: Refusal) -> None:
    model = tiny_gpt()
    options: dict[str, Any] = {"rule": lambda model: [("blocks.9",)]}
    refused(PlanError, r"names module 'blocks\.9'", model, adamw(model), **options)


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


def test_inference_without_an_optimizer_freezes_everything(
    comm: MPI.Intracomm, topology: Topology, model: MLP
) -> None:
    expected = MLP()(torch.ones(2, 7))
    with zeroified(model, None, stage=3, topology=topology) as sharding:
        found = model(torch.ones(2, 7))
        parallel_assert(comm, torch.equal(found, expected) and not found.requires_grad)
        parallel_assert(comm, not sharding.plan.trainable_units)


# --- calls


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


def test_zeroify_in_inference_mode(refused: Refusal, model: MLP) -> None:
    optimizer = adamw(model)
    with torch.inference_mode():
        said = r"zeroify was called inside torch\.inference_mode\(\), expected outside"
        refused(PlanError, said, model, optimizer)


@pytest.mark.parametrize("what", ["layers.1.0.bias", "table"])
def test_model_made_in_inference_mode(refused: Refusal, model: MLP, what: str) -> None:
    owner = model.get_submodule(what.rpartition(".")[0])
    with torch.inference_mode():
        if what == "table":
            owner.register_buffer(what, torch.zeros(15))
        else:
            owner.bias = nn.Parameter(torch.zeros(15))
    optimizer = adamw(model)
    refused(PlanError, f"'{what}' was made inside torch.inference_mode", model, optimizer)


def test_zeroify_again_after_release(comm: MPI.Intracomm, topology: Topology, model: MLP) -> None:
    with zeroified(model, adamw(model), stage=2, topology=topology):
        pass
    with zeroified(model, adamw(model), stage=2, topology=topology) as sharding:
        model(torch.ones(1, 7)).sum().backward()
        parallel_assert(comm, sharding.units[0].gradients.present)


def test_call_on_a_model_that_was_not_zeroified(comm: MPI.Intracomm, model: MLP) -> None:
    with pytest.raises(PlanError, match="MLP was not zeroified"):
        hpczero.clip_grad_norm_(model, 1.0)
