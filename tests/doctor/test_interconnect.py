"""What the doctor finds of networks, of Cray MPICH's layer for devices and of NCCL, from made-up machines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hpczero.doctor import interconnect
from hpczero.doctor.finding import Finding, Status
from tests.helpers.mpirun import ROOT, run_command

ON = {"MPICH_GPU_SUPPORT_ENABLED": "1"}
CRAY = "/cray/libmpi_gnu_123.so.12"
LAYER = "/cray/libmpi_gtl_cuda.so.0"
SITE = "/site/libfabric.so.1"
OTHER = "/mine/libfabric-3f2a1b.so.1.24.0"
CXI = "/usr/lib64/libcxi.so.1"
OPEN_MPI = "/usr/lib/libmpi.so.40"


def problem(found: list[Finding], value: str, remedy: str) -> None:
    (finding,) = [each for each in found if each.status is not Status.OK]
    assert value in finding.value, finding
    assert remedy in finding.remedy, finding


def test_cray_mpich_that_is_told_of_devices_and_linked_without_their_layer_blocks() -> None:
    finding = interconnect.check_transport_layer([CRAY, SITE], ON)
    assert finding is not None
    assert finding.status is Status.FAIL
    problem([finding], CRAY, "MPICH_GPU_SUPPORT_ENABLED=0")
    assert "module load craype-accel" in finding.remedy


@pytest.mark.parametrize(
    ("linked", "variables"),
    [([CRAY, LAYER], ON), ([CRAY], {}), ([OPEN_MPI], ON), (["/site/libmpich.so.12"], ON), ([], ON)],
)
def test_layer_that_is_there_or_is_not_asked_for_is_no_problem(
    linked: list[str], variables: dict[str, str]
) -> None:
    assert interconnect.check_transport_layer(linked, variables) is None


def test_doctor_says_what_is_missing_before_mpi_would_end_the_job(tmp_path: Path) -> None:
    """With an ``ldd`` that tells of a Cray: the MPI of this machine would start."""
    ldd = tmp_path / "ldd"
    ldd.write_text(f"#!/bin/sh\necho '\tlibmpi_gnu_123.so.12 => {CRAY} (0x00007f)'\n")
    ldd.chmod(0o755)
    env = {**ON, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = run_command([sys.executable, "-m", "hpczero.doctor"], 60, env, ROOT).ended(78)
    assert said.stdout.startswith("fail  MPI"), said
    assert said.stdout.rstrip().endswith("1 checks"), said


@pytest.mark.parametrize(
    ("here", "libraries", "variables", "num_nodes", "value", "remedy"),
    [
        (["cxi"], [SITE, CXI], {"FI_PROVIDER": "tcp;ofi_rxm"}, 1, "FI_PROVIDER=tcp", "=cxi"),
        (["cxi"], [SITE, CXI], {"FI_PROVIDER": "^cxi"}, 2, "leaves it out", "unset"),
        (["cxi"], [SITE, OPEN_MPI], {}, 2, f"{SITE} came without libcxi.so", "site's libfabric"),
        (["cxi"], [OPEN_MPI], {}, 2, "has loaded no libfabric", "FI_PROVIDER=cxi"),
        (["efa"], [SITE, CXI], {}, 2, "EFA, and", "FI_PROVIDER=efa"),
        ([], [SITE, OTHER], {}, 1, f"2 in one process: {SITE}, {OTHER}", "LD_LIBRARY_PATH"),
    ],
)
def test_messages_that_miss_the_network_warn_with_the_variable_to_set(
    here: list[str],
    libraries: list[str],
    variables: dict[str, str],
    num_nodes: int,
    value: str,
    remedy: str,
) -> None:
    problem(list(interconnect.check_network(here, libraries, variables, num_nodes)), value, remedy)


@pytest.mark.parametrize(
    ("here", "libraries", "variables", "num_nodes"),
    [
        ([], [OPEN_MPI], {"FI_PROVIDER": "verbs"}, 2),
        (["cxi"], [SITE, CXI], {"FI_PROVIDER": "cxi,shm"}, 2),
        (["cxi"], [SITE, CXI], {"FI_PROVIDER": "^tcp"}, 2),
        (["cxi"], [OPEN_MPI], {}, 1),  # Open MPI closes what one node does not need
    ],
)
def test_network_that_is_taken_is_no_problem(
    here: list[str], libraries: list[str], variables: dict[str, str], num_nodes: int
) -> None:
    found = list(interconnect.check_network(here, libraries, variables, num_nodes))
    assert [each.status for each in found] == [Status.OK] * len(here)


@pytest.mark.parametrize("name", ["NCCL_NET_GDR_LEVEL", "RCCL_MSCCL_ENABLE"])
def test_nccl_beside_an_mpi_that_takes_device_memory_warns(name: str) -> None:
    def found(aware: bool, libraries: list[str], **more: str) -> list[Finding]:
        return list(interconnect.check_device_memory(aware, libraries, {name: "x", **more}))

    problem(found(True, [OPEN_MPI]), f"{name} is set", "HPCZERO_GPU_AWARE=0")
    problem(found(True, [CRAY, LAYER]), "each can wait", "MPICH_GPU_SUPPORT_ENABLED=0")
    assert found(False, [OPEN_MPI]) == found(True, [OPEN_MPI], HPCZERO_GPU_AWARE="0") == []
    assert found(False, [CRAY]) == []  # what the warning asks for


def test_devices_that_cray_mpich_may_not_touch_warn() -> None:
    found = list(interconnect.check_device_memory(False, [CRAY], {}))
    problem(found, "through the host", "export MPICH_GPU_SUPPORT_ENABLED=1")
    assert list(interconnect.check_device_memory(True, [CRAY, LAYER], ON)) == []


def test_networks_are_found_by_what_the_kernel_says(tmp_path: Path) -> None:
    assert interconnect.networks(str(tmp_path)) == []
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    for card, driver in (("mlx5_0", "mlx5_core"), ("rdmap16s27", "efa")):
        (tmp_path / "drivers" / driver).mkdir(parents=True)
        (tmp_path / "infiniband" / card / "device").mkdir(parents=True)
        link = tmp_path / "infiniband" / card / "device" / "driver"
        link.symlink_to(tmp_path / "drivers" / driver)
    assert interconnect.networks(str(tmp_path)) == ["cxi", "efa"]


def test_libraries_of_this_process_and_of_mpi4py_are_told_by_the_system() -> None:
    assert any("libpython" in path or "libc.so" in path for path in interconnect.loaded())
    said = interconnect.linked_by("mpi4py.MPI")
    assert all(path.startswith("/") and ".so" in path for path in said)
    assert any("libc.so" in path for path in said)
