"""Who is where, who owns what, and errors that every rank raises together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

import hpczero
from hpczero.errors import CheckpointNotWritten, ConfigError, DataError, HpcZeroError, TopologyError
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 3, 4)]


@contextmanager
def on_nodes(comm: MPI.Intracomm, nodes: list[int] | None) -> Iterator[Topology]:
    topology = hpczero.Topology.create(comm, nodes)
    yield topology
    topology.free()


def block(size: int) -> list[int]:
    return [rank // 2 for rank in range(size)]


def cyclic(size: int) -> list[int]:
    return [rank % 2 for rank in range(size)]


def uneven(size: int) -> list[int]:
    return [0] + [7] * (size - 1)


PLACEMENTS = pytest.mark.parametrize("place", [block, cyclic, uneven], ids=lambda f: f.__name__)


@PLACEMENTS
def test_node_map_is_what_was_given(comm: MPI.Intracomm, place: Callable[[int], list[int]]) -> None:
    given = place(comm.size)
    with on_nodes(comm, given) as topology:
        expected = [
            tuple(rank for rank in range(comm.size) if given[rank] == node)
            for node in dict.fromkeys(given)  # in order of their first rank
        ]
        mine = expected[topology.node_index]
        parallel_assert(comm, topology.world.nodes == tuple(expected), str(topology.world.nodes))
        parallel_assert(comm, mine[topology.local_rank] == comm.rank)
        parallel_assert(comm, topology.local_size == len(mine) and topology.world.faked)
        peers = topology.world.node.allgather(comm.rank)
        parallel_assert(comm, tuple(peers) == mine, str(peers))


@PLACEMENTS
def test_shard_order_is_a_bijection_and_rail_major_on_even_nodes(
    comm: MPI.Intracomm, place: Callable[[int], list[int]]
) -> None:
    with on_nodes(comm, place(comm.size)) as topology:
        owners = comm.allgather(topology.shard_index)
        parallel_assert(comm, sorted(owners) == list(range(comm.size)), str(owners))
        in_order = topology.shard.ordered.allgather(comm.rank)
        parallel_assert(comm, [owners[rank] for rank in in_order] == list(range(comm.size)))
        even = len({len(ranks) for ranks in topology.world.nodes}) == 1
        parallel_assert(comm, topology.is_rectangular == even)
        expected = (
            topology.local_rank * topology.num_nodes + topology.node_index if even else comm.rank
        )
        parallel_assert(comm, topology.shard_index == expected, str(owners))


@PLACEMENTS
def test_reduction_groups_are_the_shards_of_each_node_in_local_order(
    comm: MPI.Intracomm, place: Callable[[int], list[int]]
) -> None:
    with on_nodes(comm, place(comm.size)) as topology:
        owners = comm.allgather(topology.shard_index)
        expected = tuple(tuple(owners[rank] for rank in ranks) for ranks in topology.world.nodes)
        parallel_assert(comm, topology.shard.reduction_groups == expected, str(expected))


@pytest.mark.ranks(4)
def test_rail_joins_equal_local_ranks_of_all_nodes(comm: MPI.Intracomm) -> None:
    with on_nodes(comm, cyclic(comm.size)) as topology:
        rail = topology.world.rail
        parallel_assert(comm, rail is not None)
        assert rail is not None
        found = rail.allgather((topology.node_index, topology.local_rank))
        parallel_assert(comm, found == [(g, topology.local_rank) for g in range(2)], str(found))
        # all-gather over rail then node is the shard order: contiguous and in place
        rails = topology.world.node.allgather(rail.allgather(topology.shard_index))
        parallel_assert(comm, [*itertools.chain(*rails)] == list(range(comm.size)), str(rails))


def test_ranks_of_this_machine_are_one_node(comm: MPI.Intracomm, topology: Topology) -> None:
    parallel_assert(
        comm, topology.world.nodes == (tuple(range(comm.size)),), str(topology.world.nodes)
    )
    parallel_assert(comm, not topology.world.faked and topology.is_rectangular)
    parallel_assert(comm, topology.shard_index == topology.rank == comm.rank)
    text = topology.describe()
    parallel_assert(comm, f"1 node(s) x {comm.size} rank(s)" in text, text)


def test_node_list_of_the_wrong_length_is_refused(comm: MPI.Intracomm) -> None:
    raises_on_all(
        comm,
        TopologyError,
        f"names {comm.size + 1} ranks.*has {comm.size}",
        lambda: hpczero.Topology.create(comm, [0] * (comm.size + 1)),
    )


@pytest.mark.ranks(3)
def test_node_list_that_is_wrong_on_one_rank_is_refused_by_all(comm: MPI.Intracomm) -> None:
    wrong = comm.size - 1
    nodes = [0] * (comm.size + (comm.rank == wrong))
    raises_on_all(
        comm,
        TopologyError,
        f"names {comm.size + 1} ranks",
        lambda: hpczero.Topology.create(comm, nodes),
    )


def test_two_topologies_live_in_one_process(comm: MPI.Intracomm) -> None:
    with on_nodes(comm, None) as one, on_nodes(comm, cyclic(comm.size)) as other:
        if other.is_root:  # traffic on one is not seen by the other
            other.world.comm.bcast("other", root=0)
            text = one.broadcast_text("one")
        else:
            received = other.world.comm.bcast(None, root=0)
            text = one.broadcast_text("")
            assert received == "other"
        parallel_assert(comm, text == "one", text)
        parallel_assert(comm, one.num_nodes == 1)
        parallel_assert(comm, other.num_nodes == min(2, comm.size))


def test_communicators_are_ours_named_and_freed(comm: MPI.Intracomm) -> None:
    from mpi4py import MPI

    topology = hpczero.Topology.create(comm)
    world = topology.world
    parts = [world.comm, world.ordered, world.node, world.rail, topology.replicate.comm]
    names = [part.Get_name() for part in parts if part is not None]
    expected = ["hpczero.world", *(f"hpczero.world.{name}" for name in ("ordered", "node", "rail"))]
    expected.append("hpczero.replicate" if comm.size > 1 else "hpczero.world")
    parallel_assert(comm, names == expected, str(names))
    same = [MPI.Comm.Compare(part, comm) == MPI.IDENT for part in parts if part is not None]
    parallel_assert(comm, not any(same), "a communicator of the caller is used")
    topology.free()
    parallel_assert(comm, all(part == MPI.COMM_NULL for part in parts))


# --- agreed


def test_agreed_without_an_error_passes(comm: MPI.Intracomm, topology: Topology) -> None:
    with topology.agreed("do nothing"):
        value = comm.rank
    parallel_assert(comm, value == comm.rank)


@pytest.mark.ranks(3, 4)
def test_error_on_one_rank_is_raised_on_all_with_its_class_and_rank(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    def work() -> None:
        with topology.agreed("open the token file"):
            if comm.rank == 1:
                raise DataError("tokens.h5: no such file")

    said = raises_on_all(
        comm, DataError, r"on rank\(s\) 1, could not open the token file: tokens.h5", work
    )
    parallel_assert(comm, comm.allgather(said) == [said] * comm.size, said)


def test_error_on_all_ranks_is_raised_as_it_is(comm: MPI.Intracomm, topology: Topology) -> None:
    def work() -> None:
        with topology.agreed("check the options"):
            raise ConfigError("seed: got 'x', expected an integer")

    said = raises_on_all(comm, ConfigError, "^seed: got 'x'", work)
    parallel_assert(comm, "rank" not in said or comm.size == 1, said)


@pytest.mark.ranks(3, 4)
def test_error_on_several_ranks_names_them_all(comm: MPI.Intracomm, topology: Topology) -> None:
    def work() -> None:
        with topology.agreed("read"):
            if comm.rank > 0:
                raise DataError(f"file {comm.rank}")

    last = comm.size - 1
    raises_on_all(comm, DataError, rf"on rank\(s\) 1-{last}, could not read: file 1", work)


@pytest.mark.ranks(3, 4)
def test_foreign_error_keeps_its_class_at_home_and_is_told_to_the_others(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    error: Exception | None = None
    try:
        with topology.agreed("divide"):
            if comm.rank == 0:
                raise ZeroDivisionError("by nothing")
    except (ZeroDivisionError, HpcZeroError) as caught:
        error = caught
    expected = ZeroDivisionError if comm.rank == 0 else HpcZeroError
    parallel_assert(comm, type(error) is expected, repr(error))
    parallel_assert(comm, getattr(error, "agreed", False), "every rank knows")
    told = "on rank(s) 0, could not divide: ZeroDivisionError: by nothing"
    parallel_assert(comm, comm.rank == 0 or str(error) == told, str(error))


@pytest.mark.ranks(3, 4)
def test_foreign_error_is_what_every_rank_is_told_whatever_it_raised_itself(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    """Ranks that caught the error of their own would go on alone."""
    error: Exception | None = None
    try:
        with topology.agreed("write it"):
            if comm.rank == 0:
                raise CheckpointNotWritten("disk full")
            if comm.rank == 1:
                raise MemoryError("no memory")
    except (MemoryError, HpcZeroError) as caught:
        error = caught
    expected = MemoryError if comm.rank == 1 else HpcZeroError
    parallel_assert(comm, type(error) is expected, repr(error))
    told = "on rank(s) 1, could not write it: MemoryError: no memory"
    parallel_assert(comm, comm.rank == 1 or str(error) == told, str(error))


# --- small helpers


def test_gather_has_every_rank_in_order_with_all_digits(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    found = topology.gather(1.0 / 3.0 + comm.rank)
    parallel_assert(comm, found == [1.0 / 3.0 + rank for rank in range(comm.size)], str(found))


def test_text_of_any_rank_reaches_all(comm: MPI.Intracomm, topology: Topology) -> None:
    last = comm.size - 1
    text = topology.broadcast_text(f"from {comm.rank}", root=last)
    parallel_assert(comm, text == f"from {last}", text)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_error_of_a_class_from_elsewhere_is_told_as_the_one_above_it(topology: Topology) -> None:
    class Unreadable(DataError):
        pass

    def look() -> None:
        with topology.agreed("look"):
            if topology.is_root:
                raise Unreadable("not so")

    with pytest.raises(DataError, match=r"could not look: not so|^not so") as raised:
        look()
    assert type(raised.value) is DataError
    assert raised.value.exit_code == 78
