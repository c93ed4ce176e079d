"""Values of an update on their way: the step does not wait for them, and whoever asks for a value has the new one.

Every gather after the update is held back here until somebody waits for one. Who would read without a wait reads the
values of before, on any machine. What is read is compared with a model whose transport has nothing on its way.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.comm.background import Background
from hpczero.comm.rails import Rails
from tests.helpers.small_models import MLP, adamw, mlp_input, squares
from tests.helpers.world import World, on_nodes

if TYPE_CHECKING:  # importing MPI would start it where tests are only collected
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

LONG_S = 60.0  # a gather that nobody ever waits for goes on after that, so that a failing test does not hang


class Gate:
    """Holds gathers back while it is closed, until somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        gather, start = Rails.gather, Background.start

        def held_back(rails: Rails, *args: Any) -> None:
            self._open.wait(LONG_S)
            gather(rails, *args)

        def started(background: Background, *args: Any) -> Callable[[], None]:
            wait = start(background, *args)

            def waited() -> None:
                self._open.set()
                wait()

            return waited

        monkeypatch.setattr(Rails, "gather", held_back)
        monkeypatch.setattr(Background, "start", started)

    def close(self) -> None:
        self._open.clear()

    @property
    def is_closed(self) -> bool:
        """Nobody has waited since ``close``."""
        return not self._open.is_set()


class Pair:
    """The same training twice: ``late`` between nodes of one rank each, ``plain`` with nothing on its way."""

    def __init__(self, world: World, gate: Gate, stage: int) -> None:
        self.world, self.gate = world, gate
        self.late, self.plain = self.held = [MLP(), MLP()]
        self.optimizers = [adamw(self.late), adamw(self.plain)]
        options: dict[str, Any] = {"topology": world.topology, "precision": "bf16"}
        for place, transport in enumerate(("hierarchical", "flat")):
            model = (self.late, self.plain)[place]
            hpczero.zeroify(model, self.optimizers[place], stage, transport=transport, **options)

    def backward(self) -> None:
        for model in (self.late, self.plain):
            squares(model, self.world.rank).backward()

    def train(self) -> None:
        self.backward()
        self.step()

    def step(self) -> None:
        """Gathers of ``late`` are held back from here on."""
        self.optimizers[1].step()
        self.gate.close()
        self.optimizers[0].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def release(self) -> None:
        while self.held:
            hpczero.release(self.held.pop())

    def check(self, of: Callable[[nn.Module], Any]) -> None:
        """Both models give the same bits. Collective."""
        found, expected = of(self.late), of(self.plain)
        self.world.check(same(found, expected), f"{found} {expected}")


@pytest.fixture
def world(comm: MPI.Intracomm) -> Iterator[World]:
    """Nodes of one rank each."""
    with on_nodes(comm, range(comm.size)) as world:
        yield world


@pytest.fixture
def stage() -> int:
    """Unless a test has parameters."""
    return 1


@pytest.fixture
def pair(world: World, monkeypatch: pytest.MonkeyPatch, stage: int) -> Iterator[Pair]:
    pair = Pair(world, Gate(monkeypatch), stage)
    yield pair
    pair.release()


def weight(model: nn.Module) -> nn.Parameter:
    """Of the unit in the middle."""
    return model.get_parameter("layers.1.0.weight")


def saved(model: nn.Module) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found: dict[str, Tensor] = torch.load(file)
    return found


