"""What surrounds a call of a model, and modules that compute their weights: as in plain torch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode

import hpczero
from hpczero.errors import StepError
from tests.equality.reference import tree_sum
from tests.helpers.small_models import MLP, adamw, mlp_input, update
from tests.helpers.world import World

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(1, 2, 3),
    # torch's own forward-mode formulas are scripted when they are first used
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
TRANSPORTS = pytest.mark.parametrize("transport", ["flat", "hierarchical", "window"])
STEPS = 3

Loss = Callable[[nn.Module, int, int], Tensor]  # of a model, rank and step
Chosen = Callable[[nn.Module], list[nn.Parameter]]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    loss: Tensor = model(mlp_input(rank + 10 * step)).float().square().mean()
    return loss


def trained_plain(
    build: Callable[[], nn.Module], size: int, loss: Loss, chosen: Chosen | None
) -> dict[str, Tensor]:
    """What one process makes of all ranks' inputs."""
    model = build()
    optimizer = adamw(model)
    for step in range(STEPS):
        terms: list[dict[str, Tensor]] = []
        for rank in range(size):
            optimizer.zero_grad()
            loss(model, rank, step).backward(inputs=chosen(model) if chosen else None)
            found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            terms.append(found)
        for name, parameter in model.named_parameters():
            if name in terms[0]:
                parameter.grad = tree_sum([term[name] for term in terms]) * (1.0 / size)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def check_equal(world: World, model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Parameters as in one process, but for a rounding of 6e-8 of values below 1 in each step."""
    state = hpczero.full_state_dict(model)
    worst = 0.0
    if state is not None:
        worst = max(float((state[name] - expected[name]).abs().max()) for name in expected)
    world.check(worst < 1e-6, f"differs by {worst} from one process")


def check_trained(
    world: World,
    build: Callable[[], nn.Module] = MLP,
    loss: Loss = loss_of,
    *,
    plainly: Loss | None = None,
    chosen: Chosen | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ranks: int | None = None,
    **options: Any,
) -> None:
    """``build()`` trained in shards becomes what one process makes of it. Collective.

    Args:
        plainly: the loss in one process; as in shards if None.
        chosen: the inputs of backward; all if None.
        around: one context around all steps.
        ranks: whose inputs the one process takes; those of all if None.
        options: of ``zeroify``.
    """
    expected = trained_plain(build, ranks or world.size, plainly or loss, chosen)
    model = build()
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, **options), around():
        for step in range(STEPS):
            inputs = chosen(model) if chosen else None
            loss(model, world.rank, step).backward(inputs=inputs)
            update(optimizer)
        check_equal(world, model, expected)


# --- autocast


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


def in_autocast(loss: Loss) -> Loss:
    def run(model: nn.Module, rank: int, step: int) -> Tensor:
        with autocast():
            return loss(model, rank, step)

    return run


@STAGES
@TRANSPORTS
def test_one_autocast_block_around_several_steps(world: World, stage, transport):
    # in one process a block for each forward
    options = {"stage": stage, "transport": transport}
    check_trained(world, plainly=in_autocast(loss_of), around=autocast, **options)


def unit_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    unit = model.get_submodule("layers.0")
    loss: Tensor = unit(mlp_input(rank + 10 * step).requires_grad_()).float().square().mean()
    return loss


@STAGES
def test_unit_called_alone_in_one_autocast_block_around_several_steps(world: World, stage):
    options = {"plainly": in_autocast(unit_loss), "around": autocast, "stage": stage}
    check_trained(world, MLP, unit_loss, **options)


class Casts(TorchDispatchMode):
    """The memory of all casts of weights to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape == (30, 30):
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result


def test_casts_of_a_forward_without_gradients_do_not_pile_up(world: World):
    model = nn.Sequential(*(nn.Linear(30, 30, bias=False) for _ in range(20)))
    casts, held = Casts(), []
    live = lambda *_: held.append(sum(not cast.expired() for cast in casts.made))  # noqa: E731
    for layer in model:
        layer.register_forward_hook(live)
    rule = lambda model: [(str(i),) for i in range(20)]  # noqa: E731
    sharded = world.zeroified(model, adamw(model), stage=3, rule=rule)
    with sharded, torch.no_grad(), autocast(), casts:
        model(torch.ones(2, 30))
    world.check(len(casts.made) == 20 and max(held) <= 2, held)


# --- derivatives past the hooks

TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "of parameters": lambda model, x: torch.func.grad(
        lambda p: torch.func.functional_call(model, p, (x,)).sum()
    )(dict(model.named_parameters())),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "of a unit": lambda model, x: torch.func.jacrev(model.get_submodule("layers.0"))(x),
}


