"""Installed software and devices.

Owns: package versions, torch, CuPy and GPU presence. Must not know: MPI, files. Nothing here loads a CUDA library.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpczero.doctor.finding import Finding, Status
from hpczero.doctor.launch import RankFacts
from hpczero.options.values import digits

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
            return [Finding("packages", text, Status.FAIL, f"pip install {' '.join(missing)}")]
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
            findings.append(Finding("packages", text, Status.FAIL, remedy))
            break
    for name, oldest in OLDEST.items():
        if _numbers(first.versions[name]) < _numbers(oldest):
            text = f"{name} {first.versions[name]} is older than {oldest}, the oldest that hpczero was tried with"
            findings.append(Finding("packages", text, Status.WARN, f"pip install --upgrade {name}"))
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
        return Finding(
            "torch",
            f"cannot be imported: {error}",
            Status.FAIL,
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
        return Finding("GPU", value, Status.WARN, remedy)
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