def in_whole(model: nn.Module) -> list[Tensor]:
    with hpczero.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def out_of(model: nn.Module) -> Tensor:
    out = torch.empty(15, 15, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.mul(weight(model), 2, out=out)
    return out


HALF = torch.bfloat16
ACCESSES: dict[str, Callable[[nn.Module], Any]] = {
    "detach": lambda m: weight(m).detach().clone(),
    "data": lambda m: weight(m).data.clone(),
    "an argument": lambda m: torch.ones(15, 15, dtype=HALF).mul_(weight(m).detach()),
    "out": out_of,
    "a list": lambda m: list(torch._foreach_norm(list(m.parameters()))),
    "numpy": lambda m: torch.from_numpy(weight(m).detach().view(torch.int16).numpy().copy()),
    "numbers": lambda m: torch.tensor(weight(m).tolist()),
    "text": lambda m: repr(weight(m)),
    "state_dict": lambda m: dict(m.state_dict()),
    "a file": saved,
    "a copy": lambda m: copy.deepcopy(weight(m)).detach(),
    "pickle": lambda m: pickle.loads(pickle.dumps(weight(m))).detach(),
    "the model": lambda m: m(mlp_input(0)),
    "in inference": lambda m: torch.inference_mode()(m)(mlp_input(0)).clone(),
    "one of its modules": lambda m: m.get_submodule("layers.1")(torch.ones(2, 15, dtype=HALF)),
    "modules backwards": lambda m: [
        m.get_submodule(f"layers.{i}")(torch.ones(2, (7, 15, 15)[i], dtype=HALF)) for i in (2, 1, 0)
    ],
    "gathered": in_whole,
    "full_state_dict": hpczero.full_state_dict,
}


def same(found: Any, expected: Any) -> bool:
    """The same bits in the same places."""
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return all(map(same, found, expected))
    return bool(found == expected)


def raw(parameter: Tensor) -> Tensor:
    """A copy of what is in it now, past everything that would wait."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().clone()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("access", ACCESSES)
def test_whoever_asks_for_a_value_has_the_new_one(world: World, pair: Pair, access):
    pair.train()
    world.check(pair.gate.is_closed, "the step has waited")
    world.check(raw(weight(pair.late)).isnan().all(), "nothing was on its way")
    pair.check(ACCESSES[access])


@pytest.mark.parametrize("stage", [2])
def test_form_and_gradient_of_a_parameter_are_told_without_a_wait(world: World, pair: Pair):
    pair.train()
    own = weight(pair.late)
    told = (own.shape, own.dtype, own.requires_grad, own.grad, own.numel(), own.is_leaf)
    world.check(told == (torch.Size([15, 15]), HALF, True, None, 225, True))
    world.check(isinstance(own, nn.Parameter) and pair.gate.is_closed)


def test_what_asks_nobody_finds_no_value_of_before(world: World, pair: Pair):
    pair.train()
    with pytest.warns(UserWarning, match="copy construct"):
        found = torch.tensor(weight(pair.late))
    world.check(found.isnan().all() or torch.equal(found, weight(pair.plain)), found)


KEPT: dict[str, Callable[[nn.Module], Any]] = {
    "detach": lambda m: weight(m).detach(),
    "data": lambda m: weight(m).data,
    "a part": lambda m: weight(m)[2].detach(),
    "numpy": lambda m: weight(m).detach().view(torch.int16).numpy(),
    "state_dict": lambda m: m.state_dict()["layers.1.0.weight"],
}


@pytest.mark.parametrize("kept", KEPT)
def test_views_from_before_the_step_show_what_is_after_it(world: World, pair: Pair, kept):
    views = [KEPT[kept](model) for model in (pair.late, pair.plain)]
    pair.train()
    found, expected = (torch.as_tensor(view) for view in views)
    world.check(torch.equal(found, expected))
    del views, found, expected
    pair.train()
    world.check(pair.gate.is_closed, "without the view the step need not wait")


@pytest.mark.parametrize("stage", [1, 2])
def test_training_has_the_same_bits(world: World, pair: Pair):
    for number in range(4):
        pair.backward()
        for model in (pair.late, pair.plain):
            hpczero.clip_grad_norm_(model, 0.1)
        pair.step()
        world.check(pair.gate.is_closed, f"step {number} has waited")
    pair.check(hpczero.full_state_dict)


def test_a_step_may_follow_a_step(pair: Pair):
    pair.backward()
    for _ in range(2):  # on the same gradients
        for optimizer in pair.optimizers:
            optimizer.step()
    pair.check(lambda m: list(m.parameters()))


@pytest.mark.parametrize("stage", [2])
def test_a_module_that_is_not_called_has_its_values_later(world: World, pair: Pair):
    pair.train()
    for model in (pair.late, pair.plain):
        model.get_submodule("layers.0")(torch.ones(2, 7, dtype=HALF)).sum().backward()
    pair.step()
    pair.backward()
    pair.check(hpczero.full_gradients)


def test_changes_inside_gathered_are_of_the_new_values(world: World, pair: Pair):
    pair.train()
    for model in (pair.late, pair.plain):
        with hpczero.gathered(model, modifier_rank=0), torch.no_grad():
            if world.rank == 0:
                weight(model).mul_(2)
    pair.check(lambda m: list(m.parameters()))


@pytest.mark.parametrize("stage", [2])
def test_a_released_model_has_the_new_values(world: World, pair: Pair):
    pair.train()
    pair.release()
    pair.check(lambda m: list(m.parameters()))
    world.check(type(weight(pair.late)) is nn.Parameter)


def test_in_fp32_the_step_waits(world: World, monkeypatch):
    """There the masters are a part of what is gathered."""
    gate = Gate(monkeypatch)
    with world.mlp(adamw, stage=1, transport="hierarchical") as (model, optimizer):
        squares(model, world.rank).backward()
        gate.close()
        optimizer.step()
        world.check(not gate.is_closed)
