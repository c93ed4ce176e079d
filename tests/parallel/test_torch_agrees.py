"""A second opinion: stock torch over gloo trains the same GPT in the same layouts.

DTensor for tensor and sequence parallelism, FSDP2 for replicas of shards, torch's own pipelining for stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import hpczero
from hpczero.options.config import LayoutOptions
from tests.equality.reference import LATER_GRADIENTS
from tests.helpers.gloo import gloo
from tests.helpers.parallel import parallel_assert
from tests.parallel.layouts import clip_of, laid_out, problems, sizes, train_laid_out
from tests.parallel.stock import (
    Seen,
    StockGPT,
    shard_by_fsdp2,
    split_by_dtensor,
    train_stock,
    train_stock_pipeline,
)
from tests.parallel.wholes import off

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

STEPS, MICRO_BATCHES = 5, 3
FIRST_GRADIENTS = 2e-6  # afterwards parameters differ in their last bits
CONFIG = sizes(tie_embeddings=False, positions="learned")


@pytest.fixture
def process_group(comm: MPI.Intracomm) -> Iterator[None]:
    """torch's own process group over the same ranks."""
    with gloo(comm):
        yield


def stock(comm: MPI.Intracomm, divide: Callable[[StockGPT], None], *, data: int, rank: int) -> Seen:
    """The steps with stock torch. Collective."""
    return train_stock(
        CONFIG, comm, divide, data=data, rank=rank, micro_batches=MICRO_BATCHES, steps=STEPS
    )


def train_here(
    topology: Topology, options: LayoutOptions, *, stage: int, micro_batches: int = MICRO_BATCHES
) -> Seen:
    """The same steps with hpczero. Collective over the topology's world."""
    seen = Seen()

    def around(model: Any, optimizer: Any, step: int) -> None:
        seen.gradients.append(hpczero.full_gradients(model))

    how: dict[str, Any] = {"stage": stage, "steps": STEPS, "micro_batches": micro_batches}
    found = train_laid_out(CONFIG, topology, options, around=around, **how)
    seen.losses, seen.norms = found.losses, found.norms
    return seen


def disagreements(mine: Seen, theirs: Seen, data: int) -> list[str]:
    """What is not the same. Whole gradients are on rank 0 alone, which must be the one to look."""
    said = []
    if not min(theirs.norms) < clip_of(data) < max(theirs.norms):
        said.append(f"clip some steps, not all: {theirs.norms}")
    if not off(theirs.gradients[-1]["wte.weight"], theirs.gradients[0]["wte.weight"]) > 0.1:
        said.append("gradients stay as they are, so parameters do")
    said += problems(mine, theirs)
    for step, (ours, right) in enumerate(zip(mine.gradients, theirs.gradients, strict=True)):
        if ours.keys() != right.keys():
            said.append(f"step {step}: names {sorted(ours.keys() ^ right.keys())[:4]}")
        for name in ours.keys() & right.keys():
            worst = off(ours[name], right[name])
            if not worst <= (LATER_GRADIENTS if step else FIRST_GRADIENTS):
                said.append(f"step {step}: gradient of {name} off by {worst:.2g}")
    return said


def compared(
    comm: MPI.Intracomm,
    options: LayoutOptions,
    theirs: Seen,
    *,
    stages: tuple[int, ...],
    nodes: list[int] | None = None,
    micro_batches: int = MICRO_BATCHES,
) -> list[str]:
    """What hpczero finds otherwise than ``theirs``, on rank 0. Collective."""
    said: list[str] = []
    for stage in stages:
        with laid_out(comm, options, nodes) as topology:
            mine = train_here(topology, options, stage=stage, micro_batches=micro_batches)
            if topology.is_root:
                wrong = disagreements(mine, theirs, topology.data.size)
                said += [f"stage {stage}, {each}" for each in wrong]
    return said


@pytest.mark.parametrize(
    "sequence", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "sequence"]
)
@pytest.mark.worth("DTensor is the second opinion on tensor parallelism")
def test_tensor_parallelism_is_that_of_dtensor(
    comm: MPI.Intracomm, process_group: None, sequence: bool
) -> None:
    said: list[str] = []
    for tensor in {2, comm.size}:
        data = comm.size // tensor
        mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))

        def divide(model: StockGPT, mesh: Any = mesh, data: int = data) -> None:
            split_by_dtensor(model, mesh["tensor"], sequence=sequence)
            if data > 1:
                shard_by_fsdp2(model, mesh["data"])

        rank = comm.rank // tensor
        theirs = stock(comm, divide, data=data, rank=rank)
        options = LayoutOptions(tensor=tensor, sequence=sequence)
        wrong = compared(comm, options, theirs, stages=(0, 3))
        said += [f"tensor {tensor}, {each}" for each in wrong]
    parallel_assert(comm, not said, "\n".join(said[:8]))


@pytest.mark.worth("FSDP2 is the second opinion on replicas")
@pytest.mark.ranks(4)
@pytest.mark.parametrize("secondary", [False, True], ids=["one shard", "secondary"])
def test_replicas_of_shards_are_those_of_fsdp2(
    comm: MPI.Intracomm, process_group: None, secondary: bool
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def divide(model: StockGPT) -> None:
        shard_by_fsdp2(model, mesh)

    theirs = stock(comm, divide, data=4, rank=comm.rank)
    # A second shard saves something only where the first lies on several nodes.
    nodes = [0, 1, 2, 3] if secondary else [0, 0, 1, 1]
    options = LayoutOptions(shard="2", secondary=secondary)
    stages = (3,) if secondary else (0, 1, 2, 3)
    said = compared(comm, options, theirs, stages=stages, nodes=nodes)
    parallel_assert(comm, not said, "\n".join(said[:8]))


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_a_second_shard_in_each_node_is_that_of_fsdp2(
    comm: MPI.Intracomm, process_group: None
) -> None:
    mesh = init_device_mesh("cpu", (4,))

    def divide(model: StockGPT) -> None:
        shard_by_fsdp2(model, mesh, again=2)

    theirs = stock(comm, divide, data=4, rank=comm.rank)
    options = LayoutOptions(secondary=True)
    said = compared(comm, options, theirs, stages=(3,), nodes=[0, 0, 1, 1])
    parallel_assert(comm, not said, "\n".join(said[:8]))


def test_stages_are_those_of_torchs_pipelining(comm: MPI.Intracomm, process_group: None) -> None:
    micro_batches = 5
    theirs = train_stock_pipeline(CONFIG, comm, micro_batches=micro_batches, steps=STEPS)
    options = LayoutOptions(pipeline=comm.size)
    said = compared(comm, options, theirs, stages=(1, 3), micro_batches=micro_batches)
    parallel_assert(comm, not said, "\n".join(said[:8]))
