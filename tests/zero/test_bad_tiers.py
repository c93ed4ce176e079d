"""Whole trainings on slow, late and failing tiers: the bits of memory, or one error on all ranks and then they."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.errors import CheckpointNotWritten, StepError, TierError
from hpczero.tier import Tier
from tests.helpers.world import World
from tests.tier.twins import FailingTier, LateTier, SlowTier
from tests.zero.whole_training import INPUTS, Numbers, Training, calm

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

STEPS = 4
EVER = 2**60


def inputs_of(tier: Callable[..., Tier]) -> Tier:
    """For inputs of blocks."""
    return tier(blocks=INPUTS["buffers"], block_nbytes=INPUTS["window"])


def trained(training: Training) -> tuple[list[Numbers], list[torch.Tensor]]:
    """Four steps, the last of them after a checkpoint was saved, and loaded a step later; and the weights."""
    found = [training.step() for _ in range(STEPS - 2)]
    found.append(training.step(save=True))
    training.step()
    training.load()
    found.append(training.step())
    weights = training.weights()
    training.close()
    return found, weights


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", [SlowTier, LateTier])
def test_a_bad_tier_on_one_rank_gives_the_bits_of_memory(
    world: World, folder, kind, stage, precision
):
    options: dict[str, Any] = {"stage": stage, "precision": precision}
    expected = trained(Training(world.topology, folder / "memory", **options))
    tier = kind if world.rank == world.size - 1 else calm
    away = Training(world.topology, folder / "away", tier=tier, inputs=inputs_of(tier), **options)
    found = trained(away)
    world.check(found[0] == expected[0], f"{found[0]} {expected[0]}")
    world.check(all(map(torch.equal, found[1], expected[1])), "weights")


class Failing:
    """A training whose last rank has tiers that can be told to fail, after one step and a checkpoint."""

    def __init__(self, world: World, folder: Path) -> None:
        """Collective."""
        self.world, self.last = world, world.size - 1
        inputs = FailingTier(blocks=INPUTS["buffers"], block_nbytes=INPUTS["window"])
        self.tiers = {"inputs": inputs}
        self.training = Training(world.topology, folder, tier=self._open, inputs=inputs)
        self.training.step(save=True)
        self.expected = self.training.step()
        self.training.load()

    def _open(self, *, blocks: int, block_nbytes: int) -> Tier:
        self.tiers["state"] = FailingTier(blocks=blocks, block_nbytes=block_nbytes)
        return self.tiers["state"]

    def sweep(
        self, which: str, doing: str, call: Callable[[], object], *, lasting: bool
    ) -> Iterator[tuple[int, str]]:
        """``call`` with a tier that fails at its call number k, for every k that there is; k and what was said by all.

        Collective. The tier fails once, or from then on while ``call`` lasts.
        """
        tier = self.tiers[which]
        for k in range(10_000):
            if self.world.rank == self.last:
                tier.arm(doing, k, EVER if lasting else k + 1)
            said = said_by_all(self.world, call)
            failed = self.world.comm.bcast(tier.calls > k, root=self.last)
            tier.arm("")
            if not failed:
                self.world.check(not said, said)
                assert k, "it was never called"
                return
            if said:
                here = self.world.rank == self.last
                who = "EIO" if here else f"rank(s) {self.last}"
                named = who in (said if here else said.translate(UNLISTED))
                self.world.check(named, said)
            yield k, said

    def check(self, numbers: Numbers, text: str) -> None:
        """They are those of a step that nothing troubled. Collective."""
        self.world.check(numbers == self.expected, f"{text}: {numbers} {self.expected}")


UNLISTED = str.maketrans("", "", "[]")


def said_by_all(world: World, call: Callable[[], object]) -> str:
    """What ``call`` raises on this rank, empty where it raises nothing on any. Collective."""
    error: Exception | None = None
    try:
        call()
    except Exception as caught:  # judged below, on every rank
        error = caught
    said = "" if error is None else f"{type(error).__name__}: {error}"
    known = (TierError, StepError, CheckpointNotWritten)
    good = error is None or (isinstance(error, known) and error.agreed)
    alike = len({text.split(":")[0] for text in world.comm.allgather(said)}) == 1
    world.check(good and alike, said)
    return said


@pytest.mark.limit(240)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("doing", ["read", "write"])
@pytest.mark.parametrize("which", ["state", "inputs"])
def test_wherever_in_a_step_a_tier_fails_a_checkpoint_goes_on(
    world: World, folder, which, doing, lasting
):
    failing = Failing(world, folder)
    training, found = failing.training, []
    told = 0

    def step() -> None:
        found.append(training.step())

    for k, said in failing.sweep(which, doing, step, lasting=lasting):
        if said:  # else another try gave what was asked for
            told += 1
            training.optimizer.zero_grad()
            training.load()
            step()
        failing.check(found.pop(), f"{doing} {k}: {said}")
        training.load()
    failing.check(found.pop(), "untroubled")
    world.check(told or (doing, lasting) == ("read", False))
    training.close()


@pytest.mark.parametrize("lasting", [False, True])
def test_wherever_in_a_save_a_tier_fails_training_goes_on(world: World, folder, lasting):
    failing = Failing(world, folder)
    training = failing.training
    save = partial(training.save, "other")
    told = 0
    for _, said in failing.sweep("state", "read", save, lasting=lasting):
        told += "CheckpointNotWritten" in said
    world.check(told)
    failing.check(training.step(), "after every error")
    training.load("other")
    failing.check(training.step(), "from the save after them")
    training.close()


@pytest.mark.worth("a failing disk is one error on all ranks")
@pytest.mark.parametrize("lasting", [False, True])
def test_wherever_in_a_load_a_tier_fails_the_next_load_goes_on(world: World, folder, lasting):
    failing = Failing(world, folder)
    training = failing.training
    for k, said in failing.sweep("state", "write", training.load, lasting=lasting):
        world.check(said, f"write {k} was lost without a word")
        with pytest.raises(StepError, match="load a checkpoint"):
            training.step()
        training.optimizer.zero_grad()
        training.load()
        failing.check(training.step(), f"write {k}")
    failing.check(training.step(), "untroubled")
    training.close()
