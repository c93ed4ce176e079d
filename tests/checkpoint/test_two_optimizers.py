"""Checkpoints of a model with several optimizers: whole at any number of ranks, and refused by other ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.errors import CheckpointMismatch, ConfigError
from tests.checkpoint.damage import values_of
from tests.checkpoint.programs import GLOBAL_BATCH, Net, Program
from tests.checkpoint.test_reshard import save_and_load
from tests.helpers.small_models import same
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi]


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]


def two_groups(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    groups: list[dict[str, Any]] = [{"params": matrices[::2]}, {"params": matrices[1::2]}]
    groups[1]["weight_decay"] = 0.3
    return AdamW(groups, lr=1e-2), SGD(vectors, lr=1e-2, momentum=0.9)


def of_one_kind(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    return Adam(matrices, lr=1e-2), Adam(vectors, lr=1e-3, fused=True)


def without_state(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    return SGD(vectors, lr=1e-2), RMSprop(matrices, lr=1e-3, momentum=0.5)


SETS: dict[str, Callable[[nn.Module], tuple[Optimizer, ...]]] = {
    "two groups": two_groups,
    "of one kind": of_one_kind,
    "without state": without_state,
}


class Several(Program):
    """A ``Net`` in training by several optimizers, of which the last steps every second time."""

    def __init__(
        self, topology: hpczero.Topology, *, optimizer: str = "two groups", **options: Any
    ) -> None:
        self.topology, self.step = topology, 0
        self.model = Net()
        self.optimizer = SETS[optimizer](self.model)
        hpczero.zeroify(self.model, self.optimizer, topology=topology, **options)
        self.schedulers = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in self.optimizer]

    def update(self) -> None:
        due = slice(None) if self.step % 2 else slice(-1)
        for each in (*self.optimizer[due], *self.schedulers[due]):
            each.step()
        self.model.zero_grad()

    def extra(self) -> dict[str, Any]:
        states = [scheduler.state_dict() for scheduler in self.schedulers]
        return {"schedulers": states, "sample": self.step * GLOBAL_BATCH}

    def take(self, extra: dict[str, Any]) -> None:
        for scheduler, state in zip(self.schedulers, extra["schedulers"], strict=True):
            scheduler.load_state_dict(state)


@pytest.fixture
def several(topology: hpczero.Topology) -> Iterator[Several]:
    found = Several(topology)
    yield found
    found.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("make", SETS)
@pytest.mark.parametrize(("n", "m"), [(1, 3), (3, 1), (2, 3), (3, 2), (3, 3), (1, 1)])
def test_any_number_of_ranks_and_stage_goes_on_from_any_other(
    world: World, n: int, m: int, make: str
) -> None:
    before, after = ((size, {"stage": (size + len(make)) % 4}) for size in (n, m))
    save_and_load(world, before, after, make, Several)


@pytest.mark.ranks(2)
def test_the_manifest_says_which_groups_are_whose(world: World, several: Several) -> None:
    several.train(2)
    path = several.save(world.folder)
    meta = read_manifest(path).meta["optimizer"]
    assert meta["class"] == "AdamW, SGD"
    assert meta["optimizers"] == [["AdamW", 2], ["SGD", 1]]
    assert [group["weight_decay"] for group in meta["groups"]] == [0.01, 0.3, 0]
    assert "momentum_buffer" in meta["kinds"]
    assert "exp_avg" in meta["kinds"]


def fewer(model: nn.Module) -> tuple[Optimizer, ...]:
    return (AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),)


def exchanged(model: nn.Module) -> tuple[Optimizer, ...]:
    return two_groups(model)[::-1]


def other_class(model: nn.Module) -> tuple[Optimizer, ...]:
    return two_groups(model)[0], RMSprop(divided(model)[1], lr=1e-2)


def other_groups(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    return AdamW(matrices, lr=1e-2), SGD(vectors, lr=1e-2, momentum=0.9)


def other_parameters(model: nn.Module) -> tuple[Optimizer, ...]:
    matrices, vectors = divided(model)
    groups: list[dict[str, Any]] = [{"params": matrices[::2] + vectors}, {"params": matrices[1:2]}]
    return AdamW(groups, lr=1e-2), SGD(matrices[3::2], lr=1e-2, momentum=0.9)


REFUSED: dict[Callable[[nn.Module], tuple[Optimizer, ...]], str] = {
    fewer: r"the state of 2 optimizer\(s\) \(AdamW, SGD\), and .* with 1 optimizer\(s\) \(AdamW\)",
    exchanged: r"2 optimizer\(s\) \(AdamW, SGD\), .* 2 optimizer\(s\) \(SGD, AdamW\); .* same order",
    other_class: r"2 optimizer\(s\) \(AdamW, SGD\), .* with 2 optimizer\(s\) \(AdamW, RMSprop\)",
    other_groups: r"has 2 groups of parameters, and optimizer 0 \(AdamW\) 1; make the same groups",
    other_parameters: r"is in group \d of the optimizer in the checkpoint and in group \d here",
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_other_optimizers_are_refused_by_name(world: World, several: Several, make: Any) -> None:
    several.train(2)
    several.save(world.folder)
    model = Net()
    with world.zeroified(model, make(model)) as sharding:
        before = values_of(sharding)
        load = hpczero.checkpoint.load
        world.raises(CheckpointMismatch, REFUSED[make], load, world.folder, model)
        world.check(same(before, values_of(sharding)))


@pytest.mark.ranks(2)
def test_one_optimizer_is_written_as_ever_and_several_do_not_go_on_from_it(
    world: World, several: Several
) -> None:
    model = Net()
    with world.zeroified(model, fewer(model)):
        path = hpczero.checkpoint.save(world.folder, model, step=1)
    meta = read_manifest(path).meta["optimizer"]
    assert list(meta) == ["class", "groups", "kinds", "present"]
    assert meta["class"] == "AdamW"
    one, two = r"1 optimizer\(s\) \(AdamW\)", r"2 optimizer\(s\) \(AdamW, SGD\)"
    pattern = f"the state of {one}, and .* with {two}"
    world.raises(CheckpointMismatch, pattern, several.load, world.folder)


@pytest.mark.ranks(1)
def test_save_with_other_optimizers_than_at_zeroify(world: World, several: Several) -> None:
    first, second = several.optimizer
    for given in (first, (first,), (second, first)):
        with pytest.raises(ConfigError, match=r"not the 2 that .* \(AdamW, SGD, in this order\)"):
            hpczero.checkpoint.save(world.folder, several.model, given, step=1)
    hpczero.checkpoint.save(world.folder, several.model, [first, second], step=1)
