"""What shares a machine with the ranks: each other, and other programs.

Owns: which ranks are on one machine, whether they outnumber its cores, how much of it others took. Must not know: what
is measured. A machine is a running kernel: containers and emulated hosts have names of their own, and share it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scaling.evidence.record import cpu_model

BUSY_SHARE = 0.05  # of the processors, for other programs: more than that makes times worthless


@dataclass(frozen=True)
class Host:
    """Where one rank runs.

    Attributes:
        machine: what tells its kernel from all others.
        cores: numbers of those this rank may use.
        all_cores: how many the machine has.
        cpu: as the kernel calls it.
    """

    machine: str
    cores: frozenset[int]
    all_cores: int
    cpu: str = ""

    @classmethod
    def here(cls) -> Host:
        """Of this process."""
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            machine = socket.gethostname()
        cores = frozenset(os.sched_getaffinity(0))
        return cls(machine, cores, os.cpu_count() or len(cores), cpu_model())


@dataclass(frozen=True)
class Share:
    """What one rank saw of its machine while it was timed.

    Attributes:
        host: where.
        own_s: CPU time of this rank.
        machine_s: CPU time of the whole machine.
        window_s: how long that was.
    """

    host: Host
    own_s: float
    machine_s: float
    window_s: float


def oversubscribed(hosts: Sequence[Host]) -> bool:
    """Whether some machine runs more ranks than there are cores that one of them or another may use."""
    for machine in dict.fromkeys(host.machine for host in hosts):
        here = [host for host in hosts if host.machine == machine]
        if len(here) > len(frozenset[int]().union(*(host.cores for host in here))):
            return True
    return False


def foreign_share(shares: Sequence[Share]) -> float:
    """Share of a machine's CPU time that other programs took; the worst machine counts."""
    found = []
    for machine in dict.fromkeys(share.host.machine for share in shares):
        here = [share for share in shares if share.host.machine == machine]
        own_s = sum(share.own_s for share in here)
        machine_s = max(share.machine_s for share in here)
        window_s = max(share.window_s for share in here)
        found.append(max(machine_s - own_s, 0.0) / (window_s * here[0].host.all_cores))
    return max(found)


def numbers(hosts: Sequence[Host]) -> list[int]:
    """The machine of each rank, counted from 0: names tell nothing to a reader."""
    seen = list(dict.fromkeys(host.machine for host in hosts))
    return [seen.index(host.machine) for host in hosts]


def cpus(hosts: Sequence[Host]) -> str:
    """The processors of all machines, each kind once."""
    return " and ".join(sorted({host.cpu for host in hosts}))
