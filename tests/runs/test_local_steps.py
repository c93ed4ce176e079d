"""Groups that train apart and average: the mean of their weights, whoever is killed, late, or of another model."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.errors import ConfigError, StepError
from hpczero.job.signals import Signals
from hpczero.options.config import LocalOptions
from hpczero.options.environment import Environment
from hpczero.options.reading import read_run_config
from hpczero.run.local_steps import LocalSteps
from hpczero.run.stopping import Deadline, Stops, Wish
from tests.helpers.small_models import same, update
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

GROUPS = 2


class Group:
    """The ranks of one group, a job of its own as far as it knows."""

    def __init__(self, world: World, *, width: int = 8) -> None:
        self.index, self.seed = world.rank * GROUPS // world.size, 0
        comm: Any = world.comm.Split(self.index)
        self._comm, self._all = comm, world.comm
        self.topology = hpczero.Topology.create(comm)
        self.world = World(comm, self.topology)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.model.register_buffer(
            "fine", torch.tensor([1 + 1e-12 * self.index], dtype=torch.float64)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def local(self, folder: Path, **changes: Any) -> LocalSteps:
        given = {"steps": 2, "groups": GROUPS, "group": self.index, "patience_s": 30.0} | changes
        run = folder / f"run-{self.index}"
        return LocalSteps(
            LocalOptions(folder=str(folder), **given),
            self.model,
            steps=100,
            run=run,
            identity={"seed": self.seed},
        )

    def joined(self, local: LocalSteps, start: int = 0, *, began: bool = True) -> int:
        """All groups have begun."""
        found = local.rejoin(start, began=began)
        self._all.Barrier()
        return found

    def step(self, number: int) -> None:
        train(self.model, self.optimizer, 100 * number + 10 * self.index + self.world.rank)

    def values(self) -> list[Tensor]:
        with hpczero.gathered(self.model):
            return [
                each.detach().clone() for each in (*self.model.parameters(), *self.model.buffers())
            ]

    def close(self) -> None:
        self.topology.free()
        self._comm.Free()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    update(optimizer)


@pytest.fixture
def group(world: World) -> Iterator[Group]:
    made = Group(world)
    yield made
    made.close()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_all_groups_go_on_with_the_mean_of_their_weights(world: World, group: Group, stage):
    with group.world.zeroified(group.model, group.optimizer, stage=stage):
        local = group.local(world.folder)
        with local:
            world.check(group.joined(local) == 0)
            group.step(1)
            world.check(local.after_step(1) == "")
            group.step(2)
            own = group.values()
            said = local.after_step(2)
        world.check(f"average of {GROUPS} of {GROUPS} groups after step 2;" in said, said)
        nbytes = local.written_nbytes
        world.check(local.read_nbytes == (GROUPS - 1) * nbytes > 0, "other bytes than documented")
        found, everybody = group.values(), world.comm.allgather(own)
        firsts = [everybody[index * world.size // GROUPS] for index in range(GROUPS)]
        for mine, *theirs in zip(found, *firsts, strict=True):
            if mine.is_floating_point():
                expected = torch.stack(theirs).double().mean(0).to(mine.dtype)
                world.check(torch.equal(mine, expected), (mine, expected))
        world.check(same(found, world.comm.bcast(found)), "other values in another group")
        group.step(3)  # and goes on


def test_one_step_of_sgd_and_a_mean_are_a_step_on_all_samples(world: World, group: Group):
    torch.manual_seed(1)
    group.model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 1))
    group.optimizer = torch.optim.SGD(group.model.parameters(), lr=0.1)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with (
        group.world.zeroified(group.model, group.optimizer),
        group.local(world.folder, steps=1) as local,
    ):
        group.joined(local)
        for number in range(1, 4):
            group.step(number)
            local.after_step(number)
            ranks = range(world.size // GROUPS)
            seeds = [100 * number + 10 * index + rank for index in range(GROUPS) for rank in ranks]
            draws = [torch.Generator().manual_seed(seed) for seed in seeds]
            x = torch.cat([torch.randn(4, 6, generator=draw) for draw in draws])
            plain(x).square().mean().backward()
            update(optimizer)
        found = group.values()
        near = [
            torch.allclose(a, b, atol=1e-6) for a, b in zip(found, plain.parameters(), strict=True)
        ]
        world.check(all(near), near)


def test_the_others_go_on_without_a_group_that_shows_no_life_and_it_comes_back(
    world: World, group: Group
):
    def joined() -> bool:
        return len(json.loads((world.folder / f"step-{6:09d}" / "members.json").read_text())) == 2

    with group.world.zeroified(group.model, group.optimizer):
        local = group.local(world.folder, patience_s=0.5)
        with local:
            group.joined(local)
            group.step(1)
            local.after_step(2)
        world.comm.Barrier()
        if world.rank == 0:  # killed: its last sign of life stays
            left = {"run": str(world.folder / "run-1"), "start": "of before"}
            (world.folder / "group-1.alive").write_text(json.dumps(left))
        world.comm.Barrier()
        if group.index == 0:
            with group.local(world.folder, patience_s=0.5) as other:
                other.rejoin(2, began=True)
                began = time.monotonic()
                said = other.after_step(4)
                group.world.check(
                    said.startswith("local steps: average of 1 of 2 groups after step 4"), said
                )
                group.world.check("; without group(s) 1;" in said, said)
                group.world.check(
                    time.monotonic() - began > 0.3, "nobody waited for the sign of life"
                )
        world.comm.Barrier()
        own = group.values()
        with group.local(world.folder) as again:
            start = group.joined(again, 2 if group.index else 4)
            world.check(start == 4, start)
            world.check(same(group.values(), world.comm.bcast(own)), "not the newest mean")
            group.step(5)
            said = again.after_step(6)
        world.check("average of 2 of 2 groups after step 6" in said and joined(), said)
        world.check(same(group.values(), world.comm.bcast(group.values())))


def test_a_group_that_was_left_behind_says_so(world: World, group: Group):
    with group.world.zeroified(group.model, group.optimizer):
        if group.index == 0:
            with group.local(world.folder) as local:
                local.rejoin(0, began=False)
                local.after_step(2)
                local.after_step(4)
        world.comm.Barrier()
        if group.index == 1:
            late = group.local(world.folder)
            with (
                late,
                pytest.raises(
                    StepError, match=r"have gone on to step 4 without it; start it again"
                ),
            ):
                late.after_step(2)
        world.comm.Barrier()


def test_left_over_folders_and_numbers_that_are_taken_are_refused_by_name(
    world: World, group: Group
):
    with group.world.zeroified(group.model, group.optimizer):
        with group.local(world.folder) as local:
            group.joined(local, began=False)
            local.after_step(2)
            taken = LocalSteps(
                LocalOptions(steps=2, group=group.index, folder=str(world.folder)),
                group.model,
                steps=100,
                run=world.folder / "another",
                identity={"seed": 0},
            )
            with pytest.raises(
                ConfigError, match=rf"run-{group.index} is training as group {group.index}; give"
            ):
                taken.rejoin(0, began=False)
            world.comm.Barrier()
        world.comm.Barrier()
        with pytest.raises(ConfigError, match="holds rounds of earlier runs, no group is training"):
            group.local(world.folder).rejoin(0, began=False)
        world.comm.Barrier()
        world.check(group.local(world.folder).rejoin(1, began=True) == 2)


def test_unlike_groups_are_refused_by_name_before_they_train(world: World):
    group = Group(world, width=8 if world.rank * GROUPS < world.size else 9)
    with group.world.zeroified(group.model, group.optimizer):
        if group.index == 0:
            group.local(world.folder).rejoin(0, began=False)
        world.comm.Barrier()
        if group.index == 1:
            with pytest.raises(ConfigError, match="the other groups train another model"):
                group.local(world.folder).rejoin(0, began=False)
        world.comm.Barrier()
    group.close()
    group = Group(world)
    with group.world.zeroified(group.model, group.optimizer):
        if group.index == 1:
            group.seed = 7
            with pytest.raises(ConfigError, match="the other groups have seed 0, this one 7"):
                group.local(world.folder).rejoin(0, began=False)
    group.close()


def test_all_groups_read_the_part_of_the_start_that_was_decided(world: World, group: Group):
    with group.world.zeroified(group.model, group.optimizer), group.local(world.folder) as local:
        group.joined(local)
        local.after_step(2)
        if group.index == 1:  # ready for the next round, and killed before it is decided
            group.step(1)
            local._write(4)
        world.comm.Barrier()
        if group.index == 0:
            group.step(2)
            local.after_step(4)
        world.comm.Barrier()
        if group.index == 1:  # started again it would compute another part
            group.step(3)
            again = group.local(world.folder)
            group.world.check(again.rejoin(2, began=True) == 4)
        found = [each for each in group.values() if each.is_floating_point()]
        world.check(same(found, world.comm.bcast(found)), "other values in another group")


def test_a_part_whose_bytes_changed_is_refused_by_name(world: World, group: Group):
    with group.world.zeroified(group.model, group.optimizer), group.local(world.folder) as local:
        group.joined(local, 10)
        local.after_step(12)
        world.comm.Barrier()
        (part,) = (world.folder / f"step-{12:09d}").glob("group-1.*.rank-0")
        world.comm.Barrier()
        if world.rank == 0:
            part.write_bytes(b"\1" + part.read_bytes()[1:])
        world.comm.Barrier()
        again = group.local(world.folder)
        with pytest.raises(StepError, match=r"the bytes of group 1, rank 0 are not those"):
            again.rejoin(10, began=True)


def test_files_that_are_gone_are_told_to_those_that_wait(world: World, group: Group):
    with group.world.zeroified(group.model, group.optimizer), group.local(world.folder) as local:
        group.joined(local)
        if group.index == 0:
            local._write(2)
            if group.topology.is_root:
                shutil.rmtree(world.folder / f"step-{2:09d}")
            group.topology.barrier()
            with pytest.raises(StepError, match="what group 0 wrote after step 2 is gone"):
                local._agreed_members(2, None, 0.0)
        world.comm.Barrier()


def test_a_run_that_is_asked_to_stop_leaves_a_round_that_waits(world: World, group: Group):
    with group.world.zeroified(group.model, group.optimizer), group.local(world.folder) as local:
        group.joined(local)
        if group.index == 0:
            (world.folder / "STOP").touch()
            stops = Stops(world.folder, group.topology, Signals(), Deadline(Environment()))
            said = local.after_step(2, stops)
            group.world.check(
                said == "local steps: asked to stop before the average after step 2", said
            )
            group.world.check(local.heard is Wish.STOP)
        world.comm.Barrier()
        again = group.local(world.folder)
        world.check(again.rejoin(2, began=True) == 2)
        world.check(again.owes)


def test_options_that_do_not_fit_are_refused() -> None:
    for words, said in (
        (["--local.steps", "4"], "local.folder: got 'none'"),
        (["--local.steps", "4", "--local.group", "2", "--local.folder", "x"], "local.group: got 2"),
        (["--local.groups", "1"], "local.groups: got 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_run_config(words)
