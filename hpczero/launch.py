"""From a started process to a rank that knows its place: what every collective command does first.

Owns: fake nodes, and the cores a rank computes on. Must not know: models, data, options of a command.
"""

from __future__ import annotations

import os
import socket
import zlib

import torch

from hpczero import log
from hpczero.config import parse_nodes
from hpczero.environment import Environment
from hpczero.topology import Topology


def start_topology(nodes: str | None) -> Topology:
    """MPI's world, as ``nodes`` (GxL) or HPCZERO_FAKE_NODES if given. Collective over MPI's world.

    Raises:
        ConfigError: the ranks cannot be laid out so.
    """
    topology = Topology.of_world()
    with topology.agreed("lay out the nodes"):
        shape = nodes or Environment.read().fake_nodes
        node_of_rank = None if shape is None else parse_nodes(shape, topology.size)
    if node_of_rank is None:
        return topology
    faked = Topology.create(topology.world, node_of_rank)
    topology.free()
    return faked


def use_own_cores(topology: Topology) -> None:
    """Let torch use this rank's share of the cores it may run on, or fewer if OMP_NUM_THREADS says so. Collective."""
    cores = sorted(os.sched_getaffinity(0))
    # Ranks bound to the same cores of the same host share them; fake nodes are on one host.
    key = float(zlib.crc32(f"{socket.gethostname()} {cores}".encode()))
    sharers = topology.gather(key).count(key)
    threads = max(1, min(torch.get_num_threads(), len(cores) // sharers))
    torch.set_num_threads(threads)
    log.debug("%d thread(s) on %d core(s) shared by %d rank(s)", threads, len(cores), sharers)
