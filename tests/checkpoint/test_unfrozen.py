"""Checkpoints from before and after a layer was unfrozen: a run that makes the same calls goes on bit for bit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.errors import CheckpointMismatch
from tests.checkpoint.programs import first_ranks
from tests.helpers.small_models import MLP, mlp_input, same, values
from tests.helpers.world import World

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

UNFROZEN = 2  # before this step


class Run:
    """A run that unfreezes a layer."""

    def __init__(self, topology: Topology, **options: Any) -> None:
        self.model = MLP()
        self.layer = self.model.layers[1].requires_grad_(False)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        hpczero.zeroify(self.model, self.optimizer, topology=topology, **options)

    def unfreeze(self) -> None:
        self.layer.requires_grad_(True)
        self.optimizer.add_param_group({"params": list(self.layer.parameters()), "lr": 3e-3})

    def steps(self, numbers: Iterable[int]) -> None:
        """Steps on the same samples, whatever the ranks."""
        for number in numbers:
            if number == UNFROZEN:
                self.unfreeze()
            self.model(mlp_input(number)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        """Values, whole, in the order of the model, on rank 0. Collective."""
        return [*(hpczero.full_state_dict(self.model) or {}).values()]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("saved", [2, 3])
@pytest.mark.parametrize("fewer", [False, True], ids=["same ranks", "one rank goes on"])
def test_a_run_goes_on_bit_for_bit(world: World, stage: int, saved: int, fewer: bool) -> None:
    run = Run(world.topology, stage=stage)
    with hpczero.checkpoint.Checkpoints(world.folder, run.model, run.optimizer) as checkpoints:
        for number in range(saved):  # saved before the layer is unfrozen too, by the same object
            run.steps([number])
            checkpoints.save(number + 1)
    run.steps(range(saved, 5))
    expected = run.state()
    hpczero.release(run.model)
    with first_ranks(world.comm, 1 if fewer else world.size) as others:
        if others is not None:
            again = Run(others, stage=3 - stage if fewer else stage)
            if saved > UNFROZEN:
                again.unfreeze()
            hpczero.checkpoint.load(world.folder, again.model, again.optimizer)
            again.steps(range(saved, 5))
            found = again.state()
            hpczero.release(again.model)
    if world.rank == 0:
        pairs = zip(found, expected, strict=True)
        # Sums over other numbers of ranks round otherwise.
        assert all(torch.allclose(a, b, rtol=0.0, atol=1e-6 * fewer) for a, b in pairs)


def test_a_checkpoint_of_before_is_refused_after_the_change(world: World) -> None:
    run = Run(world.topology, stage=3)
    run.steps(range(2))
    hpczero.checkpoint.save(world.folder, run.model, run.optimizer, step=2)
    run.unfreeze()
    load = partial(hpczero.checkpoint.load, world.folder, run.model, run.optimizer)
    said = "frozen in the checkpoint and trained here|has 1 groups"
    world.raises(CheckpointMismatch, said, load)
    before = values(hpczero.sharding(run.model))
    hpczero.checkpoint.save(world.folder, run.model, run.optimizer, step=3)  # right after the calls
    run.model(mlp_input(7)).square().mean().backward()
    run.optimizer.step()
    load()
    world.check(same(values(hpczero.sharding(run.model)), before))
    hpczero.release(run.model)
