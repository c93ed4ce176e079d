"""A medium that fails on one rank, wherever it does: one error on all ranks, nobody waits, and what was right stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero import Offload
from hpczero.errors import StepError, TierError
from hpczero.tier import StagedTier
from hpczero.zero.sharding import Sharding
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_backward, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

OFFLOAD = Offload("host", "host", "host", window=2**14, buffers=4)
TRANSPORTS = ["flat", "hierarchical", "window"]


@contextmanager
def unreadable(sharding: Sharding, *, here: bool, after: int = 0) -> Iterator[None]:
    """Reads of this rank's tier fail inside, where ``here``, but for the first ``after``."""
    store = sharding.away.store
    assert store is not None
    tier = store.tier
    assert isinstance(tier, StagedTier)
    read: Callable[[torch.Tensor, int], None] = tier._read
    done = 0

    def broken(into: torch.Tensor, offset: int) -> None:
        nonlocal done
        done += 1
        if done > after:
            raise TierError(f"offset {offset}: input/output error")
        read(into, offset)

    if here:
        tier._read = broken  # type: ignore[method-assign]
    try:
        yield
    finally:
        if here:
            del tier._read


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole weights, on rank 0."""
    return hpczero.full_state_dict(model) or {}


def same(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in mine.items())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_parameters_that_cannot_be_read_are_one_error_and_the_next_step_is_right(
    comm: MPI.Intracomm, topology: Topology, transport: str, precision: str, after: int
) -> None:
    ended = []
    for broken in (False, True):
        model = MLP()
        options = {"stage": 3, "transport": transport, "precision": precision, "topology": topology}
        with zeroified(model, adamw(model), offload=OFFLOAD, **options) as sharding:
            (optimizer,) = sharding.optimizers
            mlp_backward(model, comm.rank)
            optimizer.step()
            optimizer.zero_grad()
            if broken:
                last = comm.size - 1

                def train(model: MLP = model) -> None:
                    for _ in range(3):
                        mlp_backward(model, comm.rank)

                with unreadable(sharding, here=comm.rank == last, after=after):
                    message = raises_on_all(
                        comm,
                        TierError,
                        "input/output error" if comm.rank == last else f"tier of rank.s. .{last}.",
                        train,
                    )
                assert "unit" in message
                optimizer.zero_grad()
            mlp_backward(model, comm.rank)
            optimizer.step()
            ended.append(weights(model))
    parallel_assert(comm, same(*ended), "the step after the error has other bits")


def test_gradients_that_cannot_be_read_are_one_error_of_the_step(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    offload = Offload("host", "host", window=2**14, buffers=4)
    with zeroified(model, adamw(model), stage=2, topology=topology, offload=offload) as sharding:
        (optimizer,) = sharding.optimizers
        mlp_backward(model, comm.rank)
        before = weights(model)
        with unreadable(sharding, here=comm.rank == 0):
            mlp_backward(model, comm.rank)  # is added to what cannot be read
            norm = hpczero.clip_grad_norm_(model, 1.0)
            parallel_assert(comm, norm != norm, "a norm of what could not be read")
        raises_on_all(comm, TierError, "input/output error", optimizer.step)
        raises_on_all(comm, TierError, "input/output error", lambda: hpczero.full_gradients(model))
        parallel_assert(comm, same(weights(model), before), "the step was taken")
        optimizer.zero_grad()
        mlp_backward(model, comm.rank)
        optimizer.step()
        parallel_assert(comm, not same(weights(model), before) or comm.rank > 0, "no step")


def test_norms_of_gradients_that_cannot_be_read_are_one_error_of_the_step(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    offload = Offload("host", "host", window=2**14, buffers=4)
    with zeroified(model, adamw(model), stage=2, topology=topology, offload=offload) as sharding:
        (optimizer,) = sharding.optimizers
        mlp_backward(model, comm.rank)
        with unreadable(sharding, here=comm.rank == 0):
            hpczero.clip_grad_norm_(model, 1.0, float("inf"))
        raises_on_all(comm, TierError, "input/output error", optimizer.step)


def test_gathering_and_releasing_hold_nothing_where_a_part_cannot_be_read(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=3, topology=topology, offload=OFFLOAD) as sharding:
        (optimizer,) = sharding.optimizers
        before = weights(model)

        def gather() -> None:
            with hpczero.gathered(model):
                pytest.fail("it is not whole")

        with unreadable(sharding, here=comm.rank == 0, after=1):
            raises_on_all(comm, TierError, "", gather)
            raises_on_all(comm, TierError, "", lambda: hpczero.release(model, whole=True))
        with hpczero.gathered(model):
            whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
        parallel_assert(comm, same(before, whole), "gathered afterwards")
        mlp_backward(model, comm.rank)
        optimizer.step()


def test_values_changed_inside_gathered_that_cannot_be_kept_are_doubted(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP()
    with zeroified(model, adamw(model), stage=3, topology=topology, offload=OFFLOAD) as sharding:

        def change() -> None:
            with hpczero.gathered(model, modifier_rank=0):
                if comm.rank == 0:
                    for parameter in model.parameters():
                        parameter.data.mul_(2)
                broken.__enter__()

        broken = unreadable(sharding, here=comm.rank == 0)
        try:
            raises_on_all(comm, TierError, "input/output error", change)
        finally:
            broken.__exit__(None, None, None)
        with pytest.raises(StepError, match="load a checkpoint"):
            mlp_backward(model, comm.rank)
