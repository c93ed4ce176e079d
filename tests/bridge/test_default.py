"""After ``zeroify``, code that asks torch.distributed for the ranks of the job finds them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hpczero
import hpczero.bridge
from hpczero.bridge import tensors
from hpczero.errors import PlanError, StepError
from tests.helpers.bridged import bridge
from tests.helpers.parallel import parallel_assert
from tests.helpers.pretended import pretended_device
from tests.helpers.small_models import MLP, adamw, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


@pytest.fixture(autouse=True)
def _no_group() -> None:
    """Another test may have left one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Router(nn.Module):
    """Its loss balances the tokens of all ranks, as mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, 4)

    def shares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens (n, 6) the part that each expert gets, and its mean probability: (4,) each."""
        p = self.gate(x).softmax(-1)
        return (p.argmax(-1, keepdim=True) == torch.arange(4)).float().mean(0), p.mean(0)

    def forward(self, x: Tensor) -> Tensor:
        load, p = self.shares(x)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(load)
            load /= dist.get_world_size()
        return 4 * (load * p).sum()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_over_the_tokens_of_all_ranks_is_that_of_one_process(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    def tokens(rank: int) -> Tensor:
        return torch.randn(64, 6, generator=torch.Generator().manual_seed(rank))

    plain, model = Router(), Router()
    shares = [plain.shares(tokens(rank)) for rank in range(comm.size)]
    load, p = (torch.stack(each).mean(0) for each in zip(*shares, strict=True))
    expected = 4 * (load * p).sum()
    expected.backward()
    with zeroified(model, adamw(model), stage=stage, topology=topology):
        loss = model(tokens(comm.rank))
        loss.backward()
        found = sum(topology.gather(loss.item())) / comm.size
        gradient = hpczero.full_gradients(model)["gate.weight"]
    parallel_assert(comm, (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size))
    parallel_assert(comm, found == pytest.approx(expected.item(), rel=1e-6))
    assert plain.gate.weight.grad is not None
    parallel_assert(comm, torch.allclose(gradient, plain.gate.weight.grad, atol=1e-6))


def test_a_group_that_nobody_asked_for_gives_way(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    with zeroified(model, adamw(model), topology=topology):
        with bridge(comm):
            x = torch.ones(3)
            dist.all_reduce(x)
        parallel_assert(comm, x.tolist() == [comm.size] * 3)
        loss = model(torch.ones(2, 7)).sum()
        loss.backward()  # the model does not use the group


def test_compiler_that_finds_a_graph_in_its_cache_may_ask_the_group_for_more_time(
    comm: MPI.Intracomm,
) -> None:
    with bridge(comm):
        for device in ("cpu", "cuda"):
            found: Any = dist.group.WORLD
            parallel_assert(comm, found._get_backend(torch.device(device)) is found)
        # What torch._inductor.codecache calls.
        dist.distributed_c10d._add_ephemeral_timeout_for_all_pgs(timedelta(seconds=1))


def test_the_group_of_a_program_stays(comm: MPI.Intracomm, topology: Topology) -> None:
    with bridge(comm):
        before = dist.group.WORLD
        model = MLP()
        with zeroified(model, adamw(model), topology=topology):
            parallel_assert(comm, dist.group.WORLD is before)


def test_ddp_of_a_zeroified_model_is_refused(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    refused = pytest.raises(PlanError, match="means over the ranks already")
    with zeroified(model, adamw(model), stage=1, topology=topology), refused:
        nn.parallel.DistributedDataParallel(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asked", [{}, {"cpu": True}], ids=["by itself", "cpu"])
def test_accelerate_sees_the_ranks_or_is_told_of(
    comm: MPI.Intracomm, topology: Topology, caplog: pytest.LogCaptureFixture, asked: Any
) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model, samples = MLP(), cast("Any", [0, 1, 2, 3])
    optimizer = adamw(model)
    launched = {"LOCAL_RANK": str(comm.rank), "MASTER_ADDR": "localhost"} if asked else {}
    with mock.patch.dict(os.environ, launched), zeroified(model, optimizer, topology=topology):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(**asked)
        batches = [each.tolist() for each in accelerator.prepare(DataLoader(samples))]
        sees = [[comm.rank], [2 + comm.rank]] if asked else [[0], [1], [2], [3]]
        if asked:
            with pytest.raises(StepError, match=r"leave the model out of accelerator\.prepare"):
                accelerator.prepare(model)
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        AcceleratorState._reset_state(reset_partial_state=True)
    told = sum("set up for 1 process, and 2 ranks" in m for m in caplog.messages)
    parallel_assert(comm, (batches, told) == (sees, int(not asked and comm.rank == 0)), caplog.text)


@pytest.mark.ranks(2)
def test_tensors_on_a_device_go_through_the_host(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waits.append(self.device)

    monkeypatch.setattr(tensors, "DEVICES", ("cpu", "xpu"))
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    with bridge(comm), pretended_device() as device:
        x = device.accelerator.bring(torch.arange(6.0) + comm.rank)
        dist.all_reduce(x)
        rows = [torch.empty_like(x) for _ in range(comm.size)]
        dist.all_gather(rows, x[::2].repeat(2))
        sums = x.cpu().tolist()
        found = torch.stack(rows).cpu()
    parallel_assert(comm, sums == [2.0 * i + 1 for i in range(6)], f"{sums}")
    parallel_assert(comm, found.tolist() == [[1.0, 5.0, 9.0] * 2] * 2, f"{found}")
    parallel_assert(comm, not device.faults, f"{device.faults}")
    parallel_assert(comm, len(waits) >= 2, "what the program's stream writes must be there")
