"""Jobs on a real SLURM: a training run whose job is signalled, cancelled, requeued, or loses a node."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hpczero.checkpoint.disk.folder import Folder
from tests.helpers.mpirun import run_ranks
from tests.helpers.processes import write_tool
from tests.slurm.jobs import OPTIONS, Job, Submitter, words_of

pytestmark = pytest.mark.machine

ENDLESS = 1_000_000
TINY: dict[str, Any] = {"run__name": "r", "model__preset": "gpt-micro", "train__micro_batch": 4}


long = pytest.mark.skipif(
    os.environ.get("HPCZERO_TEST_LONG") != "1", reason="takes a minute: HPCZERO_TEST_LONG=1 runs it"
)


def begun(job: Job) -> int:
    """How many starts have come to their first step."""
    return sum(event["event"] == "begin" for event in job.attempts)


def ranks_of(job: Job) -> list[int]:
    """Processes of the machine that train into the job's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            is_rank = words[0].endswith(b"python") and b"hpczero.train" in words
            if is_rank and os.readlink(entry / "cwd") == os.fspath(job.folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def saved_steps(job: Job) -> list[int]:
    folder = Folder(job.folder / "runs" / "r" / "checkpoints")
    return [manifest.step for _, manifest in folder.valid()]


@pytest.mark.limit(200)
@pytest.mark.slow
def test_60b_script_scaled_down_is_warned_saves_is_requeued_and_finishes_with_the_same_bits(
    submit: Submitter, tmp_path: Path
) -> None:
    steps = 120
    variables = {
        "TIME": "20",
        "SIGNAL_S": "100",
        "MODEL": "gpt-micro",
        "PRECISION": "fp32",
        "STEPS": str(steps),
        "CHECKPOINT_EVERY": "100000",
        "RUN_NAME": "r",
        "LEARNING_RATE": "1e-3",
        "WARMUP": "10",
    }
    whole_run = {
        "run.folder": tmp_path / "whole",
        "run.name": "r",
        "model.preset": "gpt-micro",
        "model.checkpoint_activations": "true",
        "train.micro_batch": 4,
        "train.accumulation": 1,
        "train.steps": steps,
        "train.learning_rate": "1e-3",
        "train.warmup": 10,
        "checkpoint.every": 0,
        "parallel.nodes": "2x1",
        **OPTIONS,
    }
    job = submit.train("train_60b.sh", variables=variables)
    job.wait_for_steps(10)
    # Frozen, so that the warning finds the run in its midst however fast this machine is.
    ranks = ranks_of(job)
    assert len(ranks) == 2
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    try:
        whole = run_ranks(2, ["-m", "hpczero.train", *words_of(whole_run)], timeout=90)
        # Between one and two minutes are left then: SLURM, which looks every 30 s, warns at its
        # next look. A short limit from the start would warn a slow machine before its step 10.
        hours, minutes, _ = map(int, job.field("RunTime").split(":"))
        limit = f"TimeLimit={60 * hours + minutes + 2}"
        submit.cluster.run(["scontrol", "update", f"JobId={job.number}", limit])
        job.wait(lambda: "asked to stop" in job.log, "the warning")
    finally:
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)
    job.wait(lambda: job.field("Restarts") == "1", "the requeue")
    submit.cluster.run(["scontrol", "update", f"JobId={job.number}", "TimeLimit=10"])
    job.wait_for_state("COMPLETED")

    assert whole.returncode == 0, whole
    (step,) = {event["step"] for event in job.attempts if event.get("code") == 75}
    assert 10 <= step < steps
    assert f"step-{step:09}: step {step}, saved by 2 rank(s)" in job.log
    assert [m["step"] for m in job.metrics] == list(range(1, steps + 1))
    expected = tmp_path / "whole" / "r" / "model.safetensors"
    assert (job.folder / "runs/r/model.safetensors").read_bytes() == expected.read_bytes()
    # The log of the first start is still there, and each start has noted its surroundings.
    assert "start 1 of series" in job.log
    assert "start 2 of series" in job.log
    assert len(list((job.folder / "logs").glob(f"env-{job.number}-*.json"))) == 2


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_scancel_signal_saves_and_requeues_only_the_element_it_names(
    submit: Submitter, launcher: str
) -> None:
    variables = {"SBATCH_OPTIONS": "--array=1-2%1", "LAUNCHER": launcher}
    job = submit.train(variables=variables, **TINY, train__steps=ENDLESS)
    element = Job(job.cluster, f"{job.number}_1", job.folder)
    job.wait_for_steps(3)
    # The batch shell hands it on, whatever started the ranks.
    element.scancel("--signal=USR1", "--batch")
    job.wait(lambda: any(e.get("code") == 75 for e in job.attempts), "the save")
    job.wait(lambda: element.field("Restarts") == "1", "the requeue")
    states = job.cluster.run(["squeue", "-h", "-r", "-o", "%i %T", "-j", job.number]).stdout
    job.scancel()
    job.wait_for_the_end()
    assert element.field("Restarts") == "1"
    assert Job(job.cluster, f"{job.number}_2", job.folder).field("Restarts") == "0", states
    (step,) = {e["step"] for e in job.attempts if e["event"] == "end"}
    assert step in saved_steps(job)
    assert "time limit: unknown" not in job.log  # squeue knows the element


