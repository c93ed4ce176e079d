"""Tensors arrive at the neighbouring stage as they were sent, from the host's memory and from a device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from hpczero import Mesh, Topology
from hpczero.comm import stage_messages
from hpczero.comm.devices import HostReach, Reach, StagedReach
from hpczero.comm.stage_messages import Message, StageMessages
from tests.helpers.late import LateAccelerator
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


REACHES: dict[str, Callable[[], Reach]] = {
    "host": HostReach,
    "staged": lambda: StagedReach(LateAccelerator()),
}


@pytest.fixture
def stages(comm: MPI.Intracomm) -> Iterator[Topology]:
    topology = Topology.create(comm, mesh=Mesh(pipeline=comm.size))
    yield topology
    topology.free()


def values(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (), (0, 4), (70001,)], ids=str)
def test_activations_and_gradients_pass_to_neighbours(
    comm: MPI.Intracomm, stages: Topology, reach: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Down with several on the way at a time, then up; twice over the same messages."""
    messages, rank, last = (
        StageMessages(stages.pipeline, reach=REACHES[reach]()),
        comm.rank,
        comm.size - 1,
    )
    wrong = []
    for step in range(2):
        messages.begin(17)
        for i in range(3):
            if rank:
                message = Message("F", rank, i)
                came = messages.receive(message)
                if i < 2:
                    messages.expect(Message("F", rank, i + 1))
                if not torch.equal(came, values(100 * step + 10 * i + rank - 1, shape, dtype)):
                    wrong.append(f"activation {i} of step {step}")
            if rank < last:
                sent = values(100 * step + 10 * i + rank, shape, dtype)
                messages.send(Message("F", rank + 1, i), sent)
        for i in range(3):
            if rank < last:
                came = messages.receive(Message("B", rank, i))
                if not torch.equal(came, values(1000 + 10 * i + rank + 1, shape, dtype)):
                    wrong.append(f"gradient {i} of step {step}")
            if rank:
                messages.send(Message("B", rank - 1, i), values(1000 + 10 * i + rank, shape, dtype))
        messages.finish()
    parallel_assert(comm, not wrong, f"{wrong}")
    neighbours = (rank > 0) + (rank < last)
    nbytes = values(0, shape, dtype).numel() * dtype.itemsize
    stats = messages.stats
    parallel_assert(comm, stats.messages == 6 * neighbours, f"{stats}")
    parallel_assert(comm, stats.sent_nbytes == 6 * neighbours * nbytes, f"{stats}")


def test_long_messages_go_in_pieces(
    comm: MPI.Intracomm, stages: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_messages, "CHUNK_BYTES", 1000)
    messages, data = StageMessages(stages.pipeline), values(3, (777, 3), torch.float32)
    messages.begin(0)
    came = messages.receive(Message("F", comm.rank, 0)) if comm.rank else data
    if comm.rank < comm.size - 1:
        messages.send(Message("F", comm.rank + 1, 0), came)
    messages.finish()
    parallel_assert(comm, torch.equal(came, data))


@pytest.mark.parametrize("reach", REACHES)
def test_ends_of_the_pipeline_swap_and_the_last_one_says(
    comm: MPI.Intracomm, stages: Topology, reach: str
) -> None:
    messages, last = StageMessages(stages.pipeline, reach=REACHES[reach]()), comm.size - 1
    if comm.rank in (0, last):
        came = messages.swap(values(comm.rank, (65,), torch.float32), last - comm.rank, name="w")
        assert torch.equal(came, values(last - comm.rank, (65,), torch.float32))
    (said,) = messages.last_says(0.1 + comm.rank)
    parallel_assert(comm, said == 0.1 + last)
