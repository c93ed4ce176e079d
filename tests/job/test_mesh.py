"""Degrees multiply to the ranks or are refused by name, and every rank finds those that it shares something with."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, cast

import pytest

from hpczero.errors import ConfigError, PlanError, TopologyError
from hpczero.job.mesh import DATA, DEGREES, Mesh
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, raises_on_all, tiny_gpt, tiny_tokens, update
from tests.helpers.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

SHAPES = [shape for shape in itertools.product((1, 2, 3), repeat=5) if 1 < Mesh(*shape).size <= 36]


def test_shard_is_what_the_others_leave() -> None:
    assert Mesh.of(12).degrees == (1, 1, 12, 1, 1)
    assert Mesh.of(12, tensor=2, replicate=3).degrees == (1, 3, 2, 1, 2)


@pytest.mark.parametrize(
    ("degrees", "said"),
    [
        (
            {"shard": 2, "tensor": 2},
            "pipeline 1 x replicate 1 x shard 2 x sequence 1 x tensor 2 = 4",
        ),
        ({"tensor": 4}, r"shard \(what is left\) x sequence 1 x tensor 4 = 4.*a divisor"),
        ({"shard": 7}, "shard 7 .*= 7"),
        ({"replicate": 0}, "replicate 0"),
        ({"shard": 6, "tensor": 1, "pipeline": -1}, "pipeline -1"),
        ({"shard": -3, "tensor": -2}, "shard -3 .* tensor -2"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_ranks_are_refused_by_name(
    degrees: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}.*are 6") as raised:
        Mesh.of(6, **degrees)
    assert all(name in str(raised.value) for name in DEGREES)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_of_each_degree_tile_the_ranks(shape: tuple[int, ...]) -> None:
    mesh = Mesh(*shape)
    assert len({mesh.coordinates(rank) for rank in range(mesh.size)}) == mesh.size
    for name, degree in zip(DEGREES, shape, strict=True):
        groups = {mesh.members(rank, name) for rank in range(mesh.size)}
        assert all(len(group) == degree for group in groups)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
        place = DEGREES.index(name)
        for group in groups:
            assert [mesh.coordinates(rank)[place] for rank in group] == list(range(degree))


def test_tensor_ranks_are_neighbours_and_pipeline_ranks_farthest() -> None:
    mesh = Mesh(pipeline=2, shard=3, tensor=2)
    assert mesh.members(0, "tensor") == (0, 1)
    assert mesh.members(0, "shard") == (0, 2, 4)
    assert mesh.members(0, "pipeline") == (0, 6)
    assert mesh.members(7, "replicate", "shard") == (7, 9, 11)


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("nodes", [None, [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]])
def test_groups_of_a_topology_are_those_of_its_mesh(
    comm: MPI.Intracomm, nodes: list[int] | None
) -> None:
    from hpczero import Topology

    topology = Topology.create(comm, nodes, mesh=Mesh(replicate=2, shard=2))
    mesh = topology.mesh
    (node,) = (ranks for ranks in topology.world.nodes if comm.rank in ranks)
    for name, degrees in {"shard": ["shard"], "replicate": ["replicate"], "data": DATA}.items():
        group = getattr(topology, name)
        expected = list(mesh.members(comm.rank, *degrees))
        parallel_assert(comm, group.comm.allgather(comm.rank) == expected, name)
        on_node = [rank for rank in expected if rank in node]
        parallel_assert(comm, group.node.allgather(comm.rank) == on_node, f"{name} on its node")
        indices = group.comm.allgather(group.index)
        parallel_assert(comm, sorted(indices) == list(range(group.size)), f"{name}: {indices}")
    parallel_assert(comm, topology.data is topology.world)
    parallel_assert(comm, topology.tensor.size == topology.pipeline.size == 1)
    members = [*map(float, mesh.members(comm.rank, "shard"))]
    parallel_assert(comm, topology.shard.gather(float(comm.rank)) == members)
    topology.free()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_ranks_with_other_meshes_are_refused_on_all(comm: MPI.Intracomm) -> None:
    from hpczero import Topology

    odd = Mesh(replicate=comm.size) if comm.rank == 1 else Mesh(shard=comm.size)
    said = r"rank\(s\) 1, the degrees"
    raises_on_all(comm, TopologyError, said, Topology.create, comm, mesh=odd)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_whole_model_is_not_trained_over_ranks_that_are_to_hold_parts_of_one(
    comm: MPI.Intracomm,
) -> None:
    import hpczero

    topology = hpczero.Topology.create(comm, mesh=Mesh(tensor=2))
    model = tiny_gpt()
    said = r"a mesh of tensor 2 and a whole model, expected one .*hpczero\.parallel\.split"
    World(comm, topology).refuses(PlanError, said, model, adamw(model))
    topology.free()


@pytest.mark.mpi
@pytest.mark.ranks(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("nodes", [None, [0, 1]], ids=["one node", "two nodes"])
def test_two_groups_of_2_give_the_bits_of_two_jobs_of_2(
    comm: MPI.Intracomm, stage: int, nodes: list[int] | None
) -> None:
    """Beside each other at different lengths: no call of one half waits for the other."""
    half = comm.rank // 2
    part = comm.Split(half, comm.rank)
    beside = trained(part, stage, nodes, data=half, steps=3 + half)
    comm.Barrier()
    apart = None
    for turn in (0, 1):  # as one job after the other: the other half waits in a barrier
        if turn == half:
            apart = trained(part, stage, nodes, data=half, steps=3 + half)
        comm.Barrier()
    parallel_assert(comm, beside == apart, f"half {half}")
    same_as_first = comm.bcast(beside[0], root=0) == beside[0]
    parallel_assert(comm, same_as_first == (half == 0), "they differ")
    part.Free()


def trained(
    part: MPI.Comm, stage: int, nodes: list[int] | None, *, data: int, steps: int
) -> list[bytes]:
    """Losses and weights of a training on the ranks of ``part``, as bytes."""
    import hpczero

    topology = hpczero.Topology.create(cast("MPI.Intracomm", part), nodes)
    model = tiny_gpt(seed=3 + data)
    optimizer = adamw(model)
    hpczero.zeroify(model, optimizer, stage=stage, topology=topology)
    left = []
    for step in range(steps):
        tokens = tiny_tokens(10 * data + 2 * step + part.rank)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        update(optimizer)
        left.append(str(topology.gather(loss.item())).encode())
    weights = hpczero.full_state_dict(model)
    if weights is not None:
        left += [value.numpy().tobytes() for value in weights.values()]
    hpczero.release(model)
    topology.free()
    return left