def test_signal_to_the_ranks_alone_saves_and_requeues_by_a_slurm_that_is_busy_at_first(
    submit: Submitter, tmp_path: Path
) -> None:
    busy = write_tool(  # the first call of each kind is not answered
        tmp_path / "bin" / "scontrol",
        "#!/bin/bash\n"
        f'mark={tmp_path}/busy-"$1"\n'
        'if [[ "$1 $2" != "show hostnames" && ! -e "$mark" ]]; then\n'
        '    touch "$mark"; echo "Socket timed out on send/recv operation" >&2; exit 1\n'
        "fi\n"
        f'exec {shutil.which("scontrol")} "$@"\n',
    )
    machine = tmp_path / "site.sh"
    machine.write_text(f'PATH="{busy.parent}:$PATH"\n')
    job = submit.train(variables={"MACHINE": str(machine)}, **TINY, train__steps=ENDLESS)
    job.wait_for_steps(3)
    job.scancel("--signal=USR1")
    job.wait(lambda: job.field("Restarts") == "1", "the requeue")
    job.scancel()
    job.wait_for_the_end()
    (step,) = {e["step"] for e in job.attempts if e.get("code") == 75}
    assert step in saved_steps(job)
    assert "asked to stop at" not in job.log  # the batch shell has heard nothing
    assert {path.name for path in tmp_path.glob("busy-*")} == {"busy-show", "busy-requeue"}


def test_warning_that_comes_while_the_script_looks_around_does_not_end_the_job(
    submit: Submitter, tmp_path: Path
) -> None:
    machine = tmp_path / "site.sh"
    machine.write_text(
        'if [[ -n "${SLURM_JOB_ID:-}" ]]; then\n'
        f"    trap 'touch \"{tmp_path}/go\"' USR2\n"
        f'    touch "{tmp_path}/waits"; until [[ -e "{tmp_path}/go" ]]; do sleep 0.1; done\n'
        "fi\n"
    )
    job = submit.train(variables={"MACHINE": str(machine)}, **TINY, train__steps=5)
    job.wait((tmp_path / "waits").exists, "its first lines")
    job.scancel("--signal=USR1", "--batch")
    # Signals are delivered when slurmd comes to it, and nothing says so: another one comes after it.
    job.scancel("--signal=USR2", "--batch")
    job.wait((tmp_path / "go").exists, "its next lines")
    job.ends_with(0)
    assert len(job.metrics) == 5


def test_cancelled_job_saves_and_does_not_come_back(submit: Submitter) -> None:
    job = submit.train(**TINY, train__steps=ENDLESS)
    job.wait_for_steps(3)
    job.scancel()
    job.wait_for_state("CANCELLED")
    job.wait(lambda: "exit code 75" in job.log, "the last line of the log")
    job.wait_for_the_end()
    assert job.field("JobState") == "CANCELLED"
    assert len(saved_steps(job)) == 1
    assert "not requeued" in job.log


def test_misconfigured_job_fails_once_with_the_reason(submit: Submitter) -> None:
    job = submit.train(**TINY, train__global_batch=9)
    job.ends_with(78)
    assert job.field("Restarts") == "0"
    assert "train.global_batch: got 9, expected a multiple of 2 rank(s) x micro_batch 4" in job.log


def test_three_fruitless_restarts_end_the_job(submit: Submitter) -> None:
    earlier = [{"event": "start", "series": "s", "committed": 0} for _ in range(4)]
    folder = submit.folder / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "attempts.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in earlier))
    job = submit.train(variables={"HPCZERO_SERIES": "s"}, **TINY, train__steps=ENDLESS)
    job.ends_with(78)
    assert job.field("Restarts") == "0"
    assert "crash loop: 3 restarts in a row committed no checkpoint after step 0" in job.log
    assert len(job.attempts) == 4


