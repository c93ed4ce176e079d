"""What is said about the MPI library: its name, thread level, trial operations and speed.

Owns: the findings. Must not know: MPI itself (``probes`` asks it), torch, files, how the job was launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpczero.doctor.finding import Finding, Status

SLOW_BYTES_PER_S = 1e9


@dataclass(frozen=True)
class PairSpeed:
    """Ping-pong between rank 0 and ``peer``: half of a round trip, and bytes over half of a large round trip."""

    peer: int
    nbytes: int
    latency_s: float
    bytes_per_s: float


def check_library(vendor: str, version: str, standard: str, path: str) -> Finding:
    """Which MPI is this? More than one path means that two MPI libraries are loaded."""
    return Finding("MPI", f"{vendor} {version}, MPI {standard}, {path or 'linked statically'}")


def check_thread_level(name: str) -> Finding:
    """May a second thread communicate? Device transports drive MPI from one."""
    if name != "multiple":
        return Finding(
            "thread level",
            f"{name}, wanted: multiple",
            Status.WARN,
            "use an MPI built with thread support, and leave mpi4py.rc.thread_level alone; "
            "until then only transports without a communication thread are safe",
        )
    return Finding("thread level", name)


def check_trials(title: str, errors: Mapping[str, str]) -> Finding:
    """Verdict over trial operations, by dtype."""
    wrong = {dtype: text for dtype, text in errors.items() if text}
    if wrong:
        return Finding(
            title,
            "; ".join(f"{dtype}: {text}" for dtype, text in wrong.items()),
            Status.FAIL,
            "this MPI library or its network module is broken for plain host memory: load another MPI module and "
            "rebuild mpi4py with it (pip install --no-binary=mpi4py --force-reinstall mpi4py)",
        )
    return Finding(title, f"{', '.join(errors)} proved by a trial")


def check_between_nodes(chosen: str, measured: Sequence[str]) -> list[Finding]:
    """Which algorithms will move data between nodes, and what that rests on."""
    lines = [chosen, *measured]
    return [Finding("between nodes", line) for line in lines]


def check_pair(speed: PairSpeed | None, same_node: bool) -> Finding:
    """Is the path between two ranks the fast one?"""
    if speed is None:
        return Finding("bandwidth", "not measured: one rank")
    where = "same node" if same_node else "other node"
    value = (
        f"{speed.bytes_per_s / 1e9:.2f} GB/s at {speed.nbytes >> 20} MiB, latency {speed.latency_s * 1e6:.1f} us "
        f"(ranks 0 and {speed.peer}, {where})"
    )
    if speed.bytes_per_s < SLOW_BYTES_PER_S:
        remedy = (
            "shared memory inside the node is not used, or the ranks share a core: see binding and cores above"
            if same_node
            else "messages probably use TCP: check that the MPI was built for this fabric "
            "(ompi_info | grep -i ucx, fi_info) and that no variable forces tcp"
        )
        return Finding("bandwidth", value, Status.WARN, remedy)
    return Finding("bandwidth", value)
