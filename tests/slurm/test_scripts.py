"""The scripts of ``slurm/``: what SLURM accepts, what they refuse and how, and how they are written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from hpczero.options.reading import parse_command_line
from scaling.sweep.__main__ import Options
from scaling.sweep.study import Point
from tests.helpers.mpirun import ROOT, Finished, run_command
from tests.helpers.processes import write_tool
from tests.slurm.jobs import OPTIONS, Job, Submitter, words_of

pytestmark = pytest.mark.machine

SCRIPTS = sorted((ROOT / "slurm").glob("*.sh")) + sorted((ROOT / "slurm" / "machines").glob("*.sh"))


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck (Debian: shellcheck)")
    assert len(SCRIPTS) > 8
    checked = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_60b_run_is_accepted_by_a_cluster_of_25_nodes_with_16_gpus(submit: Submitter) -> None:
    test_only = ["sbatch", "--test-only", "--partition=dgx2"]
    script = ROOT / "slurm" / "train_60b.sh"
    accepted = submit.cluster.run([*test_only, script])
    assert "1200 processors on nodes dgx[1-25] in partition dgx2" in accepted.stderr
    refused = submit.cluster.run([*test_only, "--nodes=26", script], check=False)
    assert refused.returncode != 0


def test_60b_dry_run_shows_the_plan_for_400_ranks_and_the_line(submit: Submitter) -> None:
    unset = {"NODES": "", "RANKS_PER_NODE": "", "GPUS_PER_NODE": "", "CPUS_PER_RANK": ""}
    shown = submit.script("train_60b.sh", **unset, DRY_RUN="1", TIME="", SIGNAL_S="")
    assert shown.returncode == 0, shown
    assert "400 ranks on 25 nodes of 16 (480.0 GB per node), 30.0 GB per rank, transport ipc" in (
        shown.stdout
    )
    assert "gpt-60b: 60,119,623,680 parameters" in shown.stdout
    line = next(line for line in shown.stdout.splitlines() if line.startswith("slurm: sbatch "))
    sizes = "--nodes=25 --ntasks-per-node=16 --gpus-per-node=16 --cpus-per-task=3 --time=24:00:00"
    assert set(sizes.split()) < set(line.split())
    assert submit.cluster.run(["squeue", "-h"]).stdout == ""


@pytest.mark.parametrize(
    ("script", "variables", "message"),
    [
        ("train_60b.sh", {"MODEL_PARALLEL": "0"}, "MODEL_PARALLEL is 0, expected at least 1"),
        ("train_60b.sh", {"MODEL_PARALLEL": "x"}, "MODEL_PARALLEL is 'x', expected a number"),
        ("train_60b.sh", {"NODES": "2", "RANKS_PER_NODE": "16"}, "from 60 ranks on it fits"),
        ("train.sh", {"PARTITION": "nope"}, "PARTITION is 'nope', and this cluster has: dgx2 gpu"),
        ("train.sh", {"MACHINE": "nope"}, "no machine file"),
        ("train.sh", {"MACHINE": "dgx-infiniband"}, "wants the module openmpi"),
        ("train.sh", {"PYTHON": "/nowhere/python"}, "no Python at /nowhere/python"),
        ("train.sh", {"PARTITION": "gpu,nope"}, "PARTITION is 'gpu,nope', and this cluster has"),
        ("train.sh", {"TIME": "1", "SIGNAL_S": "60"}, "TIME is 1, and the run is told to stop"),
        ("train.sh", {"TIME": "5", "SIGNAL_S": ""}, "SIGNAL_S=300 seconds before its end"),
        ("train.sh", {"SIGNAL_S": "10m"}, "SIGNAL_S is '10m', expected a number"),
        ("strong_scaling.sh", {"RANKS": "16 many"}, "RANKS is '16 many', expected numbers"),
        ("train.sh", {"NODES": "two"}, "NODES is 'two', expected a number"),
        ("train.sh", {"NODES": "2-"}, "NODES is '2-', expected a number, or two as in 4-8"),
        ("train.sh", {"ELASTIC_NODES": "half"}, "ELASTIC_NODES is 'half', expected a number"),
        ("train.sh", {"NODES": "2-3", "LAUNCHER": "mpirun"}, "ELASTIC_NODES is 2, and LAUNCHER"),
        ("train_60b.sh", {"NODES": "20-25"}, "ELASTIC_NODES is 20, and here the number of ranks"),
        ("train.sh", {"LAUNCHER": "ssh"}, "LAUNCHER is 'ssh', expected srun or mpirun"),
        ("train.sh", {"SBATCH_OPTIONS": "--gpus-per-node=99"}, "SLURM refused the job"),
        ("point.sh", {}, "no command"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_submitted(
    submit: Submitter, script: str, variables: dict[str, str], message: str
) -> None:
    refused = submit.script(script, **variables)
    assert refused.returncode == 78, refused
    assert message in refused.stderr, refused
    assert submit.cluster.run(["squeue", "-h"]).stdout == ""


def test_site_that_wants_an_account_is_told_so(submit: Submitter) -> None:
    machine = submit.folder / "site.sh"
    machine.write_text('MACHINE_NEEDS="ACCOUNT"\n')
    refused = submit.script("train.sh", MACHINE=str(machine))
    assert refused.returncode == 78
    assert "ACCOUNT is not set" in refused.stderr


@pytest.mark.parametrize(
    ("name", "value", "given"),
    [
        ("NODES", "2", "1"),
        ("RANKS_PER_NODE", "4", "1"),
        ("CPUS_PER_RANK", "4", "1"),
        ("GPUS_PER_NODE", "2", "0"),
    ],
)
def test_sizes_that_are_not_those_of_the_job_are_refused_in_it(
    submit: Submitter, name: str, value: str, given: str
) -> None:
    # sbatch in front: the variable cannot reach the #SBATCH lines.
    script = str(ROOT / "slurm" / "train.sh")
    line = ["sbatch", "--parsable", script]
    job = submit.submitted(submit.cluster.run(line, env={name: value}, cwd=submit.folder))
    job.ends_with(78)
    assert f"{name} is {value}, but SLURM gave {given}:" in job.log
    assert f" {script} " in job.log  # what to type, and not SLURM's copy
    assert "slurm_script" not in job.log


@pytest.mark.parametrize(
    ("nodes", "minimum", "kept"), [("2-3", "", True), ("2-3", "0", False), ("2", "", False)]
)
def test_job_of_a_range_of_nodes_outlives_one_unless_it_is_told_not_to(
    submit: Submitter, nodes: str, minimum: str, kept: bool
) -> None:
    shown = submit.script("train.sh", DRY_RUN="1", NODES=nodes, ELASTIC_NODES=minimum)
    assert shown.returncode == 0, shown
    line = next(line for line in shown.stdout.splitlines() if line.startswith("slurm: sbatch "))
    assert f"--nodes={nodes}" in line.split()
    assert ("--no-kill" in line.split()) == kept


def test_job_of_a_range_of_nodes_takes_what_there_is(submit: Submitter) -> None:
    # SLURM 22.05 gives no more nodes than the least number has ranks.
    job = submit.job("point.sh", "true", NODES="2-3", RANKS_PER_NODE="2", GPUS_PER_NODE="2")
    job.ends_with(0)
    assert "3 node(s) x 2 rank(s) on host[1-3]" in job.log


def elastic(folder: Path, codes: str, answers: str, steps: str) -> Finished:
    """``train`` on three nodes, a, b and c, by a SLURM of shell functions.

    Args:
        folder: whose file ``starts`` gets a line for each start.
        codes: with which the starts end.
        answers: nodes that answer after each start, as ``ab``.
        steps: that are saved at first, and after each start.
    """
    program = f"""
        ELASTIC_NODES=2 HPCZERO_SERIES=s SLURM_JOB_NUM_NODES=3 SLURM_JOB_NODELIST='a b c' RANKS_PER_NODE=4
        codes=({codes}) answers=({answers}) steps=({steps}) start=0
        in_batch() {{ true; }}
        enter_job() {{ true; }}
        start_guard() {{ true; }}
        of_job() {{ echo RUNNING; }}
        scontrol() {{ if [[ "$2" == hostnames ]]; then tr ' ' '\n' <<<"$3"; else tr , ' ' <<<"$3"; fi; }}
        answering() {{ grep -o . <<<"${{answers[start - 1]}}"; }}
        saved_step() {{ echo "${{steps[start]}}"; }}
        launch() {{ echo "${{PLACES[*]}}" >>{folder}/starts; return "${{codes[start++]}}"; }}
        leave_job() {{ echo "left with $1"; exit "$1"; }}
        PYTHON=python train
    """
    return in_lib(program)


@pytest.mark.parametrize(
    ("codes", "answers", "steps", "starts", "code", "message"),
    [
        (
            "137 0",
            "ac",
            "0 4 9",
            2,
            0,
            "lost b; 2 node(s) are left, a c, for 8 rank(s) from step 4",
        ),
        ("1", "abc", "0 4", 1, 1, "left with 1"),  # a program's error
        ("78", "ac", "0 4", 1, 78, "left with 78"),
        ("65", "ac", "0 4", 1, 65, "left with 65"),
        ("75", "ac", "0 4", 1, 75, "left with 75"),
        ("86 0", "ac", "0 4 9", 2, 0, "lost b"),  # a rank that waited for the lost node
        ("137", "a", "0 4", 1, 75, "too few: ELASTIC_NODES is 2"),
        ("137", "abc", "4 4", 1, 137, "left with 137"),
        ("137 1", "ab ab", "4 4 4", 2, 1, "left with 1"),
    ],
)
def test_start_that_failed_is_made_again_only_where_a_node_is_lost(
    tmp_path: Path, codes: str, answers: str, steps: str, starts: int, code: int, message: str
) -> None:
    said = elastic(tmp_path, codes, answers, steps)
    assert said.returncode == code, said
    assert message in said.stdout, said
    assert len((tmp_path / "starts").read_text().splitlines()) == starts


def test_two_starts_that_saved_nothing_are_the_last(tmp_path: Path) -> None:
    said = elastic(tmp_path, "137 137 0", "ab a", "4 4 4 4")
    assert said.returncode == 137, said
    assert "two starts in a row have saved nothing after step 4" in said.stdout


def test_several_and_hidden_partitions_are_taken(submit: Submitter) -> None:
    options = {"SBATCH_OPTIONS": "--parsable --test-only"}
    for partition in ("gpu,dgx2", "hidden"):
        taken = submit.script("train.sh", PARTITION=partition, **options)
        assert taken.returncode == 0, taken


@pytest.mark.parametrize(("launcher", "shown"), [("srun", True), ("mpirun", False)])
def test_cores_of_a_rank_are_told_to_srun_and_not_to_the_daemons_of_mpirun(
    submit: Submitter, launcher: str, shown: bool
) -> None:
    job = submit.job("point.sh", "env", NODES="1", CPUS_PER_RANK="2", LAUNCHER=launcher)
    job.ends_with(0)
    lines = job.log.splitlines()
    assert "SLURM_CPUS_PER_TASK=2" in lines, job.log
    assert ("SRUN_CPUS_PER_TASK=2" in lines) == shown, job.log


def test_rank_without_a_number_of_cores_is_not_held_to_one(submit: Submitter) -> None:
    line = ["sbatch", "--parsable", "--mem=0", f"{ROOT}/slurm/point.sh", "env"]
    env = {"CPU_BIND": "none"}
    job = submit.submitted(submit.cluster.run(line, env=env, cwd=submit.folder))
    job.ends_with(0)
    assert "SLURM_PROCID=0" in job.log, job.log
    assert "SRUN_CPUS_PER_TASK=" not in job.log


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_study_hands_its_sizes_to_the_sweep_and_the_sites_options_to_sbatch(
    submit: Submitter, kind: str
) -> None:
    variables = {"RANKS": "2 4", "RANKS_PER_NODE": "2", "TIME": "5", "DRY_RUN": "1"}
    shown = submit.script(f"{kind}_scaling.sh", "--models", "tiny", "--", "--qos=x", **variables)
    assert shown.returncode == 0, shown
    sweep = f"-m scaling.sweep {kind} --by sbatch --ranks 2 4 --ranks_per_node 2 "
    sweep += "--batches 4 " if kind == "strong" else ""  # what 2 and 4 ranks divide
    sweep += "--models tiny -- --gpus-per-node=1 --cpus-per-task=1 --time=5 --qos=x"
    assert sweep in shown.stdout


def points_of(shown: str) -> list[Point]:
    """Those of the sweep that a script has said it would start."""
    line = next(line for line in shown.splitlines() if " -m scaling.sweep " in line)
    words = shlex.split(line.partition(" -m scaling.sweep ")[2])
    words, default = words[: words.index("--")], Options(kind=tyro.MISSING)
    return parse_command_line(Options, words, prog="", description="", default=default).points


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_studies_defaults_and_their_own_example_are_points_of_a_sweep(kind: str) -> None:
    script = ROOT / "slurm" / f"{kind}_scaling.sh"
    example = re.search(r"^#   (RANKS=.*)$", script.read_text(), re.MULTILINE)
    assert example is not None
    for line in (f"slurm/{kind}_scaling.sh", example[1]):
        shown = run_command(["bash", "-c", line], timeout=30, env={"DRY_RUN": "1"})
        assert shown.returncode == 0, shown
        points = points_of(shown.stdout)
        assert len(points) >= 3
        assert points[0].ranks == 16
        if kind == "strong":
            assert len({point.global_batch for point in points}) == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("08:09", 489),
        ("12:00:00", 43200),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("1-0:0:1", 86401),
        ("0", 0),
        ("UNLIMITED", 0),
        ("", 0),
    ],
)
def test_time_is_read_in_every_form_of_sbatch(text: str, seconds: int) -> None:
    said = in_lib(f"seconds_of '{text}'")
    assert said.stdout == f"{seconds}\n", said


def test_job_that_slurm_does_not_answer_ends_with_75_all_the_same(tmp_path: Path) -> None:
    scontrol = '#!/bin/bash\necho "$1" >>"$0.asked"; echo "timed out" >&2; exit 1\n'
    write_tool(tmp_path / "scontrol", scontrol)
    left = "ASK_S=1 SLURM_JOB_ID=7 REQUEUE=1; in_batch() { true; }; leave_job 75"
    said = in_lib(left, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert said.returncode == 75, said
    assert "not requeued: the job is unknown" in said.stdout
    assert (tmp_path / "scontrol.asked").read_text() == "show\nshow\n"


def in_lib(line: str, **variables: str) -> Finished:
    """``line`` of bash where slurm/lib.sh is loaded, as in the scripts."""
    program = f"set -euo pipefail; source {ROOT}/slurm/lib.sh; {line}"
    return run_command(["bash", "-c", program], timeout=30, env=variables)


def test_chain_goes_on_link_by_link_and_later_links_find_nothing_left(submit: Submitter) -> None:
    run = {"run.name": "r", "model.preset": "gpt-micro", "train.micro_batch": 2, "train.steps": 4}
    options = words_of({**OPTIONS, **run})
    script = str(ROOT / "slurm" / "train.sh")
    given = {"NODES": "1", "SBATCH_OPTIONS": "--mem=0"}
    chain = submit.script("chain.sh", "2", script, *options, **given)
    assert chain.returncode == 0, chain
    numbers = [line for line in chain.stdout.splitlines() if line.isdigit()]
    assert len(numbers) == 2
    first, second = (Job(submit.cluster, number, submit.folder) for number in numbers)
    dependency = second.field("Dependency")
    assert f"afterany:{first.number}" in dependency or not dependency
    second.ends_with(0)
    first.ends_with(0)
    assert "done: python -m hpczero.sample" in first.log
    assert "nothing left to do: an earlier start has done all 4 steps" in second.log


def test_point_runs_a_command_on_every_rank_and_ends_with_its_code(submit: Submitter) -> None:
    program = (
        "from mpi4py import MPI; import sys; w = MPI.COMM_WORLD\n"
        # One write a line: with PYTHONUNBUFFERED set the pieces of several ranks would mix.
        "print(f'rank {w.rank} of {w.size}\\n', end=''); sys.exit(3)"
    )
    job = submit.job("point.sh", "python", "-c", program)
    job.ends_with(3)
    assert "rank 0 of 2" in job.log
    assert "rank 1 of 2" in job.log


def test_preflight_names_the_node_without_its_gpus(submit: Submitter) -> None:
    tool = write_tool(
        submit.folder / "bin" / "nvidia-smi",
        '#!/bin/bash\necho "GPU 0: fake"\n[[ "$(hostname)" == host2 ]] || echo "GPU 1: fake"\n',
    )
    (submit.folder / "site.sh").write_text(f'PATH="{tool.parent}:$PATH"\n')
    options = ["--file-mib", "4", "--pair-mib", "4", "--directory", str(submit.folder)]
    site = str(submit.folder / "site.sh")
    job = submit.job("preflight.sh", *options, GPUS_PER_NODE="2", MACHINE=site)
    job.ends_with(1)
    lines = job.log.splitlines()
    counted = [line for line in lines if line.startswith("bad: ") and "GPU(s)" in line]
    assert counted == ["bad: host2: 1 GPU(s), expected 2"], job.log
    # Where other programs have the machine, host1 may be called slow.
    excluded = lines[-1].removeprefix("--exclude=").split(",")
    assert "host2" in excluded, job.log
    report = json.loads((submit.folder / "logs" / f"preflight-{job.number}.json").read_text())
    assert report["exclude"] == excluded
    assert [node["name"] for node in report["nodes"]] == ["host1", "host2"]
    assert set(report["nodes"][0]["pairs"]) == {"host2"}
    assert (submit.folder / "logs" / f"exclude-{job.number}").read_text() == f"{lines[-1]}\n"
    assert not list(submit.folder.glob(".hpczero-preflight-*"))


def test_preflight_names_the_node_that_never_answers(submit: Submitter) -> None:
    python = write_tool(  # which hangs on one node, as on a file system that does
        submit.folder / "python",
        '#!/bin/bash\n[[ "$SLURMD_NODENAME" != host2 ]] || exec sleep 300\n'
        f'exec {ROOT}/.venv/bin/python "$@"\n',
    )
    job = submit.job("preflight.sh", PYTHON=str(python), START_S="10")
    job.ends_with(1)
    assert job.log.splitlines()[-1] == "--exclude=host2", job.log
    assert "bad: host2: no answer within 10 s" in job.log


def test_ranks_that_do_not_see_each_other_are_refused(submit: Submitter) -> None:
    # Without SLURM's name of the step Open MPI starts each rank as a world of its own, and says nothing.
    names = ("SLURM_NODELIST", "SLURM_STEPID", "SLURM_STEP_ID", "SLURM_JOBID")
    hidden = [f"--unset={name}" for name in names]
    step = ["srun", "--mpi=none", "--nodes=2", "--ntasks-per-node=1", "env", *hidden]
    train = f"{ROOT}/.venv/bin/python -m hpczero.train --run.folder {submit.folder}".split()
    alone = submit.cluster.run([*step, *train], check=False)
    assert "MPI sees 1 rank(s), but SLURM_STEP_NUM_TASKS=2" in alone.stderr, alone
    assert "78" in alone.stderr
    assert not (submit.folder / "default").exists()


# --- bind.sh, which needs no SLURM


def bind(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``slurm/bind.sh command...`` with only these variables."""
    env = {"PATH": os.environ["PATH"], **variables}
    line = [os.fspath(ROOT / "slurm" / "bind.sh"), *command]
    return subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=30)


