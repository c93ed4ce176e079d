"""The ranks of a job: world, nodes, data-parallel ranks and replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from hpczero import errors
from hpczero.errors import TopologyError
from hpczero.job.group import Forwards, Group, is_job, named
from hpczero.job.log import spans
from hpczero.job.mesh import DATA, DATA_SEQUENCE, DEGREES, MODEL, SHARD, Mesh
from hpczero.job.watchdog import RollCall, Watchdog, stop_all
from hpczero.options.environment import Environment, misspelt

_before: list[Callable[[], None]] = []


def before_finalize(call: Callable[[], None]) -> None:
    """Have ``call`` called once, as MPI ends, while messages still move. Not collective.

    What was asked for last comes first. HDF5 ends in the same way: whoever writes by it asks once it is loaded.
    """
    if call not in _before:
        _before.append(call)
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: call()), True)


logger = logging.getLogger("hpczero.launch")


@dataclass(frozen=True)
class Topology:
    """The groups that a rank is in. Groups with the same ranks are one object, and share their communicators.

    Properties and methods without a group's name are those of ``world``.

    Attributes:
        mesh: the degrees.
        world: all ranks of the job.
        data: ranks that train on different samples.
        shard: ranks that share parameters, gradients and optimizer state; those that share a sample's tokens too.
        replicate: ranks that hold the same shard.
        data_sequence: ranks that hold the same part of the model: ``data`` and ``sequence`` together. Their gradients
            are summed.
        model_parallel: ranks that hold one copy of the model together: ``tensor`` and ``pipeline``.
        tensor: ranks that share each layer's products.
        sequence: ranks that share the tokens of a sample.
        pipeline: ranks that share the layers.
        watchdog: ends the job when a call over these ranks does not return.
    """

    mesh: Mesh
    world: Group
    data: Group
    shard: Group
    replicate: Group
    data_sequence: Group
    model_parallel: Group
    tensor: Group
    sequence: Group
    pipeline: Group
    watchdog: Watchdog

    @classmethod
    def create(
        cls,
        comm: MPI.Intracomm,
        nodes: Sequence[int] | None = None,
        *,
        mesh: Mesh | None = None,
        timeout_s: float | None = None,
    ) -> Topology:
        """Find the nodes and duplicate the communicators. Collective over ``comm``; ``free()`` undoes it.

        From here on an uncaught error on one rank ends the whole job (``errors.install_abort_hook``).

        Args:
            comm: the ranks of the job, all of MPI's or a part. It is duplicated and never carries our traffic.
            nodes: node number of each rank, e.g. ``[0, 0, 1, 1]`` to treat one host as two; None asks MPI.
            mesh: degrees whose product is the size of ``comm``; None shards over all ranks.
            timeout_s: seconds one collective over these ranks may take before the job is ended with exit 86. 0 waits
                for ever; None takes HPCZERO_TIMEOUT or half an hour.

        Raises:
            ConfigError: HPCZERO_TIMEOUT is not a number of seconds, or the product of the degrees is not the size of
                ``comm``.
            TopologyError: ``nodes`` does not name one node for each rank, or ranks were given other meshes; on every
                rank. The ranks that were started do not see each other, where ``comm`` is MPI.COMM_WORLD.
        """
        if comm == MPI.COMM_WORLD:
            check_launch(comm.size, Environment.read())
        mesh = Mesh.of(comm.size) if mesh is None else Mesh.of(comm.size, **vars(mesh))
        if MPI.COMM_WORLD.size > 1:  # also for a group of one, for which the others would wait
            errors.install_abort_hook()
        before_finalize(stop_all)  # they would ask the other ranks over an MPI that has ended
        watchdog = Watchdog(
            comm.rank,
            Environment.read().timeout_s if timeout_s is None else timeout_s,
            ranks=comm.size,
        )
        try:
            with watchdog.watch("Topology.create"):
                return cls._create(comm, nodes, mesh, watchdog)
        except BaseException:
            watchdog.stop()
            raise

    @classmethod
    def _create(
        cls, comm: MPI.Intracomm, nodes: Sequence[int] | None, mesh: Mesh, watchdog: Watchdog
    ) -> Topology:
        whole = named(comm.Dup(), "world")
        _check_given(whole, nodes, mesh)
        node_map = _find_nodes(whole, nodes)
        if whole.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            watchdog.attend(RollCall(named(whole.Dup(), "roll call")))
        world = Group.create(
            whole, node_map, "world", watchdog, forwards=Forwards(), faked=nodes is not None
        )
        groups = {tuple(range(world.size)): world}

        def group(name: str, *degrees: str) -> Group:
            """The group that shares these degrees.

            Whether it is new follows from the degrees alone. All ranks therefore agree.
            """
            ranks = mesh.members(world.rank, *degrees)
            if ranks not in groups:
                groups[ranks] = world.part(ranks, name)
            return groups[ranks]

        return cls.of_groups(mesh, world, watchdog, group)

    @classmethod
    def of_groups(
        cls, mesh: Mesh, world: Group, watchdog: Watchdog, group: Callable[..., Group]
    ) -> Topology:
        """Of what ``group(name, *degrees)`` makes, in the same order on every rank."""
        return cls(
            mesh=mesh,
            world=world,
            data=group("data", *DATA),
            shard=group("shard", *SHARD),
            replicate=group("replicate", "replicate"),
            data_sequence=group("data and sequence", *DATA_SEQUENCE),
            model_parallel=group("model parallel", *MODEL),
            tensor=group("tensor", "tensor"),
            sequence=group("sequence", "sequence"),
            pipeline=group("pipeline", "pipeline"),
            watchdog=watchdog,
        )

    @classmethod
    def of_world(cls, nodes: Sequence[int] | None = None, *, mesh: Mesh | None = None) -> Topology:
        """``create`` on MPI.COMM_WORLD, for callers that do not import MPI. Collective.

        Raises:
            ConfigError: as ``create``.
            TopologyError: the ranks that were started do not see each other; and as ``create``.
        """
        topology = cls.create(MPI.COMM_WORLD, nodes, mesh=mesh)
        for name, meant in misspelt() if topology.is_root else ():
            logger.warning("%s is a variable that nobody reads; is %s meant?", name, meant)
        return topology

    @classmethod
    def alone(cls) -> Topology:
        """This rank as a world of its own, for measurements without communication. Not collective."""
        return cls.create(MPI.COMM_SELF)

    @property
    def groups(self) -> list[Group]:
        """Each group once, smaller ones first, in the same order on every rank."""
        parts = (
            *(self.pipeline, self.sequence, self.tensor, self.replicate),
            *(self.model_parallel, self.shard, self.data, self.data_sequence),
        )
        return [
            *{id(group): group for group in parts if group is not self.world}.values(),
            self.world,
        ]

    def free(self) -> None:
        """Free the communicators and end the watchdog. Collective; the topology must not be used afterwards."""
        with self.watchdog.collective("Topology.free"):
            for group in self.groups:
                group.free()
        self.watchdog.stop()
        self.watchdog.leave()

    # --- of the world

    @property
    def rank(self) -> int:
        """Rank of this process in the job, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return self.world.size

    @property
    def is_root(self) -> bool:
        """Whether this is world rank 0, the one that prints and writes small files."""
        return self.world.is_root

    @property
    def num_nodes(self) -> int:
        """Number of nodes, G."""
        return self.world.num_nodes

    @property
    def node_index(self) -> int:
        """Number of this rank's node, g, from 0."""
        return self.world.node_index

    @property
    def local_rank(self) -> int:
        """Place of this rank within its node, l, from 0."""
        return self.world.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self.world.local_size

    @property
    def is_rectangular(self) -> bool:
        """Whether every node has the same number of ranks."""
        return self.world.is_rectangular

    @property
    def shard_index(self) -> int:
        """Which shard of every unit this rank owns: its place in ``shard.ordered``, which is not its rank."""
        return self.shard.index

    def describe(self) -> str:
        """Node map in a few lines, for a run header; rank 0 alone has the names of hosts. Collective over world."""
        return self.world.describe()

    def agreed(self, what: str) -> AbstractContextManager[None]:
        """Run rank-local work inside; if any rank raises, all ranks raise. Collective over world, at the block's end.

        ``job.group.agreed`` says more.
        """
        return self.world.agreed(what)

    def same(self, mine: str, what: str, unlike: Exception) -> None:
        """Raise ``unlike``, on every rank, if any rank has another text than rank 0. Collective over world."""
        self.world.same(mine, what, unlike)

    def gather(self, value: float) -> list[float]:
        """``value`` of every rank in rank order, on every rank, as fp64. Collective over world."""
        return self.world.gather(value)

    def broadcast_text(self, text: str, root: int = 0) -> str:
        """``text`` of rank ``root`` on every rank. Collective over world."""
        return self.world.broadcast_text(text, root)

    def barrier(self) -> None:
        """Wait for every rank. Collective over world."""
        self.world.barrier()

    def abort(self, code: int) -> None:
        """End the job on every rank with exit status ``code``; never returns. Not collective."""
        errors.abort_job(code)
        raise SystemExit(code)


