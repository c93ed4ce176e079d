"""What each node is asked to do: count GPUs, write and read files, exchange bytes with every other node.

Owns: the trials. Must not know: what is said of the results. One rank of each node acts; all ranks must call.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpczero.doctor.software import gpu_devices
from hpczero.preflight.verdict import NodeReport, rounds
from hpczero.topology import Topology

MIB = 2**20
TRIES = 3
ASK_LIMIT_S = 60.0


def node_name(environment: Mapping[str, str]) -> str:
    """The name that ``--exclude`` takes: SLURM's, else that of the host without its domain."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def count_gpus() -> int:
    """GPUs that the driver shows: a device file stays when its GPU has fallen off the bus."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len(gpu_devices())
    try:
        asked = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=ASK_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs has no GPU to offer
        return 0
    return sum(line.startswith("GPU ") for line in asked.stdout.splitlines())


def try_files(leaders: MPI.Comm, folder: Path, nbytes: int) -> tuple[float, float, str]:
    """(written MB/s, read MB/s, what went wrong): each node writes, and reads what the next one wrote.

    The next one's, because its own would come from this node's memory. Collective over ``leaders``.
    """
    folder = leaders.bcast(_fresh_folder(folder) if leaders.rank == 0 else None)
    written = read = 0.0
    error = ""
    try:
        start = time.perf_counter()
        with _path(folder, leaders.rank).open("wb") as file:
            file.write(_content(leaders.rank, nbytes).tobytes())
            file.flush()
            os.fsync(file.fileno())
        written = nbytes / (time.perf_counter() - start) / 1e6
    except OSError as problem:
        error = str(problem)
    leaders.Barrier()
    other = (leaders.rank + 1) % leaders.size
    try:
        start = time.perf_counter()
        found = _path(folder, other).read_bytes()
        read = nbytes / (time.perf_counter() - start) / 1e6
        if found != _content(other, nbytes).tobytes() and not error:
            error = f"what node {other} wrote is read with other bytes"
    except OSError as problem:
        error = error or str(problem)
    leaders.Barrier()
    if leaders.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return written, read, error


def try_pairs(leaders: MPI.Comm, names: list[str], nbytes: int, most: int) -> dict[str, float]:
    """MB/s to each other node by its name. Collective over ``leaders``."""
    sent, received = np.ones(nbytes, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8)
    found = {}
    for pairs in rounds(leaders.size, most):
        partner = next((a + b - leaders.rank for a, b in pairs if leaders.rank in (a, b)), None)
        leaders.Barrier()
        if partner is None:
            continue
        seconds = []
        for _ in range(1 + TRIES):  # the first one connects
            start = time.perf_counter()
            leaders.Sendrecv(sent, partner, recvbuf=received, source=partner)
            seconds.append(time.perf_counter() - start)
        found[names[partner]] = nbytes / min(seconds[1:]) / 1e6
    return found


def examine(
    topology: Topology,
    environment: Mapping[str, str],
    *,
    folder: Path,
    file_nbytes: int,
    pair_nbytes: int,
    most_rounds: int,
) -> list[NodeReport]:
    """Reports of all nodes, on every rank. Collective over the topology's world.

    Args:
        topology: of the job.
        environment: of this process.
        folder: on the file system of the run.
        file_nbytes: of each node's file.
        pair_nbytes: of each message between nodes.
        most_rounds: in which nodes meet; fewer than the nodes leave pairs out.
    """
    leaders = topology.world.Split(0 if topology.local_rank == 0 else MPI.UNDEFINED, topology.rank)
    report = None
    if topology.local_rank == 0:
        names = leaders.allgather(node_name(environment))
        written, read, error = try_files(leaders, folder, file_nbytes)
        report = NodeReport(
            name=names[leaders.rank],
            ranks=topology.local_size,
            gpus=count_gpus(),
            write_mbyte_s=written or None,
            read_mbyte_s=read or None,
            file_error=error,
            pairs=try_pairs(leaders, names, pair_nbytes, most_rounds),
        )
        leaders.Free()
    return [found for found in topology.world.allgather(report) if found is not None]


def _fresh_folder(folder: Path) -> Path:
    path = folder / f".hpczero-preflight-{os.getpid()}-{time.time_ns()}"
    path.mkdir(parents=True)
    return path


def _path(folder: Path, node: int) -> Path:
    return folder / f"node-{node}"


def _content(node: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(node).integers(0, 256, nbytes, dtype=np.uint8)