def test_rank_goes_beside_its_gpu_and_mpiruns_local_rank_wins() -> None:
    said = bind(
        "env", SLURM_LOCALID="0", OMPI_COMM_WORLD_LOCAL_RANK="1", NIC_OF_RANK="mlx5_0 mlx5_3"
    )
    assert said.returncode == 0, said
    assert "UCX_NET_DEVICES=mlx5_3:1" in said.stdout.splitlines()


def test_no_gpu_is_hidden_and_the_warning_does_not_end_a_rank_that_starts() -> None:
    program = "import os, signal; print(os.environ['CUDA_VISIBLE_DEVICES'], signal.getsignal(signal.SIGUSR1).name)"
    given = {"SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
    said = bind(sys.executable, "-c", program, **given)
    assert said.stdout == "0,1 SIG_IGN\n", said


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "no launcher says which rank of its node this is"),
        (
            {"SLURM_LOCALID": "2", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
            "has no GPU: the node shows 2 (0,1)",
        ),
        ({"SLURM_LOCALID": "2", "NIC_OF_RANK": "a b"}, "NIC_OF_RANK has 2 words"),
    ],
)
def test_rank_that_cannot_be_placed_is_refused(variables: dict[str, str], message: str) -> None:
    said = bind("true", **variables)
    assert said.returncode == 78
    assert message in said.stderr
