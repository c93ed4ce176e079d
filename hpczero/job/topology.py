"""Topology: who talks to whom.

Owns: the node map and the named, duplicated communicators, and the small agreements between ranks. Must not know:
units, tensors, stages. It is an argument, never a global: several live in one process.

With G nodes of L ranks each, rank (node g, local l) owns shard ``l*G + g`` (rail-major): an all-gather over the rail
and then over the node is contiguous and in place.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from hpczero import errors
from hpczero.errors import HpcZeroError, TopologyError
from hpczero.job.roll_call import RollCall
from hpczero.job.watchdog import Watchdog
from hpczero.options.environment import Environment


@dataclass(frozen=True)
class Topology:
    """Communicators and node map of one data-parallel group.

    Attributes:
        world: all ranks; shard: the same ranks in shard order.
        node: ranks of this node; rail: ranks with this local rank, one per node; None where nodes are uneven.
        replicate: ranks that hold the same shard; this rank alone while the whole world shares each unit.
        nodes: local world ranks of every node, nodes in order of their first rank.
        faked: whether ``nodes`` was given rather than found.
        watchdog: ends the job when a collective over these ranks does not return.
    """

    world: MPI.Intracomm
    shard: MPI.Intracomm
    node: MPI.Intracomm
    rail: MPI.Intracomm | None
    replicate: MPI.Intracomm
    nodes: tuple[tuple[int, ...], ...]
    faked: bool
    watchdog: Watchdog

    @classmethod
    def create(
        cls,
        comm: MPI.Intracomm,
        nodes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Topology:
        """Find the nodes and duplicate the communicators. Collective over ``comm``; ``free()`` undoes it.

        From here on an uncaught error on one rank ends the whole job (``errors.install_abort_hook``).

        Args:
            comm: the data-parallel ranks; it is duplicated, never used for our traffic.
            nodes: node number of each rank, e.g. ``[0, 0, 1, 1]`` to treat one host as two; None asks MPI.
            timeout_s: seconds one collective over these ranks may take before the job is ended with exit 86; 0 waits
                for ever, None takes HPCZERO_TIMEOUT or half an hour.

        Raises:
            ConfigError: HPCZERO_TIMEOUT is not a number of seconds.
            TopologyError: ``nodes`` does not name one node for each rank; on every rank.
        """
        if comm.size > 1:
            errors.install_abort_hook()
        watchdog = Watchdog(
            comm.rank, Environment.read().timeout_s if timeout_s is None else timeout_s
        )
        try:
            with watchdog.watch("Topology.create"):
                return cls._create(comm, nodes, watchdog)
        except BaseException:
            watchdog.stop()
            raise

    @classmethod
    def _create(
        cls, comm: MPI.Intracomm, nodes: Sequence[int] | None, watchdog: Watchdog
    ) -> Topology:
        world = _named(comm.Dup(), "world")
        _check_nodes(world, nodes)
        node_map = _find_nodes(world, nodes)
        node_index = next(g for g, ranks in enumerate(node_map) if world.rank in ranks)
        local_rank = node_map[node_index].index(world.rank)
        if world.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            watchdog.attend(RollCall(_named(world.Dup(), "roll call")))
        rectangular = len({len(ranks) for ranks in node_map}) == 1
        shard_index = local_rank * len(node_map) + node_index if rectangular else world.rank
        return cls(
            world=world,
            shard=_named(world.Split(0, shard_index), "shard"),
            node=_named(world.Split(node_index, local_rank), "node"),
            rail=_named(world.Split(local_rank, node_index), "rail") if rectangular else None,
            replicate=_named(MPI.COMM_SELF.Dup(), "replicate"),
            nodes=node_map,
            faked=nodes is not None,
            watchdog=watchdog,
        )

    @classmethod
    def of_world(cls, nodes: Sequence[int] | None = None) -> Topology:
        """``create`` on MPI.COMM_WORLD, for callers that do not import MPI. Collective.

        Raises:
            TopologyError: the ranks that were started do not see each other; and as ``create``.
        """
        check_launch(MPI.COMM_WORLD.size, Environment.read())
        return cls.create(MPI.COMM_WORLD, nodes)

    @classmethod
    def alone(cls) -> Topology:
        """This rank as a world of its own, for measurements without communication. Not collective."""
        return cls.create(MPI.COMM_SELF)

    def free(self) -> None:
        """Free the communicators and end the watchdog. Collective; the topology must not be used afterwards."""
        with self.watchdog.watch("Topology.free"):
            for comm in (self.replicate, self.rail, self.node, self.shard, self.world):
                if comm is not None:
                    comm.Free()
        self.watchdog.stop()
        self.watchdog.leave()

    @property
    def rank(self) -> int:
        """World rank."""
        return self.world.rank

    @property
    def size(self) -> int:
        """World size."""
        return self.world.size

    @property
    def is_root(self) -> bool:
        """Whether this is world rank 0, the one that prints and writes small files."""
        return self.world.rank == 0

    @property
    def num_nodes(self) -> int:
        """Nodes, G."""
        return len(self.nodes)

    @property
    def node_index(self) -> int:
        """Which node this rank is on, g."""
        return next(g for g, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """Place of this rank within its node, l."""
        return self.node.rank

    @property
    def local_size(self) -> int:
        """Ranks on this node."""
        return self.node.size

    @property
    def is_rectangular(self) -> bool:
        """Whether every node has the same number of ranks."""
        return self.rail is not None

    @property
    def shard_index(self) -> int:
        """Which shard of every unit this rank owns."""
        return self.shard.rank

    @property
    def reduction_groups(self) -> tuple[tuple[int, ...], ...]:
        """Shard indices node by node, in local order: the order in which gradients are summed."""
        if not self.is_rectangular:
            return self.nodes
        num_nodes = len(self.nodes)
        return tuple(
            tuple(local * num_nodes + g for local in range(len(ranks)))
            for g, ranks in enumerate(self.nodes)
        )

    def describe(self) -> str:
        """Node map in a few lines, for a run header. Collective over world."""
        with self.watchdog.watch("Topology.describe"):
            hosts = self.world.gather((self.node_index, socket.gethostname()), root=0)
        shape = (
            f"{self.num_nodes} node(s) x {len(self.nodes[0])} rank(s)"
            if self.is_rectangular
            else f"{self.num_nodes} uneven nodes, {self.size} ranks (flat shard order)"
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
                lines.append(f"  node {g} ({names[g]}): ranks {_spans(ranks)}")
            if self.num_nodes > 8:
                lines.append(f"  ... {self.num_nodes - 8} more nodes")
        return "\n".join(lines)

    @contextmanager
    def agreed(self, what: str) -> Iterator[None]:
        """Run rank-local work inside; if any rank raises, all ranks raise.

        Collective over world, at the end of the block. The block must not communicate: a rank that fails leaves it
        early.

        Args:
            what: names the work in the message, e.g. ``"open the token file"``.

        Raises:
            HpcZeroError: of the class the first failing rank raised, naming the ranks that failed. A foreign exception
                is raised again as it is on its own rank, and is what every other rank is told: one that raised, and
                could go on after, its own error would be alone.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # raised again below, on every rank
            error = caught
        failed = np.array([error is not None], dtype=np.int64)
        is_foreign = not isinstance(error, HpcZeroError)
        mine = None if error is None else (is_foreign, _told_as(error), str(error))
        with self.watchdog.watch(f"the agreement of all ranks after {what!r}"):
            self.world.Allreduce(MPI.IN_PLACE, failed, op=MPI.MAX)
            if not failed[0]:
                return
            reports = self.world.allgather(mine)
        failures = [(rank, *entry) for rank, entry in enumerate(reports) if entry is not None]
        failures = [failure for failure in failures if failure[1]] or failures
        ranks = [failure[0] for failure in failures]
        _, foreign, name, text = failures[0]
        kind = None if foreign else getattr(errors, name, None)
        if not (isinstance(kind, type) and issubclass(kind, HpcZeroError)):
            kind = HpcZeroError
            text = f"{name}: {text}"
        if error is not None and is_foreign:
            error.agreed = True  # type: ignore[attr-defined]  # tells errors.run that the peers know
            raise error
        where = "" if len(ranks) == self.size else f"on rank(s) {_spans(ranks)}, could not {what}: "
        agreed = kind(f"{where}{text}")
        agreed.agreed = True
        raise agreed from error

    def gather(self, value: float) -> list[float]:
        """``value`` of every rank in rank order, on every rank. Collective over world."""
        mine = np.array([value], dtype=np.float64)
        found = np.empty(self.size, dtype=np.float64)
        with self.watchdog.watch("Topology.gather"):
            self.world.Allgather(mine, found)
        return [float(v) for v in found]

    def gather_text(self, text: str) -> list[str]:
        """``text`` of every rank in rank order, on every rank. Collective over world."""
        with self.watchdog.watch("Topology.gather_text"):
            return [str(found) for found in self.world.allgather(text)]

    def hosts(self) -> list[str]:
        """Name of the host of every rank in rank order, on every rank. Collective over world."""
        return self.gather_text(socket.gethostname())

    def broadcast_text(self, text: str, root: int = 0) -> str:
        """``text`` of rank ``root`` on every rank. Collective over world."""
        with self.watchdog.watch("Topology.broadcast_text"):
            found = self.world.bcast(text if self.rank == root else None, root=root)
        return str(found)

    def barrier(self) -> None:
        """Wait for every rank. Collective over world."""
        with self.watchdog.watch("Topology.barrier"):
            self.world.Barrier()

    def abort(self, code: int) -> None:
        """End the job on every rank with exit status ``code``. Not collective."""
        errors.abort_job(code)
        raise SystemExit(code)


