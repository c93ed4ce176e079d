"""Replicas of shards: shards over a part of the ranks train what one process trains, whichever part that is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from hpczero import Mesh, Precision, Topology
from tests.equality import cases, models
from tests.equality.cases import gpt_case
from tests.equality.reference import (
    LATER_GRADIENTS,
    check_near,
    check_same_bits,
    train_plain,
    train_sharded,
)
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]


def meshes(size: int) -> list[Mesh]:
    """Every division of ``size`` ranks into replicas of shards, but all shards."""
    return [Mesh(replicate=size // n, shard=n) for n in range(1, size) if size % n == 0]


@pytest.fixture(params=["one node", "a node of each shard group"])
def topologies(comm: MPI.Intracomm, request: pytest.FixtureRequest) -> Iterator[list[Topology]]:
    """One of each mesh."""
    found = []
    for mesh in meshes(comm.size):
        apart = [rank // mesh.shard for rank in range(comm.size)]
        nodes = None if request.param == "one node" else apart
        found.append(Topology.create(comm, nodes, mesh=mesh))
    yield found
    for topology in found:
        topology.free()


@pytest.mark.parametrize("program", cases.PROGRAMS)
@pytest.mark.parametrize("transport", ["auto", "flat"])
def test_replicas_equal_one_process_at_every_stage(
    comm: MPI.Intracomm, topologies: list[Topology], program: str, transport: str
) -> None:
    case = gpt_case(
        lambda: models.gpt(dropout=0.1, checkpoint_activations=True),
        program=cases.PROGRAMS[program],
        optimizer=cases.smooth_adamw,
        max_norm=4.5,
        steps=4,
    )
    for topology in topologies:
        runs = {
            f"{topology.mesh}, stage {stage}": train_sharded(
                case, topology, stage=stage, transport=transport
            )
            for stage in (0, 1, 2, 3)
        }
        check_same_bits(topology, runs)
        expected = train_plain(case, comm.size) if topology.is_root else []
        check_near(topology, runs, expected, later_gradients=LATER_GRADIENTS)


@pytest.mark.parametrize("precision", ["fp32", Precision("bf16", reduce="bf16"), "fp16"])
def test_replicas_of_nodes_give_the_bits_of_shards_over_all_nodes(
    comm: MPI.Intracomm, precision: str | Precision
) -> None:
    """A tree in each node, then over nodes: one order of additions, whoever holds the shards.

    Gradients of one step: an optimizer's kernels round the tails of pieces in their own way, and pieces differ here.
    """
    case = gpt_case(models.gpt, optimizer=cases.adamw, steps=1)
    for mesh in meshes(comm.size):
        nodes = [rank // mesh.shard for rank in range(comm.size)]
        runs = []
        for chosen in (mesh, Mesh(shard=comm.size)):
            topology = Topology.create(comm, nodes, mesh=chosen)
            (record,) = train_sharded(
                case, topology, stage=3, precision=precision, transport="hierarchical"
            )
            runs.append(record.gradients)
            topology.free()
        mine, others = runs
        apart = [name for name in others if not torch.equal(mine[name], others[name])]
        parallel_assert(comm, mine.keys() == others.keys() and not apart, f"{mesh}: {apart[:4]}")
