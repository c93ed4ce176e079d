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
    """And reduction groups are the shards of each node in local order."""
    with on_nodes(comm, place(comm.size)) as topology:
        owners = comm.allgather(topology.shard_index)
        groups = tuple(tuple(owners[rank] for rank in ranks) for ranks in topology.world.nodes)
        parallel_assert(comm, topology.shard.reduction_groups == groups, str(groups))
        parallel_assert(comm, sorted(owners) == list(range(comm.size)), str(owners))
        in_order = topology.shard.ordered.allgather(comm.rank)
        parallel_assert(comm, [owners[rank] for rank in in_order] == list(range(comm.size)))
        even = len({len(ranks) for ranks in topology.world.nodes}) == 1
        parallel_assert(comm, topology.is_rectangular == even)
        expected = (
            topology.local_rank * topology.num_nodes + topology.node_index if even else comm.rank
        )
        parallel_assert(comm, topology.shard_index == expected, str(owners))


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
    """On all ranks, or on the last one alone."""
    said = f"names {comm.size + 1} ranks.*has {comm.size}"
    for wrong in (True, comm.rank == comm.size - 1):
        nodes = [0] * (comm.size + wrong)
        raises_on_all(comm, TopologyError, said, hpczero.Topology.create, comm, nodes)


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


def agreed(topology: Topology, what: str, error: Exception | None) -> Callable[[], None]:
    """Work of all ranks, in which this one raises ``error``."""

    def work() -> None:
        with topology.agreed(what):
            if error is not None:
                raise error

    return work


@pytest.mark.ranks(3, 4)
def test_error_on_one_rank_is_raised_on_all_with_its_class_and_rank(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    agreed(topology, "do nothing", None)()
    error = DataError("tokens.h5: no such file") if comm.rank == 1 else None
    work = agreed(topology, "open the token file", error)
    expected = r"on rank\(s\) 1, could not open the token file: tokens.h5"
    said = raises_on_all(comm, DataError, expected, work)
    parallel_assert(comm, comm.allgather(said) == [said] * comm.size, said)


def test_error_on_all_ranks_is_raised_as_it_is(comm: MPI.Intracomm, topology: Topology) -> None:
    error = ConfigError("seed: got 'x', expected an integer")
    work = agreed(topology, "check the options", error)
    said = raises_on_all(comm, ConfigError, "^seed: got 'x'", work)
    parallel_assert(comm, "rank" not in said or comm.size == 1, said)


@pytest.mark.ranks(3, 4)
def test_error_on_several_ranks_names_them_all(comm: MPI.Intracomm, topology: Topology) -> None:
    work = agreed(topology, "read", DataError(f"file {comm.rank}") if comm.rank else None)
    said = rf"on rank\(s\) 1-{comm.size - 1}, could not read: file 1"
    raises_on_all(comm, DataError, said, work)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize(
    ("foreign", "others"), [(0, {}), (1, {0: CheckpointNotWritten("disk full")})]
)
def test_foreign_error_keeps_its_class_at_home_and_is_what_every_other_rank_is_told(
    comm: MPI.Intracomm, topology: Topology, foreign: int, others: dict[int, Exception]
) -> None:
    """Whatever that raised itself: ranks that caught the error of their own would go on alone."""
    own = {**others, foreign: MemoryError("no memory")}
    error: Exception | None = None
    try:
        agreed(topology, "write it", own.get(comm.rank))()
    except (MemoryError, HpcZeroError) as caught:
        error = caught
    parallel_assert(comm, type(error) is (MemoryError if comm.rank == foreign else HpcZeroError))
    parallel_assert(comm, getattr(error, "agreed", False), "every rank knows")
    told = f"on rank(s) {foreign}, could not write it: MemoryError: no memory"
    parallel_assert(comm, comm.rank == foreign or str(error) == told, str(error))


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

    error = Unreadable("not so") if topology.is_root else None
    with pytest.raises(DataError, match=r"could not look: not so|^not so") as raised:
        agreed(topology, "look", error)()
    assert type(raised.value) is DataError
    assert raised.value.exit_code == 78
