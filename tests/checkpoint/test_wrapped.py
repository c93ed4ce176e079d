"""Names in a checkpoint are those of the plain model, whatever wraps modules of it in one run and not in the next."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.foreign.exporting import export
from tests.checkpoint.damage import resigned
from tests.helpers.small_models import adamw, mlp_input
from tests.helpers.world import World

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of the compiler
]


class Net(nn.Module):
    """Blocks with parameters, one of them frozen, a buffer and an extra state; a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(7, 7)
        self.back = nn.Linear(7, 7)
        self.back.weight = self.out.weight
        self.blocks[0].get_parameter("linear.bias").requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.back(self.out(x))
        return result


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(7, 7), nn.BatchNorm1d(7), 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.linear(x))
        return result

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def with_blocks(wrap: Any) -> Any:
    model = Net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrap(block)
    return model


def wrapped() -> Any:
    return with_blocks(checkpoint_wrapper)


def compiled_blocks() -> Any:
    return with_blocks(partial(torch.compile, backend="eager"))


def compiled() -> Any:
    return torch.compile(Net(), backend="eager")


def blocks_of(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> float:
    loss = model(mlp_input(rank)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    "kinds",
    [(wrapped, Net), (compiled_blocks, Net), (compiled, Net), (Net, compiled_blocks)],
)
@pytest.mark.parametrize("parameters", ["all", "trained"])
def test_wrappers_may_come_and_go_between_runs(world: World, kinds: Any, parameters: str) -> None:
    before, after = kinds
    with world.zeroified(model := before(), optimizer := adamw(model), stage=3):
        step(model, optimizer, world.rank)
        blocks_of(model)[1].calls = 4
        path = hpczero.checkpoint.save(world.folder, model, step=1, parameters=parameters)
        expected = step(model, optimizer, world.rank)
    names = {name for name, _ in Net().named_parameters(remove_duplicate=False)}
    found = {row.name for row in read_manifest(path).table.rows}
    world.check(found == names - {"blocks.0.linear.bias"} or found == names, str(found))
    with world.zeroified(model := after(), optimizer := adamw(model), stage=3):
        hpczero.checkpoint.load(world.folder, model)
        world.check(blocks_of(model)[1].calls == 4)
        loss = step(model, optimizer, world.rank)
    world.check(loss == pytest.approx(expected, rel=1e-6), f"{loss} {expected}")


@pytest.mark.parametrize("make", [Net, compiled_blocks])
def test_file_with_names_of_wrapped_modules_loads(world: World, make: Any) -> None:
    """As versions before have written it."""

    def as_before(body: dict[str, Any]) -> None:
        def old(name: str) -> str:
            return name.replace("blocks.0.", "blocks.0._orig_mod.")

        for row in (*body["parameters"], *body["meta"]["buffers"]):
            row[0] = old(row[0])
        present = body["meta"]["optimizer"]["present"]
        names = [row[0] for row in body["parameters"] if row[3] >= 0 and row[4] is None]
        for key, values in present.items():  # by name, as where they are not equal
            present[key] = dict.fromkeys(names, values["*"])

    with world.zeroified(model := Net(), optimizer := adamw(model), stage=3):
        step(model, optimizer, world.rank)
        path = hpczero.checkpoint.save(world.folder, model, step=1)
        expected = step(model, optimizer, world.rank)
    world.on_root(resigned, path, as_before)
    world.on_root(export, path, world.folder / "m.safetensors")
    world.check("_orig_mod" in str(read_manifest(path).table))
    with world.zeroified(model := make(), optimizer := adamw(model), stage=3):
        hpczero.checkpoint.load(path, model)
        loss = step(model, optimizer, world.rank)
        hpczero.checkpoint.import_weights(world.folder / "m.safetensors", model)
    world.check(loss == pytest.approx(expected, rel=1e-6), f"{loss} {expected}")


@pytest.mark.parametrize("after", [Net, compiled])
def test_weights_of_a_compiled_model_are_imported(world: World, after: Any) -> None:
    expected = {name: value for name, value in Net().state_dict().items() if "extra" not in name}
    foreign = {f"_orig_mod.{name}": value for name, value in expected.items()}
    world.on_root(torch.save, foreign, world.folder / "m.pt")
    with world.zeroified(model := after(), None):
        hpczero.checkpoint.import_weights(world.folder / "m.pt", model)
        found = hpczero.full_state_dict(model) or {}
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    world.check(not found or all(torch.equal(found[n], v) for n, v in expected.items()))
