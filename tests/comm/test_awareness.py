"""Whether MPI is given device memory: the ladder of questions, each rung."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpczero.comm import awareness
from hpczero.comm.awareness import (
    LibraryClaim,
    claim,
    claim_of,
    decide,
    environment_claim,
    environment_of,
    launchers,
    query_cuda_support,
    try_in_a_job,
)
from tests.helpers.processes import write_tool

WORKS, FAILS = (True, "two ranks have tried it"), (False, "two ranks failed")


@pytest.mark.parametrize(
    ("wish", "said", "trial", "expected"),
    [
        (True, LibraryClaim(False, "no"), FAILS, True),  # the user's word, whatever is said
        (False, LibraryClaim(True, "yes"), WORKS, False),
        (None, LibraryClaim(True, "yes"), WORKS, True),
        (None, LibraryClaim(True, "yes"), FAILS, False),  # libraries claim support that crashes
        (None, LibraryClaim(False, "no"), WORKS, False),
        (None, LibraryClaim(None, "nothing"), WORKS, False),
    ],
)
def test_the_users_word_then_a_claim_that_is_proved(
    wish: bool | None, said: LibraryClaim, trial: tuple[bool, str], expected: bool
) -> None:
    found, reason = decide(wish, said, lambda: trial)
    assert found is expected
    assert reason


def test_nothing_is_tried_where_nothing_is_claimed() -> None:
    def never() -> tuple[bool, str]:
        raise AssertionError("tried")

    decide(None, LibraryClaim(False, "no"), never)
    decide(None, LibraryClaim(None, "nothing"), never)
    decide(True, LibraryClaim(True, "yes"), never)


@pytest.mark.parametrize(
    ("variables", "libraries", "expected"),
    [
        ({}, "", None),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, "", None),  # without its library it would not start
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, "libmpi_gtl_cuda.so.0", True),
        ({}, "libmpi_gtl_cuda.so.0", False),
        ({"MV2_USE_CUDA": "1"}, "", True),
        ({"MV2_USE_CUDA": "0"}, "", None),
        ({"PSP_CUDA": "1"}, "", True),
    ],
)
def test_what_mpich_and_its_kin_leave_in_the_environment(
    variables: dict[str, str], libraries: str, expected: bool | None
) -> None:
    assert environment_claim(variables, libraries).aware is expected


@pytest.mark.parametrize(
    ("kinds", "support", "variables", "expected"),
    [
        ("system,mpi,cuda:device", False, {}, True),  # the standard's word comes first
        ("mpi,system,cuda", None, {}, True),
        ("mpi,system", True, {}, True),  # MPICH built with CUDA lists these alone
        ("mpi,system", None, {"MV2_USE_CUDA": "1"}, True),
        ("mpi,system", False, {"MV2_USE_CUDA": "1"}, False),
        ("mpi,system", None, {}, None),
        ("", True, {}, True),
        ("", None, {}, None),
    ],
)
def test_a_list_of_memory_kinds_without_cuda_is_no_denial(
    kinds: str, support: bool | None, variables: dict[str, str], expected: bool | None
) -> None:
    found = claim_of(kinds, support, variables, "")
    assert found.aware is expected
    assert found.aware is not None or kinds in found.reason


@pytest.mark.parametrize("answer", [0, 1])
@pytest.mark.parametrize("name", ["libmpi.so.12.4", "libmpich.so", "libmpi_gnu_123.so.12"])
def test_a_library_that_python_keeps_to_itself_is_asked(
    name: str, answer: int, tmp_path: Path
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no cc to make a library with")
    source, library = tmp_path / "mpi.c", tmp_path / name
    source.write_text(f"int MPIX_Query_cuda_support(void) {{ return {answer}; }}\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    maps = f"7f00-7f01 r-xp 0000 08:01 17    {library}\n7f02-7f03 r--p 0000 00:00 0    [heap]\n"
    before = query_cuda_support(maps)
    ctypes.CDLL(str(library))  # its symbols are not global
    assert query_cuda_support(maps) is bool(answer)
    # As long as it was not in the process, others were asked.
    assert before is query_cuda_support("")


@pytest.mark.mpi
@pytest.mark.ranks(1)
def test_the_library_says_what_its_own_tool_says(comm: object) -> None:
    tool = shutil.which("ompi_info")
    if tool is None:
        pytest.skip("no ompi_info: this MPI is no Open MPI, or its tools are not here")
    done = subprocess.run([tool, "--parsable", "--all"], capture_output=True, text=True, check=True)
    built = re.search(r"mpi_built_with_cuda_support:value:(true|false)", done.stdout)
    assert built, "since Open MPI 1.7"
    found = claim()
    assert found.aware is (built[1] == "true")
    assert found.reason


@pytest.mark.slow
@pytest.mark.limit(180)
def test_a_trial_is_a_job_of_its_own_even_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMIX_NAMESPACE"):
        monkeypatch.setenv(name, "7")  # as in a rank that mpirun has started
    works, said = try_in_a_job(os.environ)
    assert works, said  # on the host's memory, if there is no device


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        ("#!/bin/sh\nkill -SEGV $$\n", "-11"),
        ("#!/bin/sh\nexec sleep 60\n", "still trying"),
        ("", "no mpirun"),
    ],
    ids=["dies", "hangs", "is not there"],
)
def test_a_trial_that_does_not_end_well_is_a_no(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, reason: str
) -> None:
    if launcher:
        write_tool(tmp_path / "mpirun", launcher)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(awareness, "TRIAL_S", 0.5 if "sleep" in launcher else 60.0)
    works, said = try_in_a_job(os.environ)
    assert not works
    assert reason in said


SRUN = """#!/bin/sh
echo "$*" >>{log}
env | grep ^SLURM_ >>{log}
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
unset SLURM_JOB_ID SLURM_MPI_TYPE
PATH={path} exec {mpirun} -n 2 "$@"
"""


@pytest.mark.slow
@pytest.mark.limit(180)
def test_where_there_is_srun_alone_it_tries_one_node_and_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun behind the srun of this test")
    log = tmp_path / "log"
    program = SRUN.format(log=log, mpirun=mpirun, path=os.environ["PATH"])
    srun = write_tool(tmp_path / "bin" / "srun", program)
    for tool in ("sh", "env", "grep"):
        (srun.parent / tool).symlink_to(str(shutil.which(tool)))
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    given = {"PATH": str(srun.parent), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_NTASKS_PER_NODE": "2"}
    works, said = try_in_a_job({**os.environ, **given, **step})
    assert works, said
    assert said == "two ranks have tried it on one node, and two on two"
    lines = log.read_text().splitlines()
    asked = [line for line in lines if line.startswith("--nodes")]
    assert [line.split()[0] for line in asked] == ["--nodes=1", "--nodes=2"]
    assert all("--overlap" in line for line in asked)
    assert "SLURM_JOB_ID=7" in lines
    assert not any(line.startswith(tuple(step)) for line in lines)


def test_the_trial_goes_the_way_the_job_came(tmp_path: Path) -> None:
    for tool in ("srun", "mpirun"):
        write_tool(tmp_path / tool, "#!/bin/sh\n")
    given = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    by_srun = {**given, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    by_mpirun = {**by_srun, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    names = [[Path(line[0]).name for line in launchers(each)] for each in (by_srun, by_mpirun)]
    assert names == [["srun"], ["mpirun"]]
    assert launchers({"PATH": str(tmp_path)})[0][0].endswith("mpirun")  # no allocation
    (tmp_path / "mpirun").unlink()
    assert launchers({"PATH": str(tmp_path)}) == []
    assert "SLURM_JOB_ID" not in environment_of(by_mpirun, by_srun=False)
