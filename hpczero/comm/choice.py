"""The choice of a transport for a group of ranks."""

from __future__ import annotations

import logging
from functools import partial
from typing import get_args

import torch
from mpi4py import MPI

from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.comm.awareness import reach_of
from hpczero.comm.background import can_run_in_background
from hpczero.comm.collectives import Collectives, Flat, shard_group
from hpczero.comm.devices import Reach
from hpczero.comm.hierarchical import Hierarchical
from hpczero.comm.hybrid import Hybrid
from hpczero.comm.inside import PeerBlocks, Segment
from hpczero.comm.rails import DEFAULT, Selection
from hpczero.comm.tuning import tune
from hpczero.comm.uneven import Uneven
from hpczero.errors import CommError, ConfigError
from hpczero.job.group import Group, told_all
from hpczero.job.topology import Topology
from hpczero.memory.buffers import Memory
from hpczero.options.values import Transport, check_algorithms
from hpczero.plan.footprint import fastest_transport

logger = logging.getLogger("hpczero.comm")


def choose(
    topology: Topology | Group,
    transport: str = "auto",
    *,
    strict: bool = False,
    node_dtype: torch.dtype = torch.float32,
    algorithms: str = "auto",
    overlap: bool = True,
    secondary: bool = False,
    accelerator: Accelerator | None = None,
) -> Collectives:
    """Make a transport. Collective over its ranks.

    Args:
        topology: a topology, whose shard group and replicas the transport serves, or any group.
        transport: ``flat`` works on any nodes. ``hierarchical`` sends messages between nodes and inside them.
            ``window`` shares memory inside nodes. ``ipc`` lets ranks of a node read each other's device memory.
            ``auto`` takes the fastest that works.
        strict: as in Collectives.
        node_dtype: as in Collectives.
        algorithms: between nodes. ``auto`` measures or takes what was measured before, ``measure`` measures anew,
            ``default`` does neither. Names work too, as in ``all_gather=ring,reduce_scatter=pairwise``.
        overlap: whether to move bytes while the model computes, between nodes and on devices. Needs an MPI that lets
            two threads call it.
        secondary: between nodes, whether each keeps a copy of what it has gathered (SecondaryCopy).
        accelerator: where the buffers are; None for the host.

    Raises:
        ConfigError: an unknown name, or an algorithm that does not work between so many nodes.
            A secondary copy between nodes over the flat transport.
        TopologyError: ``ipc`` or a secondary copy on nodes with different numbers of ranks.
        CommError: ``window`` where ranks of a node cannot share memory.
    """
    check_transport_name(transport)
    check_algorithms(algorithms)
    make = partial(
        _choose_one,
        transport=transport,
        node_dtype=node_dtype,
        algorithms=algorithms,
        accelerator=accelerator,
    )
    if isinstance(topology, Group) or topology.replicate.size == 1:
        return make(topology, strict=strict, overlap=overlap, secondary=secondary)
    # A communicator of its own: a thread may use it, and another model has the topology too.
    replicas = topology.replicate.part(range(topology.replicate.size), "replicas of one transport")
    inside = make(topology.shard, strict=False, overlap=overlap, secondary=secondary)
    # One ledger: its buffers are this model's too.
    outside = make(replicas, strict=False, overlap=False, secondary=False, memory=inside.memory)
    return Hybrid(
        topology,
        inside,
        outside,
        strict=strict,
        overlap=overlap and _can_overlap(replicas, inside.reach.accelerator),
    )