@STAGES
@TRANSPORTS
def test_transforms_of_torch_func_are_refused_by_name(world: World, stage, transport):
    with world.mlp(adamw, stage=stage, transport=transport) as (model, optimizer):
        for transform in TRANSFORMS.values():
            with pytest.raises(StepError, match=r"a transform of torch\.func .*loss\.backward\(\)"):
                transform(model, mlp_input(world.rank))
        world.check_trains(model, optimizer)


@STAGES
@TRANSPORTS
def test_forward_mode_is_refused_unless_there_are_no_gradients(world: World, stage, transport):
    model, plain, x = MLP(), MLP(), mlp_input(0)
    optimizer = adamw(model)

    def tangent(model: nn.Module) -> Tensor:
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, x.cos()))).tangent
            assert found is not None
            return found.clone()

    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        with pytest.raises(StepError, match=r"forward_ad.dual_level.*under torch\.no_grad\(\)"):
            tangent(model)
        with torch.no_grad():
            world.check(torch.equal(tangent(model), tangent(plain)))
            rows = torch.func.vmap(model)(x)
            world.check(torch.allclose(rows, plain(x), rtol=1e-6))
        world.check_trains(model, optimizer)


@STAGES
@TRANSPORTS
def test_jacobian_with_respect_to_inputs(world: World, stage, transport):
    model, x = MLP(), mlp_input(0)
    expected = torch.autograd.functional.jacobian(MLP(), x)
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage, transport=transport):
        found = torch.autograd.functional.jacobian(model, x)
        world.check(torch.equal(found, expected))
        world.check_trains(model, optimizer)


# --- backward to chosen inputs

CHOSEN: dict[str, Chosen] = {
    "one parameter": lambda model: [model.get_parameter("layers.1.0.bias")],
    "first unit": lambda model: list(model.get_submodule("layers.0").parameters()),
    "last unit": lambda model: list(model.get_submodule("layers.2").parameters()),
    "all": lambda model: list(model.parameters()),
}


@STAGES
@TRANSPORTS
@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_backward_to_chosen_parameters(world: World, stage, transport, chosen):
    check_trained(world, chosen=chosen, stage=stage, transport=transport)


@STAGES
@TRANSPORTS
def test_backward_to_the_input_alone_leaves_parameters_alone(world: World, stage, transport):
    x, y = (mlp_input(0).requires_grad_() for _ in range(2))
    plain = MLP()
    plain(y).square().sum().backward(inputs=[y])
    with world.mlp(adamw, stage=stage, transport=transport) as (model, optimizer):
        model(x).square().sum().backward(inputs=[x])
        assert x.grad is not None
        assert y.grad is not None
        world.check(torch.equal(x.grad, y.grad))
        optimizer.step()
        check_equal(world, model, {name: p.detach() for name, p in plain.named_parameters()})


# --- weights that modules compute, and modules in several places


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric(linear: nn.Linear) -> nn.Module:
    nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


def pruned(linear: nn.Linear) -> nn.Module:
    prune.l1_unstructured(linear, "weight", 0.3)
    return linear


COMPUTED: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "spectral_norm of old": nn.utils.spectral_norm,
    "weight_norm of old": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "own parametrization": symmetric,
    "pruning": pruned,
}


class Chain(nn.Module):
    """``make`` is applied to layers in a unit of its own, packed in a unit, and in the root unit."""

    def __init__(self, make: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = make(nn.Linear(7, 7))
        blocks = [nn.Sequential(make(nn.Linear(7, 7)), nn.Tanh()) for _ in range(2)]
        self.blocks = nn.ModuleList([*blocks, make(nn.Linear(7, 7)), nn.Tanh()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@STAGES
@TRANSPORTS
@pytest.mark.parametrize("name", COMPUTED)
def test_modules_that_compute_their_weight(world: World, stage, transport, name):
    build = lambda: Chain(COMPUTED[name])  # noqa: E731
    # Power iterations of spectral_norm go on in every forward: those of one rank.
    ranks = 1 if name.startswith("spectral") else world.size
    loss = (lambda m, r, s: loss_of(m, 0, s)) if ranks == 1 else loss_of
    check_trained(world, build, loss, ranks=ranks, stage=stage, transport=transport)


class Repeated(nn.Module):
    """One block in two lists and three times in a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        block = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        self.encoder = nn.ModuleList([block, nn.Sequential(nn.Linear(7, 7)), block])
        self.decoder = nn.ModuleList([nn.Sequential(nn.Linear(7, 7)), block])

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.encoder, *self.decoder, self.decoder[1], self.decoder[1]):
            x = block(x)
        return x


@STAGES
@TRANSPORTS
def test_block_in_several_places(world: World, stage, transport):
    check_trained(world, Repeated, stage=stage, transport=transport)
