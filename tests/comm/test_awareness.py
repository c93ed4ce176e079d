"""Whether MPI is given device memory: the ladder of questions, each rung."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpczero.comm.devices import awareness
from hpczero.comm.devices.awareness import Claim, claim, decide, environment_claim, try_in_a_job

WORKS, FAILS = (True, "two ranks have tried it"), (False, "two ranks failed")


@pytest.mark.parametrize(
    ("wish", "said", "trial", "expected"),
    [
        (True, Claim(False, "no"), FAILS, True),  # the user's word, whatever the library says
        (False, Claim(True, "yes"), WORKS, False),
        (None, Claim(True, "yes"), WORKS, True),
        (None, Claim(True, "yes"), FAILS, False),  # libraries claim support that crashes
        (None, Claim(False, "no"), WORKS, False),
        (None, Claim(None, "nothing"), WORKS, False),
    ],
)
def test_the_users_word_then_a_claim_that_is_proved(
    wish: bool | None, said: Claim, trial: tuple[bool, str], expected: bool
) -> None:
    found, reason = decide(wish, said, lambda: trial)
    assert found is expected
    assert reason


def test_nothing_is_tried_where_nothing_is_claimed() -> None:
    def never() -> tuple[bool, str]:
        raise AssertionError("tried")

    decide(None, Claim(False, "no"), never)
    decide(None, Claim(None, "nothing"), never)
    decide(True, Claim(True, "yes"), never)


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


@pytest.mark.limit(180)
def test_a_trial_is_a_job_of_its_own_even_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMIX_NAMESPACE"):
        monkeypatch.setenv(name, "7")  # as in a rank that mpirun has started
    works, said = try_in_a_job()
    assert works, said  # on the host's memory, if there is no device


def test_a_trial_that_dies_is_a_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!{sys.executable}\nimport os\nos.kill(os.getpid(), 11)\n")
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    works, said = try_in_a_job()
    assert not works
    assert "-11" in said
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    works, said = try_in_a_job()
    assert not works
    assert "no mpirun" in said


def test_a_trial_that_hangs_is_a_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text("#!/bin/sh\nexec sleep 60\n")
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(awareness, "TRIAL_S", 0.5)
    works, said = try_in_a_job()
    assert not works
    assert "still trying" in said
