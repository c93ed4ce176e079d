"""Inputs that are equal on all ranks of a group, of which each rank keeps a part (Pa)."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import hpczero
from hpczero.activations import Checkpointing
from hpczero.activations.store import Partitioned
from hpczero.errors import PlanError, StepError, TierError
from tests.activations.stacks import (
    BATCH,
    INPUT_NBYTES,
    WIDTH,
    Stack,
    batch,
    gradients,
    late,
    on_disk,
    on_host,
    plain,
    same,
    slow,
    torchs,
)
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, raises_on_all, zeroified
from tests.tier.twins import FailingTier

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]
LAYERS, STEPS = 6, 3


def calls_of(checkpointing: Checkpointing) -> Any:
    assert isinstance(checkpointing._rest, Partitioned)
    return checkpointing._rest._collectives.stats


def test_each_rank_keeps_a_part_of_each_input_and_the_bits_are_the_same(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    with Checkpointing.create(group=topology.shard) as checkpointing:
        found = gradients(checkpointing, STEPS, LAYERS)
        stats = calls_of(checkpointing)
        parallel_assert(comm, checkpointing.kept_nbytes == 0)
        share = INPUT_NBYTES // comm.size
        peak = checkpointing.kept_peak_nbytes
        parallel_assert(comm, peak == LAYERS * share, f"{peak}, expected {LAYERS * share}")
        gathers, sent = stats.calls["all_gather"], stats.sent_nbytes["all_gather"]
        parallel_assert(comm, gathers == STEPS * LAYERS, f"{gathers} all-gathers")
        expected = STEPS * LAYERS * share * (comm.size - 1)
        parallel_assert(comm, sent == expected, f"{sent} bytes sent, expected {expected}")
    parallel_assert(comm, same(found, gradients(plain, STEPS, LAYERS)))
    parallel_assert(comm, same(found, gradients(torchs, STEPS, LAYERS)))


@pytest.mark.parametrize("place", [on_disk, on_host, slow, late])
def test_parts_rest_on_a_tier(
    comm: MPI.Intracomm, topology: Topology, folder: Path, place: Any
) -> None:
    with place(folder, group=topology.shard) as checkpointing:
        found = gradients(checkpointing, STEPS, LAYERS)
        share = INPUT_NBYTES // comm.size
        flow = checkpointing.traffic
        moved = STEPS * (LAYERS - 1) * share
        parallel_assert(comm, flow.read_nbytes == flow.written_nbytes == moved, str(flow))
        parallel_assert(comm, checkpointing.kept_peak_nbytes == share)
        parallel_assert(comm, f"{comm.size} ranks" in checkpointing.describe())
    parallel_assert(comm, same(found, gradients(plain, STEPS, LAYERS)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sizes_that_ranks_do_not_divide_and_strange_strides(
    comm: MPI.Intracomm, topology: Topology, dtype: torch.dtype
) -> None:
    found = []
    with Checkpointing.create(group=topology.shard) as checkpointing:
        for call in (checkpointing, torchs):
            x = batch(rows=97)[:, :47].to(dtype).requires_grad_()
            y = call(torch.sin, (x * 2)[1:])
            y = call(torch.tanh, y.t())
            y = call(torch.cos, (y * 3)[:, ::2])
            y.sum().backward()
            found.append([x.grad if x.grad is not None else x])
    parallel_assert(comm, same(*found))


def test_inputs_that_differ_are_refused_on_all_ranks(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    def values(rank: int) -> Tensor:
        return batch(rank)

    def shape(rank: int) -> Tensor:
        return batch(rows=BATCH + (rank == 1))

    def order(rank: int) -> Tensor:
        return batch().roll(int(rank == 1), 0)  # the same numbers in other places

    def one_bit(rank: int) -> Tensor:
        x = torch.zeros(BATCH, WIDTH)
        x[-1, -1] = -0.0 if rank == 1 else 0.0
        return x

    with Checkpointing.create(group=topology.shard) as checkpointing:
        for make in (values, shape, order, one_bit):
            x = make(comm.rank).requires_grad_().clone()
            message = raises_on_all(
                comm,
                StepError,
                r"not the same on all ranks",
                partial(checkpointing, torch.sin, x),
            )
            parallel_assert(comm, "rank(s) [1" in message, message)
        # and goes on
        parallel_assert(comm, same(gradients(checkpointing, 1), gradients(plain, 1)))


@pytest.mark.parametrize("place", [None, on_disk])
def test_equal_inputs_may_begin_elsewhere_on_each_rank(
    comm: MPI.Intracomm, topology: Topology, folder: Path, place: Any
) -> None:
    room = torch.empty(BATCH * WIDTH + 64)
    begin = (-room.data_ptr() % 64) // 4 + comm.rank  # as memory of numpy may
    x = room[begin:][: BATCH * WIDTH].view(BATCH, WIDTH)
    x.copy_(batch())
    make = place or (lambda _, **options: Checkpointing.create(**options))
    found = []
    with make(folder, group=topology.shard) as checkpointing:
        for call in (checkpointing, plain):
            gain = torch.ones(WIDTH, requires_grad=True)
            y = call(lambda x, gain: torch.sin(x * gain), x, gain)
            call(torch.sin, x * gain)  # newer
            y.sum().backward()
            found.append(grads_of(gain))
    parallel_assert(comm, same(*found))


def grads_of(*leaves: Tensor) -> list[Tensor]:
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("doing", ["read", "write", "room"])
def test_a_part_that_cannot_be_brought_back_is_one_error_on_all_ranks(
    comm: MPI.Intracomm, topology: Topology, folder: Path, doing: str
) -> None:
    tier = FailingTier(number=errno.EIO, blocks=4, block_nbytes=4096)
    options: dict[str, Any] = {"tier": tier, "window": 4096, "buffers": 4, "group": topology.shard}
    with Checkpointing.create("disk", folder=folder, **options) as checkpointing:
        model = Stack()
        model.call = checkpointing
        tier.doing = doing if comm.rank == 1 else ""
        loss = model(batch())
        raises_on_all(comm, TierError, rf"{doing} at byte.*EIO", loss.backward)
        del loss
        tier.doing = ""
        parallel_assert(comm, same(gradients(checkpointing, 1), gradients(plain, 1)))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("place", [None, on_disk])
@pytest.mark.parametrize("fails", [False, True])
def test_in_a_sharded_model(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, place: Any, fails: bool
) -> None:
    def trained(call: Any) -> Any:
        model = Stack(4)
        model.call = call
        with zeroified(model, adamw(model), stage=stage, topology=topology) as sharding:
            (optimizer,) = sharding.optimizers
            if isinstance(call, Checkpointing):
                call.join(model)
                if fails and place is not None:
                    broken = call._rest.inner.tier  # type: ignore[union-attr]
                    if comm.rank == 0:
                        broken._read = lost
                    model(batch()).backward()
                    raises_on_all(comm, TierError, "input/output error", optimizer.step)
                    broken.__dict__.pop("_read", None)
                    optimizer.zero_grad()
            for step in range(3):
                torch.manual_seed(step)
                model(batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            return hpczero.full_state_dict(model)

    def lost(into: Tensor, offset: int) -> None:
        raise TierError(f"byte {offset}: input/output error")

    make = Checkpointing.create if place is None else partial(place, folder)
    with make(group=topology.shard) as checkpointing:
        found = trained(checkpointing)
    expected = trained(plain)
    good = found is None or all(torch.equal(v, expected[n]) for n, v in found.items())
    parallel_assert(comm, good, "other bits")


@pytest.mark.ranks(1)
def test_a_group_of_one_is_refused(comm: MPI.Intracomm, topology: Topology) -> None:
    with pytest.raises(PlanError, match=r"group of one rank.*nothing would be saved"):
        Checkpointing.create(group=topology.shard)


@pytest.mark.limit(60)
@pytest.mark.parametrize("rows", [(10, 40), (40, 10), (40, 41), (0, 40)])
def test_ranks_that_would_not_keep_the_same_arguments_are_told_instead_of_waiting(
    comm: MPI.Intracomm, topology: Topology, rows: tuple[int, int]
) -> None:
    """Of 64 floats a row: what has less than 4096 bytes stays."""
    mine = torch.randn(rows[0] if comm.rank == 0 else rows[1], 64)
    block = torch.nn.Linear(64, 64)
    with Checkpointing.create(group=topology.shard) as checkpointing:
        said = "arguments of a checkpointed block are not the same on all ranks"
        raises_on_all(comm, StepError, said, lambda: checkpointing(block, mine))


@pytest.mark.limit(60)
def test_a_rank_without_numbers_among_its_arguments_is_told_on_all(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    mine = torch.randn(40, 64) if comm.rank else torch.ones(40, 64, dtype=torch.long)
    with Checkpointing.create(group=topology.shard) as checkpointing:
        said = "arguments of a checkpointed block are not the same on all ranks"
        raises_on_all(comm, StepError, said, lambda: checkpointing(torch.sin, mine))
