"""Methods other than forward train as forward does, once they are registered."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import ConfigError, PlanError, StepError
from hpczero.zero.calls import tensors
from tests.helpers.small_models import MLP, mlp_input, sgd, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 3), 0.3))

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * x @ self.weight


class Encoder(MLP):
    """A forward that calls another method, which is also called alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5, -1.0]))
        self.inner = nn.ModuleList([Inner()])

    def encode(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def loss(model: Encoder, rank: int) -> Tensor:
    inner = model.inner[0]
    assert isinstance(inner, Inner)
    x = mlp_input(rank)
    return (model.encode(x) - inner.doubled(model(-x))).square().mean()


def register(model: nn.Module) -> None:
    for name in ("encode", "inner.0.doubled", "encode"):
        hpczero.register_forward(model, name)


@pytest.mark.parametrize("transport", ["window", "flat"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_registered_methods_train_as_in_one_process(world: World, stage, transport):
    plain, model = Encoder(), Encoder()
    optimizer, reference = sgd(model), sgd(plain)
    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        register(model)
        for _ in range(3):
            world.backward(model, plain, loss)
            update(optimizer, reference)
        world.check_weights(model, plain, within=1e-6)
    world.check("encode" not in model.__dict__, "release leaves it registered")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_casts_and_scales_once_whoever_calls(world: World, stage, precision):
    found = []
    for registered, name in ((False, "__call__"), (True, "__call__"), (True, "encode")):
        model = Encoder()
        with world.zeroified(model, sgd(model), stage=stage, precision=precision):
            if registered:
                register(model)
            getattr(model, name)(mlp_input(world.rank)).square().mean().backward()
            found.append(hpczero.full_gradients(model))
    for other in found[1:]:
        same = all(torch.equal(found[0][name], other[name]) for name in found[0])
        world.check(same and len(other) == len(found[0]))


def test_function_put_on_the_object_is_registered_and_given_back(world: World):
    model, x = Encoder(), mlp_input(0)
    own = partial(Encoder.encode, model)
    model.__dict__["encode"] = own
    expected = model.encode(x)
    with world.zeroified(model, sgd(model), stage=3):
        register(model)
        world.check(torch.equal(model.encode(x), expected))
    world.check(model.__dict__["encode"] is own)


def test_module_with_a_registered_method_is_not_copied(world: World):
    # the copy's method would run on the original's parameters
    model = nn.Sequential(nn.Sequential(Inner(), nn.Linear(3, 3)))
    with world.zeroified(model, sgd(model), stage=0):
        hpczero.register_forward(model, "0.0.doubled")
        with pytest.raises(PlanError, match=r"registered by hpczero\.register_forward cannot be"):
            copy.deepcopy(model.get_submodule("0.0"))


def test_transforms_of_torch_func_are_refused(world: World):
    model = Encoder()
    with world.zeroified(model, sgd(model), stage=3):
        register(model)
        with pytest.raises(StepError, match=r"a transform of torch\.func"):
            torch.func.grad(lambda x: model.encode(x).sum())(mlp_input(world.rank))


def test_a_registered_method_leads_no_search_into_the_sharded_model(world: World, monkeypatch):
    monkeypatch.setattr(tensors, "MOST_OBJECTS", 20)
    model = Encoder()
    with world.zeroified(model, sgd(model), stage=3, precision="fp16") as sharding:
        register(model)
        output = model(mlp_input(world.rank))
        world.check(output.requires_grad)
        assert sharding.schedule is not None
        world.check(not sharding.schedule.residence.kept.units, "units stay whole")
        output.sum().backward()


class Fragile(Encoder):
    def encode(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise FloatingPointError("in the method")
        return super().encode(x)


def test_error_in_a_method_leaves_nothing_whole(world: World):
    model, x = Fragile(), mlp_input(0)
    with world.zeroified(model, sgd(model), stage=3, transport="flat") as sharding:
        register(model)
        with pytest.raises(FloatingPointError):
            model.encode(x[:1])
        world.check(sharding.memory.current.get("unsharded", 0) == 0)
        with torch.no_grad():
            world.check(torch.equal(model.encode(x), Fragile().encode(x)))


def test_without_registration_the_error_names_the_ways_out(world: World):
    model = Encoder()
    with world.zeroified(model, sgd(model), stage=3):
        with pytest.raises(StepError, match=r"hpczero\.register_forward"):
            model.encode(mlp_input(world.rank))
        with pytest.raises(ConfigError, match="expected a method of Encoder"):
            hpczero.register_forward(model, "decode")
