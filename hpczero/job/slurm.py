"""What SLURM says of the job: its forms of times and of tasks per node, and the time that is left.

Owns: the forms of those texts, and the one command that is run. Must not know: MPI, torch, runs, what follows from an
answer.
"""

from __future__ import annotations

import math
import re
import subprocess

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
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", "--job", job, "--format", "%L"],
            capture_output=True,
            text=True,
            timeout=ASK_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # not there, as in many containers; or busy
        return None
    return seconds_of(asked.stdout) if asked.returncode == 0 else None