def started_ranks() -> int:
    """Number of ranks that MPI sees. Not collective."""
    return MPI.COMM_WORLD.size


def check_launch(size: int, environment: Environment) -> None:
    """Refuse ranks that each think they are alone: N equal runs would overwrite one another. Not collective.

    A process that no launcher has started, in a SLURM job of several ranks, is told that it is alone.

    Raises:
        TopologyError: the launcher has started another number of ranks.

    Source: open-mpi/ompi#13523, mpi4py#155: srun with the wrong plugin starts N worlds of one rank, without a word.
    """
    started = environment.launched_ranks
    if started is not None and started != size:
        raise TopologyError(
            f"MPI sees {size} rank(s), but {environment.launched_by}={started}: the ranks do not see each other. Start "
            "with the launcher of the MPI that mpi4py loads: srun --mpi=pmix for Open MPI, --mpi=cray_shasta or pmi2 "
            "for MPICH (srun --mpi=list shows what there is), or that MPI's own mpirun"
        )
    if started is None and size == 1 and (environment.torch_ranks or 1) > 1:
        raise TopologyError(
            f"MPI sees 1 rank, but WORLD_SIZE={environment.torch_ranks}, as torchrun, accelerate launch or deepspeed "
            "set it: each process would train the whole model by itself. Start the program with "
            f"mpirun -n {environment.torch_ranks} python ..., or srun; if one rank is meant: unset WORLD_SIZE RANK"
        )
    if started is None and size == 1 and (environment.allocated_ranks or 1) > 1:
        logger.warning(
            "1 rank, without a launcher, in a SLURM job of %d: srun python ... starts all of them",
            environment.allocated_ranks,
        )


def _check_given(world: MPI.Intracomm, nodes: Sequence[int] | None, mesh: Mesh) -> None:
    """Refuse nodes that do not name one for each rank, and unequal meshes. Frees ``world`` then. Collective."""
    mine = np.array([world.size if nodes is None else len(nodes), *mesh.degrees], dtype=np.int64)
    found = np.empty((world.size, len(mine)), dtype=np.int64)
    world.Allgather(mine, found)
    size, counts, degrees = world.size, found[:, 0], found[:, 1:]
    text = ""
    if wrong := np.flatnonzero(counts != size).tolist():
        text = (
            f"on rank(s) {spans(wrong)}, nodes names {counts[wrong[0]]} ranks, but the communicator has "
            f"{size}; give one node number for each rank"
        )
    elif wrong := np.flatnonzero((degrees != degrees[0]).any(axis=1)).tolist():
        text = (
            f"on rank(s) {spans(wrong)}, the degrees {', '.join(DEGREES)} are {degrees[wrong[0]].tolist()}, on rank 0 "
            f"{degrees[0].tolist()}; give every rank the same mesh"
        )
    if text:
        told = is_job(world)
        world.Free()
        error = TopologyError(text)
        error.agreed = told
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