def _told_as(error: Exception) -> str:
    """The name of its class; of one of ours that ``errors`` has not, that of the next above it which it has."""
    for kind in type(error).__mro__:
        if issubclass(kind, HpcZeroError) and getattr(errors, kind.__name__, None) is kind:
            return str(kind.__name__)
    return type(error).__name__


def started_ranks() -> int:
    """Ranks that MPI sees. Not collective."""
    return MPI.COMM_WORLD.size


def check_launch(size: int, environment: Environment) -> None:
    """Refuse ranks that each think they are alone: N equal runs would overwrite one another. Not collective.

    Args:
        size: ranks that MPI sees.
        environment: of this process.

    Raises:
        TopologyError: the launcher says another number.

    Source: open-mpi/ompi#13523, mpi4py#155: srun with the wrong plugin starts N worlds of one rank, without a word.
    """
    started = environment.launched_ranks
    if started is not None and started != size:
        raise TopologyError(
            f"MPI sees {size} rank(s), but {environment.launched_by}={started}: the ranks do not see each other. Start "
            "with the launcher of the MPI that mpi4py loads: srun --mpi=pmix for Open MPI, --mpi=cray_shasta or pmi2 "
            "for MPICH (srun --mpi=list shows what there is), or that MPI's own mpirun"
        )


