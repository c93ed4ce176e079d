"""Interconnect: whether MPI finds the network and the device memory of a node, and what NCCL does beside it.

Owns: the checks of libfabric, of Cray MPICH's transport layer for devices, and of NCCL. Facts come in as values. Must
not know: MPI; one check runs before MPI starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from hpczero.doctor.finding import Finding, failure, warning
from hpczero.files.regular import answer

# Provider of libfabric -> the network, and a library that no process which uses the provider is without.
# Source: libfabric, prov/cxi/configure.m4 and prov/efa/configure.m4.
NETWORKS = {"cxi": ("Slingshot", "libcxi.so"), "efa": ("EFA", "libefa.so")}
GPU_SUPPORT = "MPICH_GPU_SUPPORT_ENABLED"
LDD_S = 30.0
_CRAY = re.compile(r"libmpi_(cray|gnu|nvidia|amd|aocc|intel)(_\d+)*\.so[\d.]*")
_LIBFABRIC = re.compile(r"libfabric(-[0-9a-f]+)?\.so[\d.]*")


def loaded(maps: str = "/proc/self/maps") -> list[str]:
    """Paths of the shared libraries in this process."""
    words = (line.split() for line in Path(maps).read_text(encoding="utf-8").splitlines())
    return sorted({each[-1] for each in words if len(each) > 5 and ".so" in each[-1]})


def linked_by(module: str) -> list[str]:
    """Paths of the shared libraries that ``module`` was linked with; does not import it. Empty: unknown."""
    found = find_spec(module)
    said = answer(["ldd", found.origin], LDD_S) if found and found.origin else None
    return re.findall(r"=> (/\S+)", said.stdout) if said else []


def networks(root: str = "/sys/class") -> list[str]:
    """Names of ``NETWORKS`` that this node has hardware for."""
    drivers = {
        (card / "device" / "driver").resolve().name for card in Path(root).glob("infiniband/*")
    }
    here = {"cxi": any(Path(root).glob("cxi/*")), "efa": "efa" in drivers}
    return [name for name, there in here.items() if there]


def check_transport_layer(linked: Sequence[str], environment: Mapping[str, str]) -> Finding | None:
    """Can Cray MPICH start? Where it is told to take device memory and was linked without its GTL, it ends the job.

    Args:
        linked: paths of the libraries that mpi4py was linked with, and of those that finding it has loaded.
        environment: variables of this process.

    Source: CSCS documentation, Cray MPICH, "GPU_SUPPORT_ENABLED is requested, but GTL library is not linked".
    """
    cray = next((path for path in linked if _CRAY.fullmatch(Path(path).name)), "")
    has_layer = any(Path(path).name.startswith("libmpi_gtl_") for path in linked)
    if environment.get(GPU_SUPPORT) != "1" or not cray or has_layer:
        return None
    return failure(
        "MPI",
        f"{GPU_SUPPORT}=1, and mpi4py is linked with {cray} and with neither libmpi_gtl_cuda nor libmpi_gtl_hsa: "
        "Cray MPICH would end the job at its start",
        "module load craype-accel-nvidia80 (or your device's), then MPICC='cc -shared' pip install "
        f"--no-binary=mpi4py --no-cache-dir --force-reinstall mpi4py; or export {GPU_SUPPORT}=0: messages then go "
        "through the host",
    )


def check_network(
    here: Sequence[str], libraries: Sequence[str], environment: Mapping[str, str], num_nodes: int
) -> Iterator[Finding]:
    """Do messages between nodes take the network that is there?

    Args:
        here: what ``networks`` found.
        libraries: what ``loaded`` found after MPI has started.
        environment: variables of this process.
        num_nodes: of this job; MPI libraries may close the network again where there is one node.

    Source: CSCS documentation, Libfabric (no UCX on Slingshot; the site's libfabric in containers);
    awslabs/awsome-distributed-ai#292 (a plugin that got another libfabric than it was built with).
    """
    fabrics = [path for path in libraries if _LIBFABRIC.fullmatch(Path(path).name)]
    if len(fabrics) > 1:
        yield warning(
            "libfabric",
            f"{len(fabrics)} in one process: {', '.join(fabrics)}; a library may get one that it was not built with",
            "export LD_LIBRARY_PATH=FOLDER:$LD_LIBRARY_PATH with the folder of your site's libfabric, or remove the "
            "package that brought the other one",
        )
    for name in here:
        network, needed = NETWORKS[name]
        chosen = environment.get("FI_PROVIDER", "")
        named = name in re.split("[;,]", chosen.lower().lstrip("^"))
        if chosen and named == chosen.startswith("^"):  # ^ is all but those
            yield warning(
                "network",
                f"this node has {network}, and FI_PROVIDER={chosen} leaves it out",
                f"export FI_PROVIDER={name}, or unset it",
            )
        elif num_nodes > 1 and not any(needed in Path(path).name for path in libraries):
            used = (
                f"{fabrics[0]} came without {needed}" if fabrics else "MPI has loaded no libfabric"
            )
            yield warning(
                "network",
                f"this node has {network}, and {used}: messages between nodes take another way, mostly TCP",
                "use your site's MPI, or bind your site's libfabric into the container (docs/install.md); then "
                f"export FI_PROVIDER={name}, so that a missing {network} is an error",
            )
        else:
            yield Finding(
                "network", f"{network}, {fabrics[0] if fabrics else 'not needed on one node'}"
            )


def check_device_memory(
    aware: bool, libraries: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Does MPI take device memory, and may it? Asked only where this node has devices.

    Args:
        aware: whether the MPI library says that it takes device memory.
        libraries: what ``loaded`` found after MPI has started.
        environment: variables of this process.

    Source: NCCL user guide, "Inter-GPU Communication with CUDA-aware MPI"; CSCS documentation, NCCL and Cray MPICH.
    """
    of_nccl = sorted(name for name in environment if re.match("(NCCL|RCCL)_", name))
    is_cray = any(_CRAY.fullmatch(Path(path).name) for path in libraries)
    if aware and of_nccl and environment.get("HPCZERO_GPU_AWARE") != "0":
        yield warning(
            "NCCL beside MPI",
            f"{of_nccl[0]} is set, and this MPI takes device memory: where a program uses both at once on one device, "
            "each can wait for the other for ever",
            "hpczero uses no NCCL; where your program does: export HPCZERO_GPU_AWARE=0"
            + (f" {GPU_SUPPORT}=0" if is_cray else ""),
        )
    elif is_cray and not of_nccl and environment.get(GPU_SUPPORT) != "1":
        yield warning(
            "device memory",
            f"{GPU_SUPPORT} is not 1: messages of device memory go through the host",
            f"export {GPU_SUPPORT}=1, with libmpi_gtl_cuda or libmpi_gtl_hsa linked into mpi4py (docs/install.md)",
        )
