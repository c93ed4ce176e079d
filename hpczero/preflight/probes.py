"""What each node is asked to do: count GPUs, write and read files, exchange bytes with every other node.

One rank of each node acts; all ranks must call.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from mpi4py import MPI

from hpczero.doctor.environment import gpu_devices
from hpczero.errors import ConfigError
from hpczero.files.regular import answer
from hpczero.job.topology import Topology
from hpczero.preflight.verdict import NodeReport, blame, rounds, who_reads_again, who_reads_what

MIB = 2**20
TRIES = 3
ASK_LIMIT_S = 60.0


def node_name(environment: Mapping[str, str]) -> str:
    """The name that ``--exclude`` takes: SLURM's, else the host's without its domain."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]


def count_gpus() -> int:
    """Number of GPUs that the driver shows. A device file remains when its GPU has failed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len(gpu_devices())
    asked = answer([tool, "-L"], ASK_LIMIT_S)
    said = asked.stdout if asked is not None else ""  # a driver that hangs has no GPU to offer
    return sum(line.startswith("GPU ") for line in said.splitlines())


def try_files(
    leaders: MPI.Comm, names: list[str], folder: Path, nbytes: int
) -> tuple[float, float, str]:
    """(written MB/s, read MB/s, what went wrong). Each node writes, and reads what the next one wrote.

    Its own file would come from its own memory. A file that one node reads wrongly is read by another one, too, so that
    the reader is not blamed for the writer. Collective over ``leaders``.

    Args:
        leaders: one rank of each node.
        names: names of the nodes.
        folder: on the file system of the run; it exists.
        nbytes: bytes of each node's file.
    """
    me = leaders.rank
    written, problem = _write(folder, me, nbytes)
    unwritten = leaders.allgather(problem)  # before anybody reads
    chosen = {r.reader: r for r in who_reads_what([not text for text in unwritten])}
    read = 0.0
    if me in chosen:
        read, problem = _read(folder, chosen[me].writer, nbytes)
        chosen[me] = replace(chosen[me], error=problem)
    readings = [r for r in leaders.allgather(chosen.get(me)) if r is not None]
    mine = [r for r in who_reads_again(readings) if r.reader == me]
    again = [replace(r, error=_read(folder, r.writer, nbytes)[1]) for r in mine]
    again = [r for part in leaders.allgather(again) for r in part]
    blamed = blame(readings, again, names)
    return written, read, "; ".join(filter(None, (unwritten[me], blamed.get(me))))


def try_pairs(leaders: MPI.Comm, names: list[str], nbytes: int, most: int) -> dict[str, float]:
    """MB/s to each other node, by its name. Collective over ``leaders``."""
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
        topology: topology of the job.
        environment: environment of this process.
        folder: on the file system of the run.
        file_nbytes: bytes of each node's file.
        pair_nbytes: bytes of each message between nodes.
        most_rounds: most rounds in which nodes meet. With fewer than there are nodes some pairs are left out.

    Raises:
        ConfigError: nothing can be written into ``folder``; on every rank.
    """
    with topology.agreed("make a folder for the files"):
        place = str(_fresh_folder(folder)) if topology.is_root else ""
    place = topology.broadcast_text(place)
    leaders = topology.world.comm.Split(
        0 if topology.local_rank == 0 else MPI.UNDEFINED, topology.rank
    )
    report = None
    if topology.local_rank == 0:
        names = leaders.allgather(node_name(environment))
        written, read, error = try_files(leaders, names, Path(place), file_nbytes)
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
    reports = [found for found in topology.world.comm.allgather(report) if found is not None]
    if topology.is_root:
        shutil.rmtree(place, ignore_errors=True)
    return reports


def _fresh_folder(folder: Path) -> Path:
    path = folder / f".hpczero-preflight-{os.getpid()}-{time.time_ns()}"
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--directory: nothing can be written into {folder} ({error.strerror}); give a folder on the file system "
            "of the run that you may write to"
        ) from error
    return path


def _write(folder: Path, node: int, nbytes: int) -> tuple[float, str]:
    """(MB/s, what went wrong)."""
    try:
        start = time.perf_counter()
        with _path(folder, node).open("wb") as file:
            file.write(_content(node, nbytes).tobytes())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return 0.0, f"cannot write: {error}"
    return nbytes / (time.perf_counter() - start) / 1e6, ""


def _read(folder: Path, node: int, nbytes: int) -> tuple[float, str]:
    """(MB/s, what went wrong) with the file of ``node``."""
    try:
        start = time.perf_counter()
        found = _path(folder, node).read_bytes()
        rate = nbytes / (time.perf_counter() - start) / 1e6
    except OSError as error:
        return 0.0, f"cannot be read ({error})"
    return rate, "" if found == _content(node, nbytes).tobytes() else "has other bytes"


def _path(folder: Path, node: int) -> Path:
    return folder / f"node-{node}"


def _content(node: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(node).integers(0, 256, nbytes, dtype=np.uint8)