def _check_nodes(world: MPI.Intracomm, nodes: Sequence[int] | None) -> None:
    """Refuse, on every rank, nodes that do not name one for each rank; ``world`` is freed then. Collective."""
    named = np.array([world.size if nodes is None else len(nodes)], dtype=np.int64)
    counts = np.empty(world.size, dtype=np.int64)
    world.Allgather(named, counts)
    wrong = np.flatnonzero(counts != world.size)
    if len(wrong):
        size = world.size
        world.Free()
        error = TopologyError(
            f"on rank(s) {_spans(wrong.tolist())}, nodes names {counts[wrong[0]]} ranks, but the communicator has "
            f"{size}; give one node number for each rank"
        )
        error.agreed = True
        raise error


def _find_nodes(world: MPI.Intracomm, given: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """World ranks of each node, nodes ordered by their first rank."""
    if given is None:
        local = world.Split_type(MPI.COMM_TYPE_SHARED, world.rank)
        leader = np.array([local.bcast(world.rank, root=0)], dtype=np.int64)
        local.Free()
    else:
        leader = np.array([list(given).index(given[world.rank])], dtype=np.int64)
    leaders = np.empty(world.size, dtype=np.int64)
    world.Allgather(leader, leaders)
    members: dict[int, list[int]] = {}
    for rank, first in enumerate(leaders):
        members.setdefault(int(first), []).append(rank)
    return tuple(tuple(members[first]) for first in sorted(members))


def _named(comm: MPI.Comm, name: str) -> MPI.Intracomm:
    assert isinstance(comm, MPI.Intracomm), "split from an intracommunicator"
    comm.Set_name(f"hpczero.{name}")
    return comm


def _spans(ranks: Sequence[int]) -> str:
    """``0-3, 7`` for [0, 1, 2, 3, 7]."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
