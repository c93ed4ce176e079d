"""What the kernel says of this machine and its processes: CPU time, memory, who shares it.

PSS counts a page that k processes share as 1/k of a page in each, so the sum over ranks is what the job takes. A
machine is a running kernel: containers and emulated hosts have names of their own, and share it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaling.evidence.record import cpu_model

BUSY_SHARE = 0.05  # of the processors, for other programs: more than that makes times worthless
PERIOD_S = 0.02
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


def process_seconds(pids: Iterable[int]) -> float:
    """CPU time, user and system, of living processes and all their threads since each started."""
    total = 0
    for pid in pids:
        # The second field is the program's name in brackets and may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * _TICK_S


def machine_seconds() -> float:
    """CPU time nobody else could have had since boot, all cores together: busy, or taken by the hypervisor."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(field) for field in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def pss_nbytes() -> int:
    """Proportional set size of this process."""
    return kernel_nbytes("/proc/self/smaps_rollup", "Pss:")  # Linux 4.14 or newer


def available_nbytes() -> int:
    """What new processes of this machine may take without swapping, page cache that can go included."""
    return kernel_nbytes("/proc/meminfo", "MemAvailable:")


def kernel_nbytes(path: str, name: str) -> int:
    """The figure in the line of ``path`` that begins with ``name``, which is in KiB."""
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class PeakPss:
    """Context manager that looks at the PSS from a thread, every 20 ms.

    It slows the process down (the kernel walks all its pages), so nothing is timed meanwhile.

    Attributes:
        nbytes: the largest value seen.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="peak-pss")

    def __enter__(self) -> PeakPss:
        self.nbytes = pss_nbytes()
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.nbytes = max(self.nbytes, pss_nbytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.nbytes = max(self.nbytes, pss_nbytes())


@dataclass(frozen=True)
class Host:
    """Where one rank runs."""

    machine: str  # what tells its kernel from all others
    cores: frozenset[int]  # numbers of those this rank may use
    all_cores: int  # how many the machine has
    cpu: str = ""  # as the kernel calls it

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
    """What one rank saw of its machine while it was timed: CPU time of itself and of all, and how long that was."""

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
