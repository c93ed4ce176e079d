"""What is read from SLURM, and what follows: the time that is left, the place of ranks, the noted environment."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpczero.errors import ConfigError, TopologyError
from hpczero.job.launch import ask_time_left, check_placement, seconds_of, tasks_per_node
from hpczero.job.topology import check_launch
from hpczero.options.environment import Environment
from hpczero.run.stopping import Deadline
from tests.helpers.mpirun import ROOT, run_command, run_ranks
from tests.helpers.processes import launch_environment


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784.0),
        ("12:00:00", 43200.0),
        ("59:59", 3599.0),
        ("0:07", 7.0),
        ("9\n", 9.0),
        ("UNLIMITED\n", math.inf),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_time_left_is_read_in_every_form_of_squeue(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("16(x25)", (16,) * 25),
        ("2(x3),1", (2, 2, 2, 1)),
        ("4", (4,)),
        ("", None),
        ("many", None),
    ],
)
def test_tasks_per_node_are_read_in_slurms_short_form(
    text: str, counts: tuple[int, ...] | None
) -> None:
    assert tasks_per_node(text) == counts


def test_squeue_that_is_not_there_leaves_the_time_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert ask_time_left("1") is None


class Clock:
    """Seconds since the epoch, and what squeue says of the job."""

    def __init__(self, left: float | None) -> None:
        self.time = 1000.0
        self.end = None if left is None else self.time + left
        self.asked = 0

    def now(self) -> float:
        return self.time

    def ask(self, job: str) -> float | None:
        assert job == "7"
        self.asked += 1
        return None if self.end is None else self.end - self.time


def deadline(clock: Clock, **said: float) -> Deadline:
    return Deadline(Environment(job="7", job_of_squeue="7", **said), ask=clock.ask, now=clock.now)  # type: ignore[arg-type]


def test_end_is_near_when_three_saves_and_two_of_the_slowest_steps_no_longer_fit() -> None:
    clock = Clock(left=100.0)
    end = deadline(clock)
    assert not end.is_near(step_s=5.0, save_s=20.0)  # 70 s, and 15 to end the job
    clock.time += 14.0
    # 85 s again, as the slow step may come back; 86 are left.
    assert not end.is_near(step_s=1.0, save_s=20.0)
    clock.time += 2.0
    assert end.is_near(step_s=1.0, save_s=20.0)


def test_end_that_slurm_sets_in_the_environment_is_not_asked_for() -> None:
    clock = Clock(left=None)
    end = deadline(clock, job_end=1100.0)
    assert (clock.asked, end.left_s) == (0, 100.0)
    assert not end.is_near(step_s=1.0, save_s=1.0)


@pytest.mark.parametrize(
    ("now", "near", "left"),
    [(3610.0, False, 3610.0), (math.inf, False, math.inf), (None, True, 10.0)],
    ids=["raised", "taken away", "cannot be asked"],
)
def test_limit_is_asked_for_again_before_the_run_stops(
    now: float | None, near: bool, left: float
) -> None:
    clock = Clock(left=100.0)
    end = deadline(clock)
    clock.time += 90.0
    clock.end = None if now is None else clock.time + now
    assert end.is_near(step_s=1.0, save_s=1.0) is near
    assert (clock.asked, end.left_s) == (2, left)


def test_start_is_refused_whose_time_does_not_hold_three_saves_and_the_end() -> None:
    end = deadline(Clock(left=100.0))
    end.check_room(save_s=28.0)  # 99 s
    with pytest.raises(ConfigError, match=r"100 s are left .* stop 102 s before its end .*TIME="):
        end.check_room(save_s=29.0)
    Deadline(Environment()).check_room(save_s=1e6)


def test_start_is_not_refused_where_the_limit_was_raised_meanwhile() -> None:
    clock = Clock(left=3600.0)
    end = deadline(clock, job_end=1060.0)
    end.check_room(save_s=100.0)
    assert (clock.asked, end.left_s) == (1, 3600.0)


def test_job_without_a_limit_and_no_job_at_all_are_never_near_their_end() -> None:
    for end in (deadline(Clock(left=None)), Deadline(Environment())):
        assert end.left_s == math.inf
        assert not end.is_near(step_s=1e6, save_s=1e6)


def endless(folder: Path, *, every: str = "--checkpoint.every 0") -> list[str]:
    """A training run that ends only when it is asked to."""
    options = "--run.name r --model.preset gpt-micro --model.context 16 --train.steps 1000000 "
    options += f"--evaluation.batches 0 {every} --log.plot false --log.tensorboard false"
    cache = ["--data.cache", str(ROOT / "runs" / "tokens"), "--run.folder", str(folder)]
    return ["-m", "hpczero.train", *options.split(), *cache]


@pytest.mark.slow
def test_run_saves_and_asks_to_be_requeued_when_its_time_is_nearly_up(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 35)}
    job = run_ranks(2, endless(tmp_path), timeout=90, env=env)
    assert job.returncode == 75, job
    assert "time limit: " in job.stdout
    assert "stopped after step" in job.stdout
    assert len(list((tmp_path / "r" / "checkpoints").glob("step-*"))) == 1


def ignores(pid: int, number: int) -> bool:
    """Whether the process ignores that signal by now."""
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_warning_that_comes_while_a_rank_starts_is_heard(tmp_path: Path) -> None:
    data = ["--data.path", str(ROOT / "CHANGELOG.md"), "--data.cache", str(tmp_path)]
    words = [*endless(tmp_path, every=""), *data]
    process = subprocess.Popen(
        [ROOT / "slurm" / "bind.sh", sys.executable, *words],
        env=launch_environment(PYTHONPATH=os.fspath(ROOT), SLURM_LOCALID="0", OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        # bash itself ignores it from its first lines on, as srun's own start-up takes longer than that.
        while not ignores(process.pid, signal.SIGUSR1) and time.monotonic() < deadline:
            time.sleep(0.005)
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
    finally:
        process.kill()
    assert process.wait() == 75
    assert [p.name for p in (tmp_path / "r" / "checkpoints").glob("step-*")] == ["step-000000001"]


@pytest.mark.slow
def test_warning_that_is_repeated_does_not_end_a_rank_that_ends(tmp_path: Path) -> None:
    # Without bind.sh, from which ranks would have it that they ignore the signal.
    process = subprocess.Popen(
        [sys.executable, *endless(tmp_path, every="")],
        env=launch_environment(PYTHONPATH=os.fspath(ROOT), OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if (tmp_path / "r" / "metrics.jsonl").exists():
                process.send_signal(signal.SIGUSR1)
            time.sleep(0.002)
    finally:
        process.kill()
    assert process.wait() == 75


def test_element_of_an_array_asks_for_itself_and_not_for_all_of_them() -> None:
    element = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    assert Environment.read(element).job_of_squeue == "7_3"
    assert Environment.read({"SLURM_JOB_ID": "7"}).job_of_squeue == "7"


# --- the place of ranks

BY_SRUN = {"launched_by": "SLURM_STEP_NUM_TASKS"}
BY_MPIRUN = {"launched_by": "OMPI_COMM_WORLD_SIZE"}


@pytest.mark.parametrize(
    ("counts", "said", "launched", "right"),
    [
        ([2, 2], "2(x2)", BY_SRUN, True),
        ([1, 2, 2], "2(x2),1", BY_SRUN, True),  # nodes in another order
        ([2, 1], "2", BY_MPIRUN, True),  # a part of the job
        ([7], "", BY_SRUN, True),  # SLURM says nothing
        ([4], "2(x2)", BY_SRUN, False),
        ([1, 1, 1, 1], "2(x2)", BY_SRUN, False),
        ([3, 1], "2", BY_MPIRUN, False),  # piled up on the first node
    ],
)
def test_ranks_that_are_elsewhere_are_refused_with_both_numbers(
    counts: list[int], said: str, launched: dict[str, Any], right: bool
) -> None:
    environment = Environment(tasks_per_node=said, **launched)
    if right:
        check_placement(counts, environment)
        return
    with pytest.raises(TopologyError) as caught:
        check_placement(counts, environment)
    assert ", ".join(map(str, counts)) in str(caught.value)
    assert f"SLURM says {said}" in str(caught.value)


def test_lonely_rank_of_a_larger_launch_is_refused(tmp_path: Path) -> None:
    words = ["-m", "hpczero.train", "--run.folder", str(tmp_path)]
    alone = run_command([sys.executable, *words], 60, {"SLURM_STEP_NUM_TASKS": "4"})
    assert alone.returncode == 78, alone
    assert "MPI sees 1 rank(s), but SLURM_STEP_NUM_TASKS=4" in alone.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}, ("SLURM_STEP_NUM_TASKS", 4)),
        ({"SLURM_STEP_NUM_TASKS": "1", "OMPI_COMM_WORLD_SIZE": "4"}, ("OMPI_COMM_WORLD_SIZE", 4)),
        ({"SLURM_NTASKS": "8"}, ("", None)),  # a batch script, not a step
    ],
)
def test_innermost_launcher_says_how_many_ranks_there_are(
    variables: dict[str, str], launched: tuple[str, int | None]
) -> None:
    found = Environment.read(variables)
    assert (found.launched_by, found.launched_ranks) == launched


@pytest.mark.parametrize(
    "program",
    [
        "import hpczero; hpczero.Topology.of_world()",
        "import hpczero; from mpi4py import MPI; hpczero.Topology.create(MPI.COMM_WORLD)",
        "import hpczero.bridge; from mpi4py import MPI; hpczero.bridge.init(MPI.COMM_WORLD)",
    ],
    ids=["of_world", "create", "bridge"],
)
def test_rank_that_torchrun_has_started_is_refused_with_what_to_type(program: str) -> None:
    by_torchrun = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    alone = run_command([sys.executable, "-c", program], 60, by_torchrun)
    assert alone.returncode != 0, alone
    assert "MPI sees 1 rank, but WORLD_SIZE=2" in alone.stderr
    assert "mpirun -n 2 python" in alone.stderr


@pytest.mark.parametrize(
    ("size", "variables"),
    [
        (1, {"WORLD_SIZE": "1", "RANK": "0"}),
        (1, {"WORLD_SIZE": "8"}),  # a job script's, for all programs of the job
        (2, {"WORLD_SIZE": "2", "RANK": "0"}),  # of a launcher whose variables nobody knows
        (2, {"WORLD_SIZE": "1", "RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),  # mpirun torchrun
        (1, {"WORLD_SIZE": "8", "RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}),
    ],
)
def test_variables_of_torch_that_fit_pass(size: int, variables: dict[str, str]) -> None:
    check_launch(size, Environment.read(variables))


@pytest.mark.parametrize(
    ("size", "variables", "told"),
    [
        (1, {"SLURM_NTASKS": "32"}, True),  # python in the shell of salloc
        (1, {"SLURM_NTASKS": "32", "SLURM_STEP_NUM_TASKS": "1"}, False),  # srun -n 1
        (1, {"SLURM_NTASKS": "1"}, False),
        (2, {"SLURM_NTASKS": "32"}, False),
    ],
)
def test_rank_without_a_launcher_in_a_job_of_several_is_told_that_it_is_alone(
    size: int, variables: dict[str, str], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_launch(size, Environment.read(variables))
    assert ("1 rank, without a launcher, in a SLURM job of 32" in caplog.text) is told


# --- what a job ran with


def test_record_of_a_job_has_its_versions_and_variables_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    variables = {"SLURM_JOB_ID": "7", "SLURM_JWT": "s3cret", "OMPI_MCA_btl": "tcp", "FOO_BAR": "x"}
    subprocess.run(
        [sys.executable, "-m", "hpczero.doctor.record", path],
        env={"PYTHONPATH": os.fspath(ROOT), **variables},
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    found = json.loads(path.read_text())
    kept = {name: value for name, value in found["environment"].items() if name != "PYTHONPATH"}
    assert kept == {"SLURM_JOB_ID": "7", "OMPI_MCA_btl": "tcp"}
    assert found["versions"]["python"] == sys.version.split()[0]
    assert "s3cret" not in path.read_text()
