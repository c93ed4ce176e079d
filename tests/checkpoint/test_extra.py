"""What ``save`` is told to remember comes back as it was given, or is refused by name."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, MultiStepLR, SequentialLR

import hpczero
from hpczero.checkpoint.disk.folder import read_manifest
from hpczero.checkpoint.foreign.exporting import export
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError, CorruptCheckpoint
from tests.checkpoint.damage import resigned
from tests.helpers.small_models import MLP, adamw, mlp_input, sgd, zeroified
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]

SCHEDULERS: dict[str, Any] = {
    "MultiStepLR": lambda o: MultiStepLR(o, [2, 3, 3, 5], gamma=0.5),
    "ChainedScheduler": lambda o: ChainedScheduler([MultiStepLR(o, [3, 5], gamma=0.5)]),
    "SequentialLR": lambda o: SequentialLR(
        o, [MultiStepLR(o, [1], gamma=0.5), MultiStepLR(o, [2, 4], gamma=0.5)], milestones=[2]
    ),
}


def rates(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_with_milestones_goes_on_after_a_load(world: World, kind: str) -> None:
    found = []
    for load in (False, True):
        with world.mlp(sgd) as (model, optimizer):
            scheduler = SCHEDULERS[kind](optimizer)
            if load:
                scheduler.load_state_dict(hpczero.checkpoint.load(world.folder, model).extra)
            else:
                rates(scheduler, optimizer, 2)
                hpczero.checkpoint.save(world.folder, model, step=2, extra=scheduler.state_dict())
            found.append(rates(scheduler, optimizer, 6))
    world.check(found[0] == found[1], str(found))


def kept(folder: Path, model: MLP, extra: Any) -> Any:
    """What a load gives of ``extra``. Collective."""
    path = hpczero.checkpoint.save(folder, model, step=1, extra=extra)
    return hpczero.checkpoint.load(path, model).extra


GIVEN: dict[str, dict[Any, Any]] = {
    "numbers": {"a": {1: 2, -3: {0.5: "x"}}},
    "none and truth": {"a": {None: 1, True: 2, False: 3}},
    "a number and its text": {"a": {1: "a", "1": "b"}},
    "at the top": {1: "a", None: {"b": [{2: 3}]}},
    "the mark itself": {"__pairs__": [[1, 2]], "b": {"__counter__": 1}},
    "the mark itself beside numbers": {"a": {"__pairs__": [[1, 2]]}, "b": {3: 4}},
    "both in one": {"__counter__": 1, 7: {"__pairs__": 2, "c": 3}},
    "marks below": {"a": {"__pairs__": [["1", 2]]}, "b": [1, {"__tuple__": [2]}]},
    "a counter": {"a": Counter({3: 2, "b": 1})},
    "tuples": {"a": (1, ("b", [()])), 3: [(None,)], "c": {"__tuple__": [1]}},
    "what JSON has no number for": {"a": math.inf, "b": math.nan},
    # An attribute of HDF5 is at most 64 KiB in its old form.
    "long": {"history": list(range(40_000)), "name": "größer \0 \N{SNOWMAN}"},
}


@pytest.mark.parametrize("given", GIVEN)
def test_whatever_is_given_comes_back(world: World, model: MLP, given: str) -> None:
    found = kept(world.folder, model, GIVEN[given])
    world.check(repr(found) == repr(GIVEN[given]), repr(found))


def test_numpy_scalars_come_back_as_numbers(world: World, model: MLP) -> None:
    found = kept(world.folder, model, {"a": [np.float32(0.5), np.int64(3), np.bool_(True)]})
    world.check(repr(found) == "{'a': [0.5, 3, True]}", found)


def test_extra_of_text_keys_is_stored_as_it_is(world: World, model: MLP) -> None:
    """As any reader of JSON finds it."""
    extra: dict[str, Any] = {"a": {"x": [["1", 2]]}, "b": [1, {"y": [2]}]}
    world.check(kept(world.folder, model, extra) == extra)
    (path,) = world.folder.glob("step-*")
    world.check(read_manifest(path).meta["extra"] == extra)


CIRCLE: dict[str, Any] = {}
CIRCLE["self"] = CIRCLE


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"a": [{"b": {1, 2}}]}, r"extra\['a'\]\[0\]\['b'\] is a set"),
        ({"a": {(1, 2): 3}}, r"extra\['a'\] has the key \(1, 2\), a tuple"),
        ({"a": {1: {"b": 2j}}}, r"extra\['a'\]\[1\]\['b'\] is a complex"),
        ({"a": 10**5000}, r"extra\['a'\] is a number of very many digits"),
        ({"a": [torch.zeros(2**18 + 1)]}, r"extra\['a'\]\[0\] is a tensor of 1,048,580 bytes"),
        ({"a": torch.eye(2).to_sparse()}, r"extra\['a'\] is a tensor without plain elements"),
        (CIRCLE, "extra cannot be written as JSON"),
        (7, "extra cannot be written as JSON"),
    ],
)
@pytest.mark.parametrize("on", ["all ranks", "one rank"])
def test_what_json_cannot_hold_is_refused_by_its_key(
    world: World, model: MLP, extra: Any, pattern: str, on: str
) -> None:
    mine = extra if on == "all ranks" or world.rank == 1 else {}
    world.raises(ConfigError, pattern, kept, world.folder, model, mine)
    world.check(not list(world.folder.glob("step-*")))


@pytest.mark.parametrize("pairs", [7, [[1]], [[[], 1]], [[1, 2], [1, 3]], None])
def test_pairs_that_are_none_are_refused_before_anything_changes(
    world: World, model: MLP, pairs: Any
) -> None:
    path = hpczero.checkpoint.save(world.folder, model, step=1, extra={"a": {1: 2}})
    world.on_root(resigned, path, lambda body: body["meta"]["extra"]["a"].update(__pairs__=pairs))
    world.raises(CorruptCheckpoint, "meta.extra", hpczero.checkpoint.load, path, model)


# --- tensors


TENSORS = [
    torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    torch.arange(6).view(2, 3).T,
    torch.empty(0, 3, dtype=torch.float64),
    torch.tensor(True),
]


def test_tensors_come_back_with_their_type_and_shape(world: World, model: MLP) -> None:
    extra = {"a": {3: TENSORS}, "b": {"__tensor__": 1}}
    found = kept(world.folder, model, extra)
    world.check(found["b"] == extra["b"] and list(found["a"]) == [3], repr(found))
    for got, given in zip(found["a"][3], TENSORS, strict=True):
        world.check(got.dtype == given.dtype and got.shape == given.shape, repr(got))
        world.check(torch.equal(got.nan_to_num(7), given.nan_to_num(7)), repr(got))


def test_generators_of_ranks_go_on_where_they_were(world: World, model: MLP) -> None:
    generator = torch.Generator().manual_seed(5 + world.rank)
    torch.rand(3, generator=generator)
    found = kept(world.folder, model, {"states": world.comm.allgather(generator.get_state())})
    again = torch.Generator()
    again.set_state(found["states"][world.rank])
    expected = torch.rand(3, generator=generator)
    world.check(torch.equal(torch.rand(3, generator=again), expected))


# --- ranks that differ


@pytest.mark.parametrize(
    ("of_rank", "pattern"),
    [
        (lambda r: {"a": 1, "b": {"c": [r]}}, r"rank 1 has extra\['b'\]\['c'\] = \[1\].*= \[0\]"),
        (lambda r: {"a": 1} if r else None, r"extra\['a'\] = 1, and rank 0 has extra = {}"),
        (lambda r: {"a": {1: r}}, r"extra\['a'\]"),
        (lambda r: {"g": torch.Generator().manual_seed(r).get_state()}, r"extra\['g'\]"),
    ],
)
def test_extra_that_differs_between_ranks_is_refused_by_its_key(
    world: World, model: MLP, of_rank: Any, pattern: str
) -> None:
    """One checkpoint has one; that of rank 0 was kept without a word."""
    world.raises(ConfigError, pattern, kept, world.folder, model, of_rank(world.rank))
    world.check(not list(world.folder.glob("step-*")), "something was written")


# --- extra states of modules, which are part of a checkpoint as of ``state_dict()``


class Scaled(nn.Module):
    """Divides by the largest value that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)
        self.kept: Any = {"amax": 1.0, "history": torch.zeros(3)}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["history"] = torch.cat([self.kept["history"][1:], x.detach().abs().max()[None]])
        self.kept["amax"] = self.kept["history"].max().item()
        result: Tensor = self.linear(x) / self.kept["amax"]
        return result

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), nn.Linear(3, 2))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(mlp_input(seed) * (seed + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_training_goes_on_with_the_state_that_modules_had(world: World, stage: int) -> None:
    plain = build()
    expected = steps(plain, adamw(plain), range(5))
    with world.zeroified(model := build(), optimizer := adamw(model), stage=stage):
        steps(model, optimizer, range(3))
        hpczero.checkpoint.save(world.folder, model, step=3)
    with world.zeroified(model := build(), optimizer := adamw(model), stage=stage):
        hpczero.checkpoint.load(world.folder, model)
        found = steps(model, optimizer, range(3, 5))
    world.check(found == pytest.approx(expected[3:], rel=1e-5), f"{found} {expected}")


def test_state_that_differs_between_ranks_comes_back_to_each(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with world.zeroified(model := build(), None):
        model[0].kept = world.rank + 5
        path = hpczero.checkpoint.save(world.folder, model, step=1)
        model[0].kept = 0
        hpczero.checkpoint.load(world.folder, model)
        world.check(model[0].kept == world.rank + 5, repr(model[0].kept))
    world.check(read_manifest(path).meta["extra_states"] == {"0": [5, 6]})
    alone = hpczero.Topology.alone()
    with zeroified(model := build(), None, topology=alone):
        hpczero.checkpoint.load(world.folder, model)
        world.check(model[0].kept == 5, "rank 0 of one takes that of rank 0 of two")
        export(path, tmp_path / "weights")
    alone.free()
    world.check("extra states of 0 differ between the 2 ranks" in caplog.text)
    world.check("left out what get_extra_state() of 0 gave" in caplog.text)


def test_state_that_no_file_can_hold_is_refused_by_its_module(world: World) -> None:
    with world.zeroified(model := build(), None):
        model[0].kept = {"seen": {1, 2}}
        said = r"module '0' \(Scaled\) cannot be kept: state\['seen'\] is a set"
        world.raises(CheckpointError, said, hpczero.checkpoint.save, world.folder, model, step=1)


def test_state_of_a_module_that_is_not_there_is_refused(world: World, model: MLP) -> None:
    path = hpczero.checkpoint.save(world.folder, model, step=1)
    world.on_root(resigned, path, lambda body: body["meta"].update(extra_states={"last": [4]}))
    said = "extra state of the module 'last'"
    world.raises(CheckpointMismatch, said, hpczero.checkpoint.load, path, model)


def test_file_without_extra_states_loads_and_says_so(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints of before have none."""
    with world.zeroified(model := build(), None):
        path = hpczero.checkpoint.save(world.folder, model, step=1)
        world.on_root(resigned, path, lambda body: body["meta"].pop("extra_states"))
        hpczero.checkpoint.load(path, model)
    world.check_told(caplog, "holds no extra state of ['0']")
