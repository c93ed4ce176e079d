"""A parameter whose memory is given back: metadata is there, everything else names it and says what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hpczero
from hpczero.errors import StepError
from hpczero.zero.units.guard import Guard, is_guarded
from tests.helpers.parallel import told
from tests.helpers.small_models import MLP, adamw
from tests.helpers.world import World

NAME = "blocks.3.weight"


@pytest.fixture
def parameter() -> nn.Parameter:
    """(3, 5) fp32, sharded, its memory given back."""
    parameter = nn.Parameter(torch.ones(3, 5))
    Guard(parameter, NAME).close()
    with torch._C.DisableTorchFunctionSubclass():
        parameter.untyped_storage().resize_(0)
    return parameter


TOUCH: dict[str, Callable[[nn.Parameter], object]] = {
    "'sum' needs its value": lambda p: p.sum(),
    "arithmetic": lambda p: 1 + p * 2,
    "in a list": lambda p: torch.cat([torch.ones(1, 5), p]),
    "by keyword": lambda p: torch.add(torch.ones(3, 5), other=p),
    "'data' needs its value": lambda p: p.data,
    "assign data": lambda p: setattr(p, "data", torch.ones(3, 5)),
    "numpy": lambda p: p.numpy(),
    "iterate": lambda p: list(p),
    "truth": lambda p: bool(p),
    "storage": lambda p: p.untyped_storage(),
    "cast": lambda p: p.half(),
    "move": lambda p: p.to("meta"),
    "format": lambda p: f"{p:.3f}",
    "norm": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("name", TOUCH)
def test_touching_a_sharded_parameter_names_it_and_the_remedy(parameter, name):
    with pytest.raises(StepError, match=NAME) as raised:
        TOUCH[name](parameter)
    assert "hpczero.gathered" in str(raised.value)
    assert "needs its value" not in name or name in str(raised.value)


def test_metadata_is_there(parameter):
    assert (parameter.shape, parameter.size(0), parameter.ndim) == ((3, 5), 3, 2)
    assert (parameter.numel(), parameter.nelement(), len(parameter)) == (15, 15, 3)
    assert (parameter.dtype, parameter.element_size()) == (torch.float32, 4)
    assert (parameter.device.type, parameter.is_cuda, parameter.is_meta) == ("cpu", False, False)
    assert (parameter.stride(), parameter.is_contiguous()) == ((5, 1), True)
    assert (parameter.requires_grad, parameter.is_leaf) == (True, True)
    assert parameter.grad is None
    assert parameter.is_floating_point()
    assert torch.is_floating_point(parameter)
    assert isinstance(parameter, nn.Parameter)
    assert parameter in {parameter}
    parameter.retain_grad()
    assert (parameter.retains_grad, parameter.is_inference()) == (False, False)


def test_a_copy_of_a_guarded_parameter_is_an_ordinary_one():
    parameter = nn.Parameter(torch.ones(3, 5))
    guard = Guard(parameter, NAME)
    unpickled = pickle.loads(pickle.dumps(parameter))
    for copied in (copy.copy(parameter), copy.deepcopy(parameter), unpickled):
        assert not is_guarded(copied)
    guard.close()
    assert is_guarded(parameter)
    assert type(parameter) is not nn.Parameter
    guard.open()
    assert is_guarded(parameter)
    assert type(parameter) is nn.Parameter
    assert parameter.sum() == 15
    guard.leave()
    assert not is_guarded(parameter)


def test_repr_names_the_parameter_without_its_values(parameter):
    assert repr(parameter) == f"ShardedParameter('{NAME}', shape=(3, 5), torch.float32)"
    assert str([parameter]) == f"[{parameter!r}]"


def test_conversions_that_change_nothing_give_the_parameter_itself(parameter):
    for same in (parameter.float(), parameter.cpu(), parameter.to("cpu", torch.float32)):
        assert same is parameter
    assert parameter.type() == "torch.FloatTensor"


def test_freezing_and_gradients_to_none_are_allowed(parameter):
    parameter.requires_grad_(False)
    assert not parameter.requires_grad
    parameter.requires_grad = True
    parameter.grad = None
    assert parameter.requires_grad


# --- in a model

USES: dict[str, Callable[[nn.Module], object]] = {
    "state_dict": lambda model: model.state_dict(),
    "norm": lambda model: [p.norm() for p in model.parameters()],
    "load_state_dict": lambda model: model.load_state_dict(MLP().state_dict()),
}


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whole_model_calls_on_a_sharded_model_are_refused(world: World, use):
    with world.mlp(adamw, stage=3) as (model, _):
        # torch's load_state_dict collects errors in one of its own
        said = told((StepError, RuntimeError), use, model)
        world.check("layers.0.0.weight" in said and "hpczero." in said, said)
        model(torch.ones(1, 7)).sum().backward()  # and no harm was done


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_counting_and_printing_a_sharded_model_works(world: World, stage):
    model = MLP()
    count, text = sum(p.numel() for p in model.parameters()), repr(model)
    names = [name for name, _ in model.named_parameters()]
    with world.zeroified(model, adamw(model), stage=stage):
        world.check(sum(p.numel() for p in model.parameters()) == count)
        world.check([name for name, _ in model.named_parameters()] == names)
        world.check(repr(model) == text)


class Borrower(nn.Module):
    """Uses a weight of one of its units without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        weight = self.blocks[0].get_parameter("0.weight")
        return self.blocks[1](F.linear(x, weight))


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_module_that_uses_anothers_weight_is_refused_at_stage_3(world: World):
    model = Borrower()
    with world.zeroified(model, adamw(model), stage=3):
        said = told(StepError, model, torch.ones(1, 4))
        world.check("'blocks.0.0.weight'" in said and "rule=" in said, said)
        world.check(hpczero.sharding(model).units[0].spec.name == "blocks.0")