def _choose_one(
    topology: Topology | Group,
    *,
    transport: str,
    strict: bool,
    node_dtype: torch.dtype,
    algorithms: str,
    overlap: bool,
    secondary: bool,
    accelerator: Accelerator | None,
    memory: Memory | None = None,
) -> Collectives:
    """As ``choose``, over one group of ranks."""
    group = shard_group(topology)
    reach = reach_of(accelerator or HostAccelerator(), group)
    if transport == "auto":
        transport = _automatic(group, reach.accelerator)
    if transport == "window" and not reach.accelerator.is_host:
        raise ConfigError(
            "transport: window shares memory of the host, and the model is on a device; use ipc, or leave it to auto"
        ).on_all_ranks()  # the same names and devices everywhere
    if not reach.accelerator.is_host and MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        # Autograd runs the backward of a device on a thread of its own, and gradients are reduced in there.
        raise ConfigError(
            "this MPI may only be called by the thread that started it (thread level below MPI_THREAD_SERIALIZED), but "
            "torch runs the backward of a device on another one; let MPI start with threads (MPI4PY_RC_THREADS=1, "
            "MPICH_MAX_THREAD_SAFETY=multiple), or use --parallel.device cpu"
        ).on_all_ranks()
    if transport == "flat":
        if secondary and group.num_nodes > 1:
            error = ConfigError(
                "a secondary copy of parameters in each node needs ranks that know their node, and the transport is "
                "flat; use hierarchical or window, with the same number of ranks on every node, or leave it out"
            )
            raise told_all(error, group.comm)
        return Flat(topology, strict=strict, node_dtype=node_dtype, reach=reach, memory=memory)
    kind = Hierarchical if group.is_rectangular else Uneven
    return kind(
        topology,
        strict=strict,
        node_dtype=node_dtype,
        selection=_selection(group, algorithms, node_dtype, reach),
        inside="window" if transport == "window" else "ipc" if transport == "ipc" else "messages",
        overlap=overlap and _can_overlap(group, reach.accelerator),
        secondary=secondary,
        reach=reach,
        memory=memory,
    )


def _can_overlap(group: Group, accelerator: Accelerator) -> bool:
    wanted = group.num_nodes > 1 or not accelerator.is_host
    if not wanted or can_run_in_background():
        return wanted
    if group.is_root:
        logger.warning(
            "this MPI does not let two threads call it (thread level below MPI_THREAD_MULTIPLE), so nothing moves "
            "while the model computes; build or configure MPI with thread support"
        )
    return False


def check_transport_name(transport: str) -> None:
    """Raise ConfigError on a name that ``choose`` does not know. Not collective."""
    known = get_args(Transport)
    if transport not in known:
        raise ConfigError(f"transport: got {transport!r}, expected one of {', '.join(known)}")


def _selection(group: Group, algorithms: str, node_dtype: torch.dtype, reach: Reach) -> Selection:
    if algorithms not in ("auto", "measure", "default"):
        return Selection.parse(algorithms)
    # Between faked nodes there is no network; what is measured there would be the weather.
    nothing_to_learn = group.faked and algorithms == "auto"
    if algorithms == "default" or nothing_to_learn or group.num_nodes == 1 or group.rail is None:
        return DEFAULT
    return tune(group, node_dtype, fresh=algorithms == "measure", reach=reach)


def _automatic(group: Group, accelerator: Accelerator) -> str:
    if not (group.is_rectangular or accelerator.is_host) and group.is_root:
        logger.warning(
            "nodes have different numbers of ranks: those of a node exchange messages, and do not read each other's "
            "device memory; start the same number of ranks on every node"
        )
    best = partial(
        fastest_transport,
        group.local_size,
        group.num_nodes,
        on_host=accelerator.is_host,
        rectangular=group.is_rectangular,
    )
    chosen, problem = best(), ""
    if chosen == "ipc":
        problem = _export_problem(group, accelerator)
        said = "ranks of a node do not see each other's device memory: %s"
    elif chosen == "window":
        problem = _sharing_problem(group)
        said = "ranks of a node share no memory: %s"
    if not problem:
        return chosen
    if group.is_root:
        logger.warning(said, problem)
    return best(shares=False)


def _export_problem(group: Group, accelerator: Accelerator) -> str:
    """Why ranks of some node cannot read each other's device memory; empty if they can. Collective over world."""
    node, blocks = group.node, None
    try:
        blocks = PeerBlocks(group, node, accelerator, 1, "device memory")
        # Mapped is not enough: what is written now must be seen through the mapping.
        blocks.parts[node.rank].fill_((node.rank + 1) % 256)
        accelerator.finish()
        node.Barrier()
        with group.agreed("read device memory of peers"):
            for rank, part in enumerate(blocks.parts):
                if int(part[0].item()) != (rank + 1) % 256:
                    raise CommError(
                        f"local rank {rank} wrote into its memory, and its peers do not see it"
                    )
    except CommError as error:
        return str(error)
    finally:
        if blocks is not None:
            blocks.close()
    return ""


def _sharing_problem(group: Group) -> str:
    """Why ranks of some node cannot share memory; empty if they can. Collective over world."""
    try:
        with group.agreed("share memory"):
            Segment.create(group.node, 1, "a trial")
    except CommError as error:
        return str(error)
    return ""
