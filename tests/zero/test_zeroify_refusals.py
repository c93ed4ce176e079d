"""Options, optimizers and calls that zeroify refuses: one clear error, the same on every rank, nothing half done."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.errors import ConfigError, PlanError
from hpczero.plan.rules import whole_model
from tests.helpers.small_models import MLP, adamw
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.fixture
def model() -> MLP:
    return MLP()


# --- options

DIFFERS = r"rank\(s\) \[1\] built another model, optimizer, stage or precision than rank 0.*What differs: .*"


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"stage": 7}, ConfigError, "stage: got 7, expected 0"),
        ({"precision": "fp8"}, ConfigError, "'fp8', expected one of fp32, bf16, fp16"),
        ({"offload": "disk"}, PlanError, r"offload: got .*Offload\('host'\)"),
        ({"offload": {}}, PlanError, r"offload: got .*Offload\('host'\)"),
        ({"rule": lambda model: [("blocks.9",)]}, PlanError, r"names module 'blocks\.9'"),
    ],
)
def test_option_that_is_wrong(world: World, model, options, kind, said):
    world.refuses(kind, said, model, adamw(model), **options)


@pytest.mark.parametrize(
    ("option", "kind", "said"),
    [
        ({"stage": 7}, ConfigError, r"on rank\(s\) 1, could not plan the model: stage: got 7"),
        ({"stage": 2}, PlanError, f"{DIFFERS}the stage"),
        ({"precision": "bf16"}, PlanError, f"{DIFFERS}the precision"),
        ({"rule": whole_model}, PlanError, f"{DIFFERS}the units that a rule makes"),
    ],
)
def test_option_of_one_rank(world: World, model, option, kind, said):
    world.refuses(kind, said, model, adamw(model), **(option if world.rank == 1 else {}))


def test_transport_over_another_topology(world: World, model):
    other = hpczero.Topology.create(world.comm)
    transport = hpczero.Flat(other)
    world.refuses(PlanError, "another topology", model, adamw(model), transport=transport)
    transport.close()
    other.free()


def test_transport_that_rounds_elsewhere_than_the_precision(world: World, model):
    transport = hpczero.Flat(world.topology, node_dtype=torch.bfloat16)
    said = "round each node's sum to torch.bfloat16, but precision.reduce is 'fp32'"
    world.refuses(PlanError, said, model, adamw(model), transport=transport)
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


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, HomeMade])
def test_optimizer_that_is_not_elementwise(world: World, kind):
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    said = f"optimizer {kind.__name__} .*AdamW"
    world.refuses(PlanError, said, model, kind(model.parameters()))


def test_optimizer_built_from_another_model(world: World, model):
    said = r"optimizer holds 6 tensor\(s\) that are not parameters of this model"
    world.refuses(PlanError, said, model, adamw(copy.deepcopy(model)))


def test_optimizer_that_misses_a_trainable_parameter(world: World, model):
    said = r"4 trainable parameter\(s\) are in no optimizer group, first 'layers\.1\.0\.weight'"
    world.refuses(PlanError, said, model, torch.optim.SGD(model.layers[0].parameters()))


def test_optimizer_that_has_stepped(world: World, model):
    optimizer = adamw(model)
    model(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    world.refuses(PlanError, "AdamW has taken steps already", model, optimizer)


def other_groups(model: nn.Module, *, odd: bool) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    groups = [[first], others] if odd else [[], [first, *others]]
    return torch.optim.SGD([{"params": params} for params in groups], lr=0.1)


GROUPS = r"the optimizer or its groups\. Every rank must build the same"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda m, odd: (torch.optim.SGD if odd else torch.optim.RMSprop)(m.parameters()), GROUPS),
        (lambda m, odd: (torch.optim.Adam if odd else torch.optim.AdamW)(m.parameters()), GROUPS),
        (lambda m, odd: adamw(m, lr=0.1 if odd else 0.2), GROUPS),
        (lambda m, odd: other_groups(m, odd=odd), "parameters, their order"),
    ],
    ids=["of another kind", "decays otherwise", "learns faster", "in other groups"],
)
def test_optimizer_that_differs_by_rank(world: World, model, make, what):
    world.refuses(PlanError, f"{DIFFERS}{what}", model, make(model, world.rank == 1))


def test_inference_without_an_optimizer_freezes_everything(world: World, model):
    expected = MLP()(torch.ones(2, 7))
    with world.zeroified(model, None, stage=3) as sharding:
        found = model(torch.ones(2, 7))
        world.check(torch.equal(found, expected) and not found.requires_grad)
        world.check(not sharding.plan.trainable_units)


# --- calls


@pytest.mark.parametrize("stage", [0, 3])
def test_second_zeroify(world: World, model, stage):
    with world.zeroified(model, adamw(model), stage=stage):
        for again, name in ((model, "model"), (nn.Sequential(model), "0")):
            said = f"module '{name}' was zeroified already"
            world.raises(PlanError, said, world.zeroified(again, adamw(again)).__enter__)


def test_zeroify_in_inference_mode(world: World, model):
    optimizer = adamw(model)
    with torch.inference_mode():
        said = r"zeroify was called inside torch\.inference_mode\(\), expected outside"
        world.refuses(PlanError, said, model, optimizer)


@pytest.mark.parametrize("what", ["layers.1.0.bias", "table"])
def test_model_made_in_inference_mode(world: World, model, what):
    with torch.inference_mode():
        if what == "table":
            model.register_buffer(what, torch.zeros(15))
        else:
            model.layers[1][0].bias = nn.Parameter(torch.zeros(15))
    world.refuses(PlanError, f"'{what}' was made inside torch.inference_mode", model, adamw(model))


def test_call_on_a_model_that_was_not_zeroified(model):
    with pytest.raises(PlanError, match="MLP was not zeroified"):
        hpczero.clip_grad_norm_(model, 1.0)
