"""Groups of ranks: collectives over numbers and objects, and decisions that all ranks make alike."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from hpczero import errors
from hpczero.errors import CommError, HpcZeroError
from hpczero.job.log import spans
from hpczero.job.watchdog import Watchdog

# Sums of a few numbers over many ranks, rounded once: the same bits in whatever order they are added.
#
# A finite double is a whole number times 2^-1074. Here it is cut into digits of 32 bits, each in an integer of 64. Up
# to 2^31 ranks may add such digits, in any order and by any algorithm, and nothing is rounded. The sum is rounded when
# it becomes a double again, so it is that of ``math.fsum`` over all ranks' numbers. What travels does not grow with the
# number of ranks; a list of all numbers does.
#
#     digits, little end first (66) | how many are NaN, infinity, minus infinity (3)

WIDTH = 32
LEAST = 1074  # the smallest double above 0 is 2^-LEAST
DIGITS = -(-(1024 + LEAST) // WIDTH)
LENGTH = DIGITS + 3
MOST_RANKS = 2 ** (63 - WIDTH)

Digits = npt.NDArray[np.int64]

E = TypeVar("E", bound=Exception)


def digits_of(values: Sequence[float]) -> Digits:
    """``values`` as rows to add: (len(values), LENGTH) int64."""
    rows = np.zeros((len(values), LENGTH), dtype=np.int64)
    for row, value in zip(rows, values, strict=True):
        if not math.isfinite(value):
            row[DIGITS + (0 if math.isnan(value) else 1 if value > 0 else 2)] = 1
            continue
        whole, denominator = value.as_integer_ratio()  # the latter is a power of two
        shifted = abs(whole) << (LEAST + 1 - denominator.bit_length())
        row[:DIGITS] = np.frombuffer(shifted.to_bytes(DIGITS * WIDTH // 8, "little"), dtype="<u4")
        if whole < 0:
            row[:DIGITS] *= -1
    return rows


def values_of(rows: Digits) -> list[float]:
    """The sums that added ``rows`` stand for, each rounded to the nearest double; infinite where none is large enough.

    Args:
        rows: (n, LENGTH), sums of what ``digits_of`` gave on at most MOST_RANKS ranks.
    """
    found = []
    for *digits, nans, above, below in rows.tolist():
        whole = sum(digit << WIDTH * place for place, digit in enumerate(digits) if digit)
        if nans or (above and below):
            found.append(math.nan)
        elif above or below:
            found.append(math.inf if above else -math.inf)
        else:
            found.append(_rounded(whole))
    return found


def _rounded(whole: int) -> float:
    try:
        return whole / (1 << LEAST)  # of whole numbers: rounded once, however long they are
    except OverflowError:
        return math.inf if whole > 0 else -math.inf


class Forwards:
    """Forwards of this rank. All groups of a topology share the object.

    Attributes:
        begun: how many; equal on two ranks that have called the same models.
    """

    def __init__(self) -> None:
        """Not collective."""
        self.begun = 0

    def begin(self) -> None:
        """One begins. Not collective."""
        self.begun += 1


def told_all(error: E, comm: MPI.Intracomm) -> E:
    """``error``, marked as one that every rank of ``comm`` raises. Not collective."""
    error.agreed = is_job(comm)  # type: ignore[attr-defined]
    error.raised_by = comm.size  # type: ignore[attr-defined]
    return error


def is_job(comm: MPI.Intracomm) -> bool:
    """Whether these are all ranks that were started: an error that all of them raise needs to be told to nobody."""
    return bool(comm.size == MPI.COMM_WORLD.size)


@contextmanager
def agreed(comm: MPI.Intracomm, watchdog: Watchdog, what: str) -> Iterator[None]:
    """Run rank-local work inside; if any rank of ``comm`` raises, all of them raise.

    Collective over ``comm``, at the end of the block. The block must not communicate: a rank that fails leaves it
    early.

    ``what`` names the work in the message, e.g. ``"open the token file"``.

    Raises:
        HpcZeroError: of the class that the first failing rank raised; the message names the ranks that failed. A
            foreign exception is raised again unchanged on its own rank, and named in the error of every other rank. It
            goes first where ranks fail differently, because its rank may not be able to go on.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # raised again below, on every rank
        error = caught
    except GeneratorExit:
        raise
    except BaseException as left:  # this rank does not come to the agreement
        if comm.size > 1:
            watchdog.left(f"the agreement of all ranks after {what!r}", left)
        raise
    is_foreign = not isinstance(error, HpcZeroError)
    mine = None if error is None else (is_foreign, _told_as(error), errors.words_of(error))
    with watchdog.collective(f"the agreement of all ranks after {what!r}"):
        failed = np.array([error is not None], dtype=np.int64)
        comm.Allreduce(MPI.IN_PLACE, failed, op=MPI.MAX)
        if not failed[0]:
            return
        reports = comm.allgather(mine)
    failures = [(rank, *entry) for rank, entry in enumerate(reports) if entry is not None]
    failures = [failure for failure in failures if failure[1]] or failures
    ranks = [failure[0] for failure in failures]
    _, foreign, name, text = failures[0]
    kind = None if foreign else getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, HpcZeroError)):
        kind = HpcZeroError
        text = f"{name}: {text}"
    if error is not None and is_foreign:
        raise told_all(error, comm)
    where = "" if len(ranks) == comm.size else f"on rank(s) {spans(ranks)}, could not {what}: "
    raise told_all(kind(f"{where}{text}"), comm) from error


