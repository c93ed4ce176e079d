"""CPU time that processes took, to see who else worked during a measurement.

Owns: the kernel's counters. Must not know: what is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

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
