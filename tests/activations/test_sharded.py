"""Checkpointed blocks of a zeroified model whose inputs rest elsewhere: the bits of plain torch at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero import Offload
from hpczero.activations import Checkpointing, keep_products
from hpczero.errors import PlanError
from tests.activations.stacks import (
    INPUT_NBYTES,
    Block,
    Stack,
    batch,
    late,
    on_disk,
    on_host,
    plain,
    slow,
    torchs,
)
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]

LAYERS, STEPS = 4, 3


def loss_of(model: nn.Module, rank: int, step: int, micro: int = 0) -> Tensor:
    """Each rank has samples and a dropout of its own."""
    torch.manual_seed(1000 * step + 10 * micro + rank)
    loss: Tensor = model(batch(1000 * step + 10 * micro + rank))
    return loss


def trained(topology: Topology, call: Any, micro_batches: int = 1, **options: Any) -> Any:
    """Weights after some steps, on rank 0."""
    model = Stack(LAYERS)
    model.call = call
    with zeroified(model, adamw(model), topology=topology, **options) as sharding:
        if isinstance(call, Checkpointing):
            call.join(model)
        for step in range(STEPS):
            for micro in range(micro_batches):
                with hpczero.accumulate(model, micro, micro_batches):
                    loss_of(model, topology.rank, step, micro).backward()
            hpczero.clip_grad_norm_(model, 0.5)
            for optimizer in sharding.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return hpczero.full_state_dict(model)


def by_torch(size: int) -> dict[str, Tensor]:
    """The same by plain torch in one process: the mean over ranks, by hand."""
    model = Stack(LAYERS)
    optimizer = adamw(model)
    for step in range(STEPS):
        sums: list[Tensor] = []
        for rank in range(size):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            mine = [p.grad for p in model.parameters() if p.grad is not None]
            sums = [a + b for a, b in zip(sums, mine, strict=True)] if sums else mine
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total * (1.0 / size)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


def check(comm: MPI.Intracomm, found: Any, expected: Any, *, exact: bool = True) -> None:
    """On rank 0, where the weights are."""
    good = True
    if found is not None and expected is not None:
        equal = torch.equal if exact else lambda a, b: torch.allclose(a, b, atol=1e-5)
        good = all(equal(value, expected[name]) for name, value in found.items())
    parallel_assert(comm, good, "other bits")


@pytest.mark.parametrize("place", [on_disk, on_host, slow, late])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bits_are_those_without_checkpointing_and_of_torch(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, place: Any
) -> None:
    with place(folder) as checkpointing:
        found = trained(topology, checkpointing, stage=stage)
        moved = STEPS * (LAYERS - 1) * INPUT_NBYTES
        flow = checkpointing.traffic
        counts = flow.read_nbytes, flow.written_nbytes
        parallel_assert(comm, counts == (moved, moved), f"{counts}, expected {moved}")
        parallel_assert(comm, checkpointing.kept_peak_nbytes == INPUT_NBYTES)
    check(comm, found, trained(topology, plain, stage=stage))
    check(comm, found, trained(topology, torchs, stage=stage))
    # The norm is summed over shards, in another order than torch's own: the clipping factor may round in another way.
    check(comm, found, by_torch(comm.size), exact=False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("parameters", ["device", "disk"])
def test_with_parameters_and_state_on_a_tier_of_their_own(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    parameters: Any,
    transport: str,
    precision: str,
) -> None:
    offload = Offload("disk", "disk", parameters, folder, 2**14, buffers=4)
    options = {"stage": 3, "transport": transport, "precision": precision}
    with on_disk(folder, window=8192) as checkpointing:
        found = trained(topology, checkpointing, 2, offload=offload, **options)
    check(comm, found, trained(topology, plain, 2, **options))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("transport", ["auto", "flat", "hierarchical"])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("policy", [keep_products, [torch.ops.aten.tanh.default]])
def test_selective_recomputation_of_sharded_parameters(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    policy: Any,
    stage: int,
    transport: str,
    precision: str,
) -> None:
    options = {"stage": stage, "transport": transport, "precision": precision}
    expected = trained(topology, plain, 2, **options)
    check(comm, trained(topology, Checkpointing.create(policy=policy), 2, **options), expected)
    with on_disk(folder, policy=policy) as checkpointing:
        check(comm, trained(topology, checkpointing, 2, **options), expected)


class Turned(Block):
    """Takes slices, as a hook does that gathers parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x[:, 5:], x[:, :5]], 1))


@pytest.mark.parametrize("parameters", ["device", "disk"])
@pytest.mark.parametrize("transport", ["flat", "hierarchical", "auto"])
def test_selective_recomputation_takes_no_operation_of_a_hook_for_one_of_the_block(
    comm: MPI.Intracomm, topology: Topology, folder: Path, transport: str, parameters: Any
) -> None:
    """Operations are matched by their number: one more in forward would give each the result of another."""
    offload = Offload(parameters, parameters, parameters, folder, 2**14, buffers=4)
    found = []
    for call in (Checkpointing.create(policy=[torch.ops.aten.slice.Tensor]), plain):
        model = Stack(LAYERS)
        model.blocks = nn.ModuleList(Turned() for _ in range(LAYERS))
        model.call = call
        options = {"stage": 3, "transport": transport, "offload": offload}
        with zeroified(model, adamw(model), topology=topology, **options) as sharding:
            for step in range(2):
                loss_of(model, comm.rank, step).backward()
                for optimizer in sharding.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(hpczero.full_state_dict(model))
    check(comm, *found)


def test_ranks_that_keep_inputs_in_different_ways_are_refused(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    model = Stack(LAYERS)
    other = comm.rank == comm.size - 1 and comm.size > 1
    with (
        zeroified(model, adamw(model), topology=topology),
        Checkpointing.create() if other else on_disk(folder) as checkpointing,
    ):
        if comm.size > 1:
            raises_on_all(comm, PlanError, "same options", lambda: checkpointing.join(model))
        else:
            checkpointing.join(model)
    with pytest.raises(PlanError, match="not zeroified"):
        checkpointing.join(model)
