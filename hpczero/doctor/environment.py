"""Environment variables that make a run slow or wrong without a word, and the packages of every rank.

Binding is not among the variables because `launch` measures it.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero.doctor.finding import Finding, failure, warning
from hpczero.doctor.launch import RankFacts
from hpczero.errors import ConfigError
from hpczero.options.environment import ALLOCATOR_VARIABLES, Environment
from hpczero.options.values import digits


@dataclass(frozen=True)
class Trap:
    """A variable whose value, when ``pattern`` matches all of it (case ignored), has a bad ``effect``."""

    name: str
    pattern: str
    effect: str
    remedy: str


_UNSET = "unset it"
TRAPS = (
    Trap(
        "OMPI_MCA_btl_vader_single_copy_mechanism",
        "none",
        "ranks of one node copy every message twice",
        f"{_UNSET}; in a container allow process_vm_readv (--cap-add=SYS_PTRACE) instead",
    ),
    Trap(
        "OMPI_MCA_btl",
        r"(?!.*(\^|vader|sm\b)).*tcp.*",
        "ranks of one node talk over TCP",
        "add vader (Open MPI 4) or sm (Open MPI 5), or unset it",
    ),
    Trap(
        "OMPI_MCA_btl",
        r"\^.*\b(vader|sm)\b.*",
        "ranks of one node do not use shared memory",
        _UNSET,
    ),
    Trap(
        "UCX_TLS",
        r"(tcp|self|,)+",
        "messages use TCP only",
        f"{_UNSET}, so that UCX picks the fabric",
    ),
    Trap(
        "FI_PROVIDER",
        "(tcp|sockets)",
        "messages use TCP only",
        f"{_UNSET}, or name the fabric's provider",
    ),
    Trap("I_MPI_FABRICS", "(shm:)?tcp", "messages use TCP only", "set it to shm:ofi"),
    Trap(
        "MV2_ENABLE_AFFINITY",
        "1",
        "all OpenMP threads of a rank share one core",
        "export MV2_ENABLE_AFFINITY=0 when OMP_NUM_THREADS is above 1",
    ),
    Trap(
        "GOMP_CPU_AFFINITY",
        ".+",
        "threads of all ranks pile up on the cores it lists",
        f"{_UNSET} and let the launcher bind",
    ),
    Trap(
        "KMP_AFFINITY",
        ".*(explicit|proclist).*",
        "threads of all ranks pile up on the cores it lists",
        f"{_UNSET} and let the launcher bind",
    ),
    Trap("CUDA_LAUNCH_BLOCKING", "1", "every kernel launch waits for the device", _UNSET),
    *(
        Trap(
            name,
            ".*expandable_segments:true.*",
            "device memory cannot be shared between the ranks of a node",
            "remove expandable_segments:True from it",
        )
        for name in ALLOCATOR_VARIABLES
    ),
    Trap(
        "HPCZERO_STRICT",
        "1",
        "every collective is checked by another one first",
        f"{_UNSET} when not debugging",
    ),
)


def check_environment(environment: Mapping[str, str]) -> list[Finding]:
    """One finding for each trap that is set and for a value of ours that cannot be used, or a single good one."""
    try:
        Environment.read(environment)
        found = []
    except ConfigError as error:
        found = [failure("environment", str(error), "correct the variable or unset it")]
    found += [
        warning("environment", f"{t.name}={environment[t.name]}: {t.effect}", t.remedy)
        for t in TRAPS
        if re.fullmatch(t.pattern, environment.get(t.name, ""), re.IGNORECASE)
    ]
    return found or [Finding("environment", "no variable that is known to slow a run down")]


REQUIRED = (
    "mpi4py",
    "numpy",
    "torch",
    "h5py",
    "tyro",
    "rich",
    "safetensors",
    "tokenizers",
    "tensorboard",
    "matplotlib",
)
OPTIONAL = ("hpczero", "cupy", "cupy-cuda12x", "cupy-cuda13x")
# The oldest that the tests have run with, as in setup.cfg: docs/install.md says what was seen.
# mpi4py#609: a DLPack double free with newer array libraries before 4.0.3.
OLDEST = {"mpi4py": "4.0.3", "numpy": "2.0", "torch": "2.8", "h5py": "3.15"}


def installed_versions() -> dict[str, str]:
    """Version by package name, Python included; packages that are not installed are left out. Imports none of them."""
    versions = {"python": sys.version.split()[0]}
    for name in (*REQUIRED, *OPTIONAL):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def check_versions(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Is everything there, and the same on every rank? Another node may see another environment."""
    first = ranks[0]
    value = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    for facts in ranks:
        missing = [name for name in REQUIRED if name not in facts.versions]
        if missing:
            text = f"{', '.join(missing)} not installed on rank {facts.rank} ({facts.host})"
            return [failure("packages", text, f"pip install {' '.join(missing)}")]
    findings = [Finding("packages", value)]
    for facts in ranks:
        names = {*facts.versions, *first.versions}
        differing = sorted(n for n in names if facts.versions.get(n) != first.versions.get(n))
        if differing:
            name = differing[0]
            text = (
                f"{name} is {facts.versions.get(name, 'missing')} on rank {facts.rank} ({facts.host}), "
                f"{first.versions.get(name, 'missing')} on rank {first.rank} ({first.host})"
            )
            remedy = "start every rank from one environment: activate it in the job script, on a path all nodes share"
            findings.append(failure("packages", text, remedy))
            break
    for name, oldest in OLDEST.items():
        if _numbers(first.versions[name]) < _numbers(oldest):
            text = f"{name} {first.versions[name]} is older than {oldest}, the oldest that hpczero was tried with"
            findings.append(warning("packages", text, f"pip install --upgrade {name}"))
    return findings


