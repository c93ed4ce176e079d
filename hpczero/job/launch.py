"""How the ranks of a job were started, and what SLURM says of it."""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from hpczero.accelerator import Accelerator
from hpczero.errors import TopologyError
from hpczero.files.regular import answer
from hpczero.job import log
from hpczero.job.mesh import Mesh
from hpczero.job.topology import Topology
from hpczero.options.environment import Environment
from hpczero.options.values import parse_nodes

ASK_LIMIT_S = 15.0


def seconds_of(text: str) -> float | None:
    """Seconds of squeue's ``[days-][[hours:]minutes:]seconds``; infinite for UNLIMITED, None for anything else."""
    if text.strip() == "UNLIMITED":
        return math.inf
    match = re.fullmatch(
        r"(?:([0-9]{1,9})-)?(?:(?:([0-9]{1,9}):)?([0-9]{1,9}):)?([0-9]{1,9})", text.strip()
    )
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def tasks_per_node(text: str) -> tuple[int, ...] | None:
    """Tasks of each node, from SLURM's form ``16(x25)`` or ``2(x3),1``; None for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def ask_time_left(job: str) -> float | None:
    """Seconds until the time limit of ``job`` by squeue; infinite if it has none, None if SLURM does not answer."""
    # squeue is not there in many containers, or is busy.
    asked = answer(["squeue", "--noheader", "--job", job, "--format", "%L"], ASK_LIMIT_S)
    return seconds_of(asked.stdout) if asked is not None and asked.returncode == 0 else None


# Node number of each rank -> the degrees of the job.
MeshOf = Callable[[Sequence[int]], Mesh]
logger = logging.getLogger("hpczero.launch")


def start_topology(nodes: str | None, mesh_of: MeshOf | None = None) -> Topology:
    """Topology of MPI's world, with nodes by ``nodes`` (GxL) or HPCZERO_FAKE_NODES if given. Collective over it.

    ``mesh_of`` gives the mesh for a node number of each rank; None shards over all ranks.

    Raises:
        ConfigError: the ranks cannot be laid out so.
        TopologyError: ranks do not see each other, or lie on other nodes than SLURM was asked for.
    """
    topology = Topology.of_world()
    with topology.agreed("lay out the nodes"):
        environment = Environment.read()
        shape = nodes or environment.fake_nodes
        node_of_rank = None if shape is None else parse_nodes(shape, topology.size)
        if shape is None and topology.is_root:
            check_placement([len(ranks) for ranks in topology.world.nodes], environment)
        mesh = None
        if mesh_of is not None:
            places = enumerate(topology.world.nodes) if node_of_rank is None else ()
            found = {rank: node for node, ranks in places for rank in ranks}
            mesh = mesh_of(node_of_rank or [found[rank] for rank in range(topology.size)])
    if node_of_rank is None and (mesh is None or mesh == topology.mesh):
        return topology
    laid_out = Topology.create(topology.world.comm, node_of_rank, mesh=mesh)
    topology.free()
    return laid_out


def check_placement(counts: Sequence[int], environment: Environment) -> None:
    """Hold the ranks of each node against what SLURM says. Only rank 0 can: mpirun's daemons change it on other nodes.

    srun places ranks itself, so its numbers must be met. Under mpirun a node may hold fewer ranks, but not more: these
    would share its devices and memory.

    Raises:
        TopologyError: the ranks lie otherwise.
    """
    asked = tasks_per_node(environment.tasks_per_node)
    if asked is None:
        return
    by_srun = environment.launched_by == "SLURM_STEP_NUM_TASKS"
    right = sorted(counts) == sorted(asked) if by_srun else max(counts) <= max(asked)
    if not right:
        raise TopologyError(
            f"ranks per node are {', '.join(map(str, counts[:8]))}{' ...' if counts[8:] else ''} as MPI sees them, but "
            f"SLURM says {environment.tasks_per_node}. Ask for --nodes and --ntasks-per-node and nothing else that "
            "places ranks (with mpirun: --map-by ppr:N:node); if nodes that share no memory are meant to be one, or "
            "one to be several, say so with --parallel.nodes GxL"
        )


def warn_of_shared_devices(topology: Topology, accelerator: Accelerator) -> None:
    """Warn if ranks share a device. Collective over world.

    That is right for a test; by mistake it halves the speed.
    """
    key = float(zlib.crc32(f"{socket.gethostname()} {accelerator.identity}".encode()))
    most = max(Counter(topology.gather(key)).values())
    if accelerator.identity and most > 1 and topology.is_root:
        logger.warning(
            "up to %d ranks share a device; for one each ask for as many GPUs as ranks on every node "
            "(--ntasks-per-node and --gpus-per-node)",
            most,
        )


def use_own_cores(topology: Topology, threads: int | None = None) -> None:
    """Let torch use this rank's share of the cores it may run on, or OMP_NUM_THREADS if that is fewer. Collective.

    ``threads``: as many instead. The number of threads shows in the last bits of some gradients.
    """
    if threads is not None:
        torch.set_num_threads(threads)
        return
    cores = sorted(os.sched_getaffinity(0))
    # Ranks bound to the same cores of the same host share them; fake nodes are on one host.
    key = float(zlib.crc32(f"{socket.gethostname()} {cores}".encode()))
    sharers = topology.gather(key).count(key)
    threads = max(1, min(torch.get_num_threads(), len(cores) // sharers))
    torch.set_num_threads(threads)
    log.debug("%d thread(s) on %d core(s) shared by %d rank(s)", threads, len(cores), sharers)
