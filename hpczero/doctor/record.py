"""What a job ran with, as JSON: ``python -m hpczero.doctor.record [FILE]``.

A job script calls it before the ranks start, so it needs neither MPI nor torch. Of the environment only variables of
launchers, MPI libraries, fabrics and of ours are kept, and none whose name speaks of a secret.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpczero.doctor import environment as software
from hpczero.doctor.launch import affinity
from hpczero.errors import ConfigError, run
from hpczero.files.regular import WHY, Explained, answer

KEPT = re.compile(
    r"(SLURM|SRUN|OMPI|PMIX|PMI|PRTE|MPICH|MV2|I_MPI|FI|UCX|NCCL|RCCL|CUDA|ROCR|HIP|OMP|MKL|KMP|HDF5|HPCZERO|CRAY|PYTORCH)_\w+"
    r"|LOADEDMODULES|LD_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|PYTHONPATH|MACHINE|LAUNCHER"
)
SECRET = re.compile(r"TOKEN|JWT|KEY|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
LIMITS = (
    "RLIMIT_AS",
    "RLIMIT_CORE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_NOFILE",
    "RLIMIT_NPROC",
    "RLIMIT_STACK",
)


def record(environment: Mapping[str, str]) -> dict[str, Any]:
    """Facts about this process, its host and its software; of the first node, where the job script runs."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "cores": sorted(affinity()),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu_devices": software.gpu_devices(),
        "python": sys.executable,
        "folder": os.fspath(Path.cwd()),
        "commit": commit(),
        "versions": software.installed_versions(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "environment": {
            name: value
            for name, value in sorted(environment.items())
            if KEPT.fullmatch(name) and not SECRET.search(name)
        },
    }


def commit() -> str:
    """The git commit of this checkout, with ``-dirty`` where files have changed; empty where there is none."""
    if not (Path(__file__).parents[2] / "install" / "launch.sh").is_file():
        return ""  # installed: git would answer for whatever repository the environment may lie in
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    asked = answer(command, 30, Path(__file__).parent)
    return "" if asked is None else asked.stdout.strip()


def main() -> int:
    """Write the record to the file that is named, else to standard output."""
    words = sys.argv[1:]
    if len(words) > 1 or words[:1] in (["-h"], ["--help"]):
        sys.stdout.write("usage: python -m hpczero.doctor.record [FILE]\n")
        return 0 if len(words) == 1 else 2
    text = json.dumps(record(os.environ), indent=2) + "\n"
    if not words:
        sys.stdout.write(text)
        return 0
    with Explained(
        ConfigError, f"{words[0]}: cannot be written: {WHY}; choose another folder (LOGS=...)"
    ):
        Path(words[0]).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run(main)