def import_torch() -> tuple[str, int, str]:
    """(version, threads it would use, error text). Not collective; takes seconds on a cold file system."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch that does not load
        return "", 0, str(error)
    return str(torch.__version__), torch.get_num_threads(), ""


def check_torch(version: str, threads: int, error: str) -> Finding:
    """Does torch start?"""
    if error:
        return failure(
            "torch",
            f"cannot be imported: {error}",
            "pip install torch (the CPU build where there is no GPU), into the environment of every rank",
        )
    return Finding("torch", f"{version}, {threads} thread{'' if threads == 1 else 's'} on rank 0")


def gpu_devices(root: str = "/dev") -> list[str]:
    """Device files of GPUs on this node; finds them without loading any driver library."""
    nvidia = sorted(Path(root).glob("nvidia[0-9]*"))
    amd = sorted(Path(root).glob("dri/renderD*")) if (Path(root) / "kfd").exists() else []
    return [str(path) for path in (*nvidia, *amd)]


def check_gpu(devices: Sequence[str], versions: Mapping[str, str], of_mpi: str = "") -> Finding:
    """GPUs, CuPy to use them with, and what the MPI library says ``of_mpi`` and their memory."""
    cupy = next((f"{n} {v}" for n, v in versions.items() if n.startswith("cupy")), "")
    if not devices:
        return Finding(
            "GPU", f"none on this node: CPU run{f' ({cupy} not needed)' if cupy else ''}"
        )
    value = f"{len(devices)} on this node, {cupy or 'CuPy is not installed'}"
    value += f"; {of_mpi}" if of_mpi else ""
    if not cupy:
        remedy = "for GPU transports: pip install 'cupy-cuda12x[ctk]>=14', or cuda13x, as nvidia-smi says"
        return warning("GPU", value, remedy)
    return Finding("GPU", value)


def _numbers(version: str) -> tuple[int, ...]:
    """``4.1.2`` as (4, 1, 2); stops at the first part that is no number."""
    parts: list[int] = []
    for part in version.split("."):
        value = digits(part)
        if value is None:
            break
        parts.append(value)
    return tuple(parts)