def _told_as(error: Exception) -> str:
    """Name of the error's class. For one that ``errors`` does not have it is that of its nearest base in ``errors``."""
    for kind in type(error).__mro__:
        if issubclass(kind, HpcZeroError) and getattr(errors, kind.__name__, None) is kind:
            return str(kind.__name__)
    return type(error).__name__


# Group: ranks that share something, how they lie on nodes, and small agreements between them.
#
# With G nodes of L ranks each, rank (node g, local l) has index ``l*G + g`` (rail-major). An all-gather over the rail
# and then over the node is then contiguous and in place.

Nodes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Group:
    """Communicators and node map of some ranks; ranks are numbered within the group.

    Attributes:
        comm: all ranks of the group, in rank order.
        ordered: the same ranks in the order of ``index``.
        node: ranks of this node.
        rail: ranks with this local rank, one of each node; None if nodes have different numbers of ranks.
        nodes: ranks of every node, nodes in order of their first rank.
        faked: whether ``nodes`` was given rather than found.
        watchdog: ends the job when a call over these ranks does not return. All groups of a topology share it.
        forwards: that this rank has begun. All groups of a topology share it.
    """

    comm: MPI.Intracomm
    ordered: MPI.Intracomm
    node: MPI.Intracomm
    rail: MPI.Intracomm | None
    nodes: Nodes
    faked: bool
    watchdog: Watchdog
    forwards: Forwards

    @classmethod
    def create(
        cls,
        comm: MPI.Intracomm,
        nodes: Nodes,
        name: str,
        watchdog: Watchdog,
        *,
        forwards: Forwards,
        faked: bool,
    ) -> Group:
        """Split ``comm``, which belongs to the group from now on. Collective over ``comm``; ``free`` undoes it.

        ``nodes`` has the ranks of ``comm`` on each node. Debuggers and traces show ``name``.
        """
        node_index = next(g for g, ranks in enumerate(nodes) if comm.rank in ranks)
        local_rank = nodes[node_index].index(comm.rank)
        rectangular = len({len(ranks) for ranks in nodes}) == 1
        index = local_rank * len(nodes) + node_index if rectangular else comm.rank
        return cls(
            comm=named(comm, name),
            ordered=named(comm.Split(0, index), f"{name}.ordered"),
            node=named(comm.Split(node_index, local_rank), f"{name}.node"),
            rail=named(comm.Split(local_rank, node_index), f"{name}.rail") if rectangular else None,
            nodes=nodes,
            faked=faked,
            watchdog=watchdog,
            forwards=forwards,
        )

    def part(self, ranks: Sequence[int], name: str) -> Group:
        """The group of ``ranks``, this rank among them. Collective over this group.

        Each rank calls it with its own part. A rank whose part is itself alone needs no other rank and may call it at
        any time.

        ``ranks`` are in rising order. The parts of all ranks are disjoint or equal.
        """
        if len(ranks) == 1:
            own = named(MPI.COMM_SELF.Dup(), name)
            return Group(own, own, own, own, ((0,),), self.faked, self.watchdog, self.forwards)
        comm = self.comm.Split(ranks[0], self.rank)
        here = [tuple(ranks.index(rank) for rank in node if rank in ranks) for node in self.nodes]
        nodes = tuple(sorted((node for node in here if node), key=lambda node: node[0]))
        assert isinstance(comm, MPI.Intracomm), "split from an intracommunicator"
        return Group.create(
            comm, nodes, name, self.watchdog, forwards=self.forwards, faked=self.faked
        )

    def beside(self) -> Group:
        """This group with a communicator of its own, for another thread. Collective. Free its ``comm`` alone."""
        return replace(self, comm=self.comm.Dup())

    def free(self) -> None:
        """Free the communicators. Collective; the group must not be used afterwards."""
        comms = (self.rail, self.node, self.ordered, self.comm)
        for comm in {id(comm): comm for comm in comms if comm is not None}.values():
            comm.Free()

    # --- who is where

    @property
    def rank(self) -> int:
        """Rank of this process within the group."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.comm.size

    @property
    def is_root(self) -> bool:
        """Whether this is the group's rank 0."""
        return self.comm.rank == 0

    @property
    def is_job(self) -> bool:
        """Whether these are all ranks that were started."""
        return is_job(self.comm)

    @property
    def index(self) -> int:
        """Place of this rank in ``ordered``: which shard of everything the group shares is its own."""
        return self.ordered.rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes, G."""
        return len(self.nodes)

    @property
    def node_index(self) -> int:
        """Number of this rank's node, g."""
        return next(g for g, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """Place of this rank within its node, l."""
        return self.node.rank

    @property
    def local_size(self) -> int:
        """Ranks of the group on this node."""
        return self.node.size

    @property
    def is_rectangular(self) -> bool:
        """Whether every node has the same number of ranks."""
        return self.rail is not None

    @property
    def reduction_groups(self) -> tuple[tuple[int, ...], ...]:
        """Indices node by node, in local order. Gradients are summed in this order."""
        if not self.is_rectangular:
            return self.nodes
        num_nodes = len(self.nodes)
        return tuple(
            tuple(local * num_nodes + g for local in range(len(ranks)))
            for g, ranks in enumerate(self.nodes)
        )

    # --- small agreements; all are collective over the group
    # Results are made inside: whoever tries again what a signal has kept from them would meet the others' next call.

    def agreed(self, what: str) -> AbstractContextManager[None]:
        """``agreed`` over this group."""
        return agreed(self.comm, self.watchdog, what)

    def same(self, mine: str, what: str, unlike: Exception) -> None:
        """Raise ``unlike``, on every rank, if any rank has another text than rank 0. Collective over the group."""
        first = self.broadcast_text(mine)
        with self.agreed(what):
            if mine != first:
                raise unlike

    def gather(self, value: float) -> list[float]:
        """``value`` of every rank in rank order, on every rank, as fp64. Collective over the group."""
        mine = np.array([value], dtype=np.float64)
        found = np.empty(self.size, dtype=np.float64)
        with self.watchdog.collective("Topology.gather"):
            self.comm.Allgather(mine, found)
            return [float(v) for v in found]

    def share(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """``values`` of every rank in rank order, on every rank, as (size, len(values)). Collective over the group.

        Raises:
            CommError: a rank brings another number of values: it is in another call.
        """
        if self.size == 1:
            return values[None]
        found = np.empty((self.size, len(values)), dtype=np.float64)
        what = f"an exchange of {len(values)} number(s) over {self.size} ranks"
        with self.watchdog.collective(what):
            try:
                self.comm.Allgather(np.ascontiguousarray(values), found)
            except MPI.Exception as error:
                raise CommError(
                    f"rank {self.rank} of the group: {what} ended with {error}: another rank brought more or fewer, so "
                    "it is in another call; make the same calls on all ranks (clip_grad_norm_, optimizer.step, "
                    "full_state_dict, ...). HPCZERO_STRICT=1 may show which rank departs where"
                ) from error
            return found

    def total(self, *values: float) -> float:
        """Sum of every rank's ``values``, rounded once: ``math.fsum`` of them all, on every rank. Collective.

        It is for what is summed in each step: no rank makes a list of all ranks' numbers. Ranks may have different
        numbers of values.
        """
        if self.size == 1:
            return math.fsum(values)
        mine = digits_of(values).sum(axis=0, keepdims=True)
        found = np.empty_like(mine)
        with self.watchdog.collective("Topology.total"):
            self.comm.Allreduce(mine, found, op=MPI.SUM)
            return values_of(found)[0]

    def largest(self, value: int) -> int:
        """The largest of every rank's ``value``, on every rank. Collective over the group."""
        mine = np.array([value], dtype=np.int64)
        found = np.empty_like(mine)
        with self.watchdog.collective("Topology.largest"):
            self.comm.Allreduce(mine, found, op=MPI.MAX)
            return int(found[0])

    def gather_text(self, text: str) -> list[str]:
        """``text`` of every rank in rank order, on every rank. Collective over the group."""
        with self.watchdog.collective("Topology.gather_text"):
            return [str(found) for found in self.comm.allgather(text)]

    def hosts(self) -> list[str]:
        """Host name of every rank in rank order, on every rank. Collective over the group."""
        return self.gather_text(socket.gethostname())

    def broadcast_text(self, text: str, root: int = 0) -> str:
        """``text`` of rank ``root`` on every rank. Collective over the group."""
        with self.watchdog.collective("Topology.broadcast_text"):
            found = self.comm.bcast(text if self.rank == root else None, root=root)
            return str(found)

    def barrier(self) -> None:
        """Wait for every rank. Collective over the group."""
        with self.watchdog.collective("Topology.barrier"):
            self.comm.Barrier()

    def describe(self) -> str:
        """Node map in a few lines, for a run header; rank 0 alone has the names of hosts. Collective over the group."""
        with self.watchdog.collective("Topology.describe"):
            hosts = self.comm.gather((self.node_index, socket.gethostname()), root=0)
        shape = (
            f"{self.num_nodes} node(s) x {len(self.nodes[0])} rank(s)"
            if self.is_rectangular
            else f"{self.num_nodes} uneven nodes, {self.size} ranks (shards in rank order)"
        )
        note = ", nodes faked by option" if self.faked else ""
        vendor, version = MPI.get_vendor()
        lines = [
            f"topology: {shape}{note}, {vendor} {'.'.join(map(str, version))}, "
            f"MPI {MPI.Get_version()[0]}.{MPI.Get_version()[1]}"
        ]
        if hosts is not None:
            names = dict(hosts)
            for g, ranks in list(enumerate(self.nodes))[:8]:
                lines.append(f"  node {g} ({names[g]}): ranks {spans(ranks)}")
            if self.num_nodes > 8:
                lines.append(f"  ... {self.num_nodes - 8} more nodes")
        return "\n".join(lines)


def named(comm: MPI.Comm, name: str) -> MPI.Intracomm:
    """Give ``comm`` a name that debuggers and traces show; returns it."""
    assert isinstance(comm, MPI.Intracomm), "split from an intracommunicator"
    comm.Set_name(f"hpczero.{name}")
    return comm


def unlike(group: Group, mine: Sequence[str], root: int = 0) -> tuple[str, str] | None:
    """Lines that only this rank has, and lines that only ``root`` has; None if both have the same. Collective.

    The order of lines counts. Each of the two texts has ``; `` between its lines, or is ``nothing``.
    """
    text = group.broadcast_text("\n".join(mine), root)
    expected = text.split("\n") if text else []
    if list(mine) == expected:
        return None
    more = "; ".join(line for line in mine if line not in expected)
    less = "; ".join(line for line in expected if line not in mine)
    return more or "nothing", less or "nothing"