FACTORIES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "new_empty": lambda p: p.new_empty(2, 3).zero_(),
    "new_zeros": lambda p: p.new_zeros(2, 3),
    "new_ones": lambda p: p.new_ones((2, 3)),
    "new_full": lambda p: p.new_full((2, 3), 7.0),
    "new_tensor": lambda p: p.new_tensor([1, 2]),
    "zeros_like": torch.zeros_like,
    "zeros_like, by keyword": lambda p: torch.zeros_like(input=p, dtype=torch.float64),
    "ones_like": torch.ones_like,
    "empty_like": lambda p: torch.empty_like(p).zero_(),
    "full_like": lambda p: torch.full_like(p, 7.0),
    "rand_like": lambda p: torch.rand_like(p) * 0,
    "randn_like": lambda p: torch.randn_like(p) * 0,
}


@pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
def test_new_tensors_like_a_sharded_parameter(parameter, make):
    expected = make(nn.Parameter(torch.ones(3, 5)))
    found = make(parameter)
    assert type(found) is Tensor
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    assert found.requires_grad == expected.requires_grad


def test_filling_with_another_sharded_parameter_is_refused(parameter):
    with pytest.raises(StepError, match=f"{NAME}.*'new_tensor' needs its value"):
        parameter.new_tensor(parameter)


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_hook_on_several_gradients(world: World, stage):
    seen: list[int] = []
    with world.mlp(adamw, stage=stage) as (model, _):
        count = lambda gradients: seen.append(len(gradients))  # noqa: E731
        handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), count)
        for _ in range(2):
            model(torch.ones(2, 7)).square().sum().backward()
        handle.remove()
        parameter = next(model.parameters())
        if stage == 3:
            with pytest.raises(StepError, match=r"layers\.0\.0\.weight.*needs its value"):
                parameter.view_as(parameter).sum()
    world.check(seen == [6, 6], seen)
