"""What torch trains over the bridge is what it trains over gloo: DDP, FSDP2, DTensor, a pipeline; and checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers.bridged import on_both
from tests.helpers.gloo import skip_where_fsdp2_sums
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

WIDTH = 12  # 2, 3 and 4 ranks divide it where DTensor has to cut it
STEPS = 4
WITHIN = 1e-7

Program = Callable[[int, int], Sequence[Tensor]]


def model(hidden: int = 31) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH))


def samples(rank: int, step: int) -> Tensor:
    """(6, WIDTH) fp32, other ones for every rank and step."""
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def whole(tensor: Tensor) -> Tensor:
    """All elements, wherever they are. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def trained(net: nn.Module, rank: int) -> list[Tensor]:
    """Losses of some steps of AdamW, and the weights after them."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    found = []
    for step in range(STEPS):
        loss = net(samples(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(whole(parameter) for parameter in net.parameters())]


def ddp(rank: int, size: int) -> list[Tensor]:
    return trained(nn.parallel.DistributedDataParallel(model()), rank)


def fsdp2(rank: int, size: int) -> list[Tensor]:
    """31 rows, which no number of ranks divides."""
    skip_where_fsdp2_sums()
    net = model()
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    return trained(net, rank)


def dtensor(rank: int, size: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (size,))
    net = parallelize_module(
        model(hidden=24), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    return trained(net, 0)  # all ranks share one sample


def pipeline(rank: int, size: int) -> list[Tensor]:
    """1F1B over as many stages as ranks, three micro batches more than stages."""
    torch.manual_seed(5)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(size)]
    net, micro = stages[rank], size + 3
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    stage = PipelineStage(net, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro, loss_fn=lambda out, aim: (out - aim).square().mean())
    found = []
    for step in range(STEPS):
        inputs, aims = (torch.cat([samples(n, step) for n in range(micro)]) for _ in range(2))
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=aims, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach() for loss in losses]
    return [*found, *(parameter.detach() for parameter in net.parameters())]


def checkpoint(rank: int, size: int) -> list[Tensor]:
    """Weights of FSDP2 saved by torch's checkpoint, and read into another model."""
    nets = []
    for shift in (0.0, 1.0):
        net = model()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(shift)
        fully_shard(net)
        nets.append(net)
    paths: list[Any] = [tempfile.mkdtemp(prefix="hpczero-dcp-") if rank == 0 else ""]
    dist.broadcast_object_list(paths, 0)
    dcp.state_dict_saver.save({"net": nets[0].state_dict()}, checkpoint_id=paths[0])
    state = {"net": nets[1].state_dict()}
    dcp.state_dict_loader.load(state, checkpoint_id=paths[0])
    found = [whole(parameter) for net in nets for parameter in net.parameters()]
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(paths[0])
    return found


@pytest.mark.mpi(min_size=2)
@pytest.mark.ranks(2, 4)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # DCP of torch 2.8
@pytest.mark.parametrize("program", [ddp, fsdp2, dtensor, pipeline, checkpoint])
def test_training_is_that_over_gloo(comm: MPI.Intracomm, program: Program) -> None:
    ours, theirs = on_both(comm, program)
    assert len(ours) == len(theirs)
    assert len(ours) >= 2
    # All numbers as one vector: a single loss may differ in its last bit, which is 1.2e-7 of it.
    one, other = (torch.cat([each.flatten() for each in found]) for found in (ours, theirs))
    off = float((one - other).norm() / other.norm())
    parallel_assert(comm, off <= WITHIN, f"{program.__name__}: {off:.2e} from gloo")
