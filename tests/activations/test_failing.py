"""A tier of block inputs that fails: one error that names the place, nobody waits, and the next step is right."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.activations import Checkpointing
from hpczero.errors import TierError
from tests.activations.stacks import Stack, batch, gradients, grads, plain, same
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, raises_on_all, zeroified
from tests.tier.twins import FailingTier

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

EVER = 2**60
WAYS = ["read", "write", "room"]


def over(tier: FailingTier, folder: Path) -> Checkpointing:
    return Checkpointing.create("disk", folder=folder, tier=tier, window=4096, buffers=4)


@pytest.mark.parametrize("doing", WAYS)
@pytest.mark.parametrize("first", [0, 3])
def test_alone_it_is_an_error_of_backward_and_the_next_one_is_right(
    tmp_path: Path, doing: str, first: int
) -> None:
    tier = FailingTier(doing=doing, number=errno.ENOSPC, first=first, blocks=4, block_nbytes=4096)
    with over(tier, tmp_path) as checkpointing:
        model = Stack()
        model.call = checkpointing
        loss = model(batch())
        for _ in range(2):  # it stays what it is
            with pytest.raises(TierError, match=rf"{doing} at byte [0-9,]+: .*ENOSPC"):
                loss.backward(retain_graph=True)
        del loss
        tier.doing = ""
        assert same(gradients(checkpointing), gradients(plain))


def test_a_read_ahead_that_fails_is_tried_again_by_whoever_needs_it(tmp_path: Path) -> None:
    tier = FailingTier(doing="read", first=2, last=3, blocks=4, block_nbytes=4096)
    with over(tier, tmp_path) as checkpointing:
        assert same(gradients(checkpointing, steps=1), gradients(plain, steps=1))


def trained(topology: Topology, call: Any, failing: Any = None, **options: Any) -> Any:
    """Weights after three steps; before the second, ``failing`` has one fail."""
    model = Stack(4)
    model.call = call
    comm = topology.world.comm
    with zeroified(model, adamw(model), topology=topology, **options) as sharding:
        (optimizer,) = sharding.optimizers
        if isinstance(call, Checkpointing):
            call.join(model)

        def backward(step: int) -> None:
            torch.manual_seed(100 * step + topology.rank)
            model(batch(100 * step + topology.rank)).backward()

        for step in range(3):
            if step == 1 and failing is not None:
                failing(comm, model, optimizer, lambda: backward(7))
                optimizer.zero_grad()
            backward(step)
            optimizer.step()
            optimizer.zero_grad()
        return hpczero.full_state_dict(model)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("doing", WAYS)
def test_in_a_sharded_model_it_is_one_error_of_the_step_on_all_ranks(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    doing: str,
    stage: int,
    precision: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    last = comm.rank == comm.size - 1
    tier = FailingTier(number=errno.EIO, blocks=4, block_nbytes=4096)

    def failing(comm: MPI.Intracomm, model: Any, optimizer: Any, backward: Any) -> None:
        before = hpczero.full_state_dict(model)
        if last:
            if doing == "room":
                tier._room.take(0, 2**40)  # else the room of the step before is enough
                tier._room._stretches.clear()
            tier.doing = doing
        backward()  # nobody raises: peers may wait
        message = raises_on_all(comm, TierError, rf"rank.*|{doing} at byte .*EIO", optimizer.step)
        assert "EIO" in message
        tier.doing = ""
        after = hpczero.full_state_dict(model)
        good = before is None or all(torch.equal(v, after[n]) for n, v in before.items())  # type: ignore[index]
        parallel_assert(comm, good, "the step was taken")

    with over(tier, folder) as checkpointing:
        options = {"stage": stage, "precision": precision}
        found = trained(topology, checkpointing, failing, **options)
    expected = trained(topology, plain, **options)
    good = found is None or all(torch.equal(v, expected[n]) for n, v in found.items())
    parallel_assert(comm, good, "other bits after the error")


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_once_the_model_is_released_it_is_an_error_of_backward_again(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    model = Stack(4)
    tier = FailingTier(blocks=4, block_nbytes=4096)
    with over(tier, folder) as checkpointing:
        model.call = checkpointing
        with zeroified(model, adamw(model), stage=1, topology=topology):
            checkpointing.join(model)
            model(batch()).backward()
        tier.doing = "read"
        with pytest.raises(TierError, match="read at byte"):
            model(batch()).backward()
        assert grads(model) is not None