@long
def test_job_that_is_killed_and_requeued_by_hand_ends_at_its_fifth_start(submit: Submitter) -> None:
    job = submit.train(**TINY, train__steps=ENDLESS, checkpoint__every=0)
    for starts in range(1, 5):
        job.wait(lambda n=starts: begun(job) == n, f"start {starts}")
        for rank in ranks_of(job):
            os.kill(rank, signal.SIGKILL)
        job.wait_for_state("FAILED")
        assert job.field("Restarts") == str(starts - 1)  # a crash is no reason to requeue
        job.cluster.run(["scontrol", "requeue", job.number])
    job.wait(lambda: "crash loop" in job.log, "the end of it")
    job.ends_with(78)
    assert job.field("Restarts") == "4"
    assert saved_steps(job) == []


@long
def test_lost_node_is_replaced_and_the_run_goes_on_from_its_checkpoint(submit: Submitter) -> None:
    job = submit.train(**TINY, train__steps=ENDLESS, checkpoint__every=20)
    job.wait_for_steps(25)
    first, lost = job.nodes
    job.cluster.kill_node(lost)
    try:
        job.wait(lambda: job.field("Restarts") == "1", "the requeue after the loss")
        job.wait(lambda: "going on from" in job.log, "the second start")
        again = job.nodes
    finally:
        job.cluster.start_node(lost)
    steps = [e["step"] for e in job.attempts if e["event"] == "begin"]
    job.scancel()
    job.wait_for_state("CANCELLED")
    job.wait_for_the_end()
    assert first in again
    assert lost not in again
    assert steps[0] == 0
    assert steps[1] >= 20
    assert steps[1] % 20 == 0


@pytest.mark.limit(200)
@pytest.mark.slow
def test_elastic_job_loses_a_node_goes_on_in_place_and_later_on_more_with_the_same_bits(
    submit: Submitter, tmp_path: Path
) -> None:
    steps = 60
    options: dict[str, Any] = {
        "run__name": "r",
        "run__exact": "require",
        "model__preset": "gpt-nano",
        "model__layers": 2,
        "model__hidden": 64,
        "model__heads": 4,
        "train__global_batch": 8,
        "train__steps": steps,
        "checkpoint__every": 2,
    }
    job = submit.train(variables={"NODES": "3", "ELASTIC_NODES": "2"}, **options)
    job.wait_for_steps(5)
    first, lost, last = job.nodes
    job.cluster.kill_node(lost)
    alone = {key.replace("__", "."): value for key, value in options.items()}
    alone |= {**OPTIONS, "run.folder": tmp_path / "alone"}
    whole = run_ranks(1, ["-m", "hpczero.train", *words_of(alone)], timeout=90)
    try:
        job.wait(lambda: begun(job) == 2, "the start without the lost node")
    finally:
        job.cluster.start_node(lost)
    assert job.field("Restarts") == "0"
    assert job.nodes == [first, last]
    (line,) = (line for line in job.log.splitlines() if f": lost {lost}; " in line)
    resumed = job.attempts[-1]["step"]
    assert line.endswith(f"2 node(s) are left, host[1,3], for 2 rank(s) from step {resumed}")
    assert 4 <= resumed < steps
    job.wait(lambda: job.metrics[-1]["step"] > resumed + 2, "steps on 2 ranks")
    job.scancel("--signal=USR1", "--batch")
    job.wait(lambda: job.field("Restarts") == "1", "the requeue")
    job.ends_with(0)

    assert whole.returncode == 0, whole
    starts = [e for e in job.attempts if e["event"] == "start"]
    assert [e["ranks"] for e in starts] == [3, 2, 3]
    assert {e["job"] for e in starts} == {job.number}
    expected = tmp_path / "alone" / "r"
    lines = (expected / "metrics.jsonl").read_text().splitlines()
    losses = {m["step"]: m["loss"] for m in map(json.loads, lines)}
    assert {m["step"]: m["loss"] for m in job.metrics} == losses
    assert sorted(losses) == list(range(1, steps + 1))
    weights = (submit.folder / "runs/r/model.safetensors").read_bytes()
    assert weights == (expected / "model.safetensors").read_bytes()
