"""The command that checks a GPU, on its twin: the same code, small, on the host."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from hpczero.errors import ConfigError
from hpczero.kernels.codes import BITS
from hpczero.models.config import parameter_count
from scaling.evidence.record import Row
from scaling.gpu import jobs as gpu_jobs
from scaling.gpu.__main__ import Options
from scaling.gpu.bench import DEVICE, TWIN, mps
from scaling.gpu.goals import BEGIN, END, PAGES, goals, report, write_pages
from scaling.gpu.jobs import Job, Running, chosen, launcher, results, seconds_of
from scaling.gpu.nvrtc import find_nvrtc
from scaling.gpu.training import CAPPED_SHARE, idle_rows, plain_model

pytestmark = pytest.mark.usefixtures("forks")

NO_EXPORTS = """
from pathlib import Path
from hpczero.accelerator import host
if launcher_rank() == 1:
    host.FOLDER = Path("/nowhere")
"""


def planted(fault: str) -> list[str]:
    """What comes before a check so that it runs with ``fault`` in its process: statements."""
    first = "import sys, time\nfrom hpczero.errors import launcher_rank, run\n"
    first += "from scaling.gpu import checks as gpu_checks, training as gpu_training\n"
    last = "sys.argv = sys.argv[3:]\nrun(gpu_checks.main)\n"
    return [sys.executable, "-c", f"{first}{fault}\n{last}"]


def job(
    launch: list[str], check: str, limit_s: float, *, twin: bool = True
) -> tuple[list[Row], str]:
    """The rows of one check and what went wrong."""
    running = Running(launch, [(check, time.time() + limit_s)], twin=twin)
    rows = [row for _, row in running.rows()]
    return rows, running.problem


def rows_of(launch: list[str], check: str, limit_s: float) -> list[Row]:
    """The rows of a check that goes well."""
    rows, problem = job(launch, check, limit_s)
    assert not problem
    assert rows
    return rows


@pytest.mark.tool
@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("check", "ranks", "columns"),
    [
        ("contact", 0, {"part", "tried"}),
        ("facts", 1, {"fact", "value"}),
        ("smoke", 2, {"tried"}),
        ("kernels", 1, {"kernel", "of_copy"}),
        ("parity", 2, {"stage", "way", "bits_equal"}),
        ("collectives", 2, {"way", "ms"}),
        ("overlap", 2, {"way", "exposed"}),
        pytest.param(
            *("speed:tiny", 1, {"way", "compiled", "tokens_per_s", "peak_nbytes"}),
            marks=pytest.mark.fresh,  # what gloo and the compiler leave ends with Python, not as a forked process does
        ),
        ("trace:tiny", 1, {"model", "way"}),
        ("train:small", 0, {"model", "run"}),
    ],
)
def test_checks_run_on_the_twin(check: str, ranks: int, columns: set[str]) -> None:
    rows = rows_of(launcher(ranks), check, 250.0)
    assert all(columns <= set(row) for row in rows)
    assert all(row.get(key, True) for row in rows for key in ("bits_equal", "right", "equal"))
    assert not [row for row in rows if row.get("said")]


@pytest.mark.tool
@pytest.mark.limit(120)
def test_ranks_are_started_without_options_that_only_open_mpi_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = tmp_path / "launch"
    strict.write_text('#!/bin/sh\n[ "$1" = -n ] || exit 9\nshift 2\nexec "$@"\n')
    strict.chmod(0o755)
    monkeypatch.setenv("HPCZERO_LAUNCH", f"{strict} -n")
    for ranks in (1, 2):
        assert rows_of(launcher(ranks), "facts", 50.0)
    monkeypatch.delenv("HPCZERO_LAUNCH")
    assert launcher(1) == []


def test_a_launcher_that_is_not_there_is_a_failure_of_the_check() -> None:
    rows, problem = job(["/nowhere/mpirun", "-n", "2"], "facts", 30.0)
    assert not rows
    assert problem.startswith("/nowhere/mpirun cannot be started: No such file")


@pytest.mark.limit(60)
def test_a_check_that_crashes_or_hangs_costs_its_own_figures_only() -> None:
    crash = "import os; os.kill(os.getpid(), 11)"
    rows, problem = job([sys.executable, "-c", crash], "x", 30.0)
    assert not rows
    assert problem.startswith("exit code -11")
    hang = "echo on the way >&2; exec sleep 60"
    rows, problem = job(["sh", "-c", hang], "x", 2.0)
    assert problem == "not done after 2 s\non the way"


@pytest.mark.limit(400)
def test_a_check_that_hangs_says_where() -> None:
    fault = (
        "def hangs(bench):\n    time.sleep(600)\n    yield {}\ngpu_checks.CHECKS['facts'] = hangs"
    )
    for limit_s in (15, 60, 240):  # it has to get there, on a machine that may do other work
        rows, problem = job(planted(fault), "facts", limit_s, twin=True)
        if "in hangs" in problem:
            break
    assert not rows
    assert problem.startswith(f"not done after {limit_s} s")
    assert "in hangs" in problem


def test_collectives_have_half_the_time_of_their_check() -> None:
    asks = "import os, sys; sys.exit(os.environ['HPCZERO_TIMEOUT'])"
    assert job([sys.executable, "-c", asks], "x", 31.0, twin=True)[1].endswith("\n15.5")


def test_a_row_that_is_cut_off_is_left_out_and_counted() -> None:
    writes = """print('{"begins": "x"}\\n{"a": 1}\\n[0] noise\\n{"a": 2, "b')"""
    rows, problem = job([sys.executable, "-c", writes], "x", 30.0, twin=True)
    assert rows == [{"a": 1}]
    assert problem == "done; 1 row(s) cut off and left out"


@pytest.mark.tool
@pytest.mark.limit(180)
@pytest.mark.parametrize(("check", "measured"), [("collectives", 2), ("parity", 10)])
def test_where_peers_memory_does_not_work_the_other_ways_are_measured(
    check: str, measured: int
) -> None:
    rows = rows_of([*launcher(2), *planted(NO_EXPORTS)], check, 150.0)
    others = [row for row in rows if row["way"] in ("staged", "flat")]
    assert len(others) == measured
    assert all(row.get("right") or row.get("bits_equal") for row in others)
    said = [row for row in rows if row["way"] == "ipc"]
    assert len(said) == 1
    assert "rank(s) 1" in said[0]["said"]
    shown = report([{"kind": check, "ranks": 2, **row} for row in rows])
    assert f"{check} by ipc on 2 ranks works: no, missed" in shown


@pytest.mark.tool
@pytest.mark.limit(120)
@pytest.mark.parametrize(("check", "stage", "trains"), [("fits", 3, True), ("fits_not", 0, False)])
def test_under_a_cap_of_memory_stage_3_trains_what_stage_0_cannot_hold(
    check: str, stage: int, trains: bool
) -> None:
    rows = rows_of(launcher(4), check, 100.0)
    assert {(row["stage"], row["trains"]) for row in rows} == {(stage, trains)}
    assert all(("allocate memory" in row["said"]) is not trains for row in rows)


@pytest.mark.limit(90)
@pytest.mark.parametrize("full", [(0,), (1,), (0, 1)])
def test_ranks_that_run_out_of_memory_say_so_and_end_the_others(full: tuple[int, ...]) -> None:
    fault = f"""
import torch
from hpczero.errors import launcher_rank
def full(*given):
    if launcher_rank() in {full}:
        raise torch.OutOfMemoryError("planted")
    time.sleep(600)
gpu_training.train = full
"""
    rows = rows_of([*launcher(2), *planted(fault)], "fits_not", 60.0)
    found = sorted((row["rank"], row["trains"], row["said"]) for row in rows)
    assert found == [(rank, False, "planted") for rank in full]


@pytest.mark.limit(90)
def test_an_error_that_is_not_of_memory_is_no_proof_that_a_model_does_not_fit() -> None:
    fault = """
from hpczero.errors import CommError
def broken(*given):
    raise CommError("planted")
gpu_training.train = broken
"""
    rows, problem = job([*launcher(2), *planted(fault)], "fits_not", 60.0)
    assert not rows
    assert "planted" in problem


def test_what_fits_is_judged_where_both_stages_were_tried() -> None:
    tried: list[Row] = [
        {"kind": "fits", "stage": 3, "trains": True},
        {"kind": "fits_not", "stage": 0, "trains": False},
        {"kind": "fits_not", "stage": 0, "trains": False},
    ]
    what = "does not fit at stage 0, trains at stage 3"
    assert what not in dict(goals(tried[:1]))
    assert dict(goals(tried))[what].endswith(", met")
    one_ran_out: Row = {"kind": "fits", "stage": 3, "trains": False}
    for rows in ([one_ran_out, *tried], [*tried, one_ran_out]):
        assert dict(goals(rows))[what].endswith(", missed")
    tried[0]["trains"] = False
    assert dict(goals(tried))[what].endswith(", missed")


@pytest.mark.limit(120)
def test_a_sum_that_is_wrong_in_one_case_only_is_found() -> None:
    fault = """
right = gpu_checks.tree_sum
def wrong(blocks, out, **given):
    right(blocks, out, **given)
    if blocks[0].data_ptr() % 16:
        out[-1] += 1
gpu_checks.tree_sum = wrong
"""
    rows = rows_of(planted(fault), "kernels", 100.0)
    sums = [row for row in rows if row["kernel"].startswith("sum")]
    lanes = ("default lane", "own lane", "own lane again")
    assert {row["wrong"] for row in sums} == {", ".join(f"unaligned ({lane})" for lane in lanes)}
    assert not any(row["bits_equal"] for row in sums)
    codes = [row for row in rows if row["kernel"].startswith("codes")]
    assert [row["kernel"] for row in codes] == [f"codes {form}" for form in BITS]
    assert all(row["bits_equal"] for row in codes)


@pytest.mark.limit(120)
def test_a_sum_that_does_not_compile_is_reported_although_its_bits_are_right() -> None:
    if find_nvrtc() is None:
        pytest.skip("no CUDA compiler: the package nvidia-cuda-nvrtc-cu12 is not installed")
    fault = """
right = gpu_checks.tree_sum_source
def broken(groups, dtype, *given, **more):
    text = right(groups, dtype, *given, **more)
    return text + "\\n#error planted\\n" if dtype == "bf16" else text
gpu_checks.tree_sum_source = broken
"""
    rows = rows_of(planted(fault), "kernels", 100.0)
    sums = [row for row in rows if row["kernel"].startswith("sum")]
    assert all(row["bits_equal"] for row in sums)
    assert {row["kernel"]: row["compiled"] for row in sums if not row["compiled"]} == dict.fromkeys(
        [f"sum of {count} bfloat16" for count in (2, 4, 8)], False
    )
    assert all("planted" in row["compiler"] for row in sums if not row["compiled"])
    shown = report([{"kind": "kernels", "ranks": 1, **row} for row in rows])
    assert "sums are compiled kernels: no, missed" in shown
    assert "sums have the host's bits: yes, met" in shown


def test_idle_time_is_where_no_kernel_runs_on_any_stream() -> None:
    kernels = [(0.0, 10.0, "a"), (4.0, 6.0, "inside"), (8.0, 12.0, "beside"), (20.0, 24.0, "b")]
    first, gap = idle_rows(kernels, 2)
    assert (first["step_ms"], first["idle_ms"], first["kernels"]) == (0.012, 0.004, 2)
    assert first["idle"] == pytest.approx(8 / 24)
    assert gap == {"gap_us": 8.0, "after": "beside", "before": "b"}
    assert "nothing" in next(idle_rows([], 2))["said"]


@pytest.mark.limit(60)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("check", ["smoke", "trace"])
def test_without_a_gpu_a_check_is_refused_by_name(check: str) -> None:
    rows, problem = job([], check, 50.0, twin=False)
    assert not rows
    assert problem.startswith("exit code 78")
    assert "device: cuda was asked for, and torch sees none" in problem


@pytest.mark.limit(90)
def test_memory_of_another_rank_that_cannot_be_had_is_told_and_the_rest_is_tried() -> None:
    rows = rows_of([*launcher(2), *planted(NO_EXPORTS)], "smoke", 80.0)
    assert "rank(s) 1" in rows[0]["said"]
    assert sum("us" in row for row in rows) == 5
    shown = report([{"kind": "smoke", "ranks": 2, **row} for row in rows])
    assert "works and right: no, missed" in shown


def test_plain_torch_trains_as_many_parameters_as_we_do() -> None:
    config = TWIN.large[0]
    model = plain_model(config, torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) == parameter_count(config)
    assert model.lm_head.weight is model.wte.weight


def test_goals_of_a_run_are_met_or_missed_by_its_rows() -> None:
    speed: Row = {"kind": "speed", "model": "124M", "compiled": False}
    rows: list[Row] = [
        {"kind": "run", "twin": False},
        {"kind": "kernels", "kernel": "sum of 2 bfloat16", "of_copy": 0.9, "bits_equal": True},
        {**speed, "way": "plain torch", "tokens_per_s": 1000.0},
        {
            **speed,
            "way": "hpczero, stage 3",
            "stage": 3,
            "tokens_per_s": 500.0,
            "peak_nbytes": 104,
            "planned_nbytes": 70,
            "activations_nbytes": 30,
        },
        {"kind": "failure", "check": "fits", "ranks": 4, "said": "not done after 60 s\nrank 1"},
    ]
    said = dict(goals(rows))
    assert said["kernels at least 0.85 of the copy's rate"] == "0.9, met"
    assert said["124M, stage 3: tokens/s at least 0.97 of plain torch"] == "0.5, missed"
    assert said["124M, stage 3: peak memory at most 1.05 of plan and activations"] == "1.04, met"
    rows[3]["peak_nbytes"] = 106
    said = dict(goals(rows))
    assert said["124M, stage 3: peak memory at most 1.05 of plan and activations"] == "1.06, missed"
    assert "fits on 4 rank(s): not done after 60 s\n      rank 1" in report(rows)


@pytest.mark.parametrize(
    ("sliced", "verdict"), [(True, "time-sliced: not judged"), (False, "missed")]
)
def test_ranks_that_take_turns_on_a_device_are_not_judged_by_their_overlap(
    sliced: bool, verdict: str
) -> None:
    moved = {"kind": "collectives", "ranks": 2, "nbytes": 2**26, "operation": "all_gather"}
    rows = [
        {**moved, "way": "copy", "operation": "copy", "ms": 1.0},
        {**moved, "way": "staged", "ms": 10.0, "right": True, "time_sliced": sliced},
        {**moved, "way": "ipc", "ms": 2.0, "right": True, "time_sliced": sliced},
        {"kind": "overlap", "way": "one after the other", "exposed": 0.4, "time_sliced": sliced},
    ]
    said = dict(goals(rows))
    where = "all_gather of 64 MiB, 2 ranks"
    assert said[f"{where}: copy / ipc at least 0.8"] == f"0.5, {verdict}"
    assert said[f"{where}: staged / ipc at least 5.0"] == "5, met"
    assert said["exposed communication at most 0.2 of the serial"] == f"0.4, {verdict}"


@pytest.mark.parametrize(
    ("script", "on"),
    [
        ("read asked; echo 4711", True),
        ("read asked; echo Cannot find MPS control daemon process; exit 1", False),
        (None, False),
    ],
)
def test_mps_is_on_where_its_daemon_answers(
    script: str | None, on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    if script is not None:
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text(f"#!/bin/sh\n{script}\n")
        control.chmod(0o755)
    found, why = mps()
    assert found == on
    assert f"CUDA_MPS_PIPE_DIRECTORY is {tmp_path}" in why


@pytest.mark.limit(60)
def test_a_row_is_there_before_the_check_is_over(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    waits = f"""
import pathlib, time
print('{{"begins": "x"}}', flush=True)
print('{{"a": 1}}', flush=True)
while not pathlib.Path({str(seen)!r}).exists():
    time.sleep(0.01)
print('{{"a": 2}}')
"""
    running = Running([sys.executable, "-c", waits], [("x", time.time() + 50)], twin=True)
    rows = []
    for _, row in running.rows():
        rows.append(row)
        seen.touch()
    assert rows == [{"a": 1}, {"a": 2}]
    assert not running.problem


@pytest.mark.limit(200)
@pytest.mark.parametrize("fault", ["os.kill(os.getpid(), 9)", "time.sleep(600)"])
def test_a_check_that_crashes_or_hangs_takes_no_time_of_the_next_in_its_job(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"""
import os
def broken(bench):
    yield {{"fact": "one", "value": 1}}
    {fault}
def sound(bench):
    yield {{"kernel": "whole"}}
gpu_checks.CHECKS.update(facts=broken, kernels=sound)
"""
    monkeypatch.setattr(gpu_jobs, "launcher", lambda ranks: planted(text))
    checks = (("facts", 1.0), ("kernels", 3.0))
    found = list(results([Job(1, checks)], 80.0, twin=True))
    kinds = [kind for kind, _ in found]
    assert kinds == ["facts", "failure", "took", "kernels", "took"]
    assert found[1][1]["check"] == "facts"
    assert found[3][1] == {"ranks": 1, "kernel": "whole"}


def test_a_plan_has_the_time_that_a_lent_device_has() -> None:
    """Both plans, twice the start of a machine and what is copied: a quarter of an hour."""
    assert seconds_of(chosen("first")) <= 325
    assert seconds_of(chosen("second")) <= 325
    assert {name for job in chosen("second", ["speed"]) for name, _ in job.checks} == {"speed:1.5B"}
    assert chosen("first", ["trace"]) == []


def test_four_caps_of_memory_fit_a_card_of_80_gb() -> None:
    cap = CAPPED_SHARE * 16 * parameter_count(DEVICE.capped[0])
    assert 4 * cap < 79e9


@pytest.mark.tool
@pytest.mark.limit(200)
@pytest.mark.parametrize(("check", "ranks"), [("overlap", 2), ("fits", 4)])
def test_no_rank_draws_whole_parameters_of_a_large_model(check: str, ranks: int) -> None:
    """Of 1.5 B they take a core 15 seconds, of which a check has 45."""
    fault = """
from scaling.gpu import bench as gpu_bench
def whole(*given):
    raise AssertionError("planted: a whole parameter is drawn")
gpu_bench.Values.__call__ = whole
"""
    rows = rows_of([*launcher(ranks), *planted(fault)], check, 180.0)
    assert not [row for row in rows if row.get("said")]


def test_results_of_a_device_become_the_tables_of_two_pages(tmp_path: Path) -> None:
    for page in PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text(f"# Before\n\n{BEGIN}\nstale\n{END}\n\nafter\n")
    speed = {
        "kind": "speed",
        "model": "124M",
        "compiled": False,
        "step_ms_ahead": 100.0,
        "tflops": 300.0,
    }
    memory = {
        "stage": 3,
        "peak_nbytes": 3 * 2**30,
        "planned_nbytes": 2**30,
        "activations_nbytes": 2**31,
    }
    first = [
        {"kind": "run", "commit": "abc", "date": "2026-11-27T00:00", "versions": {}, "twin": False},
        {"kind": "facts", "fact": "device", "value": "NVIDIA X"},
        {**speed, "way": "plain torch", "tokens_per_s": 1000.0, "peak_nbytes": 2**30},
        {**speed, "way": "hpczero, stage 3", "tokens_per_s": 980.0, **memory},
        {**speed, "way": "FSDP2", "tokens_per_s": 900.0, "peak_nbytes": 2**30},
        {"kind": "failure", "check": "fits", "ranks": 4, "said": "not done after 9 s\nrank 1"},
    ]
    results = tmp_path / "results"
    results.mkdir()
    (results / "gpu-first.jsonl.unfinished").write_text(
        "".join(json.dumps(row) + "\n" for row in first)
    )
    assert write_pages(results, tmp_path) == [tmp_path / page for page in PAGES]
    status, performance = ((tmp_path / page).read_text() for page in PAGES)
    for text in (status, performance):
        assert text.startswith("# Before\n")
        assert text.endswith(f"{END}\n\nafter\n")
        assert "stale" not in text
        assert "NVIDIA X" in text
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in [*status.splitlines(), *performance.splitlines()]
    ]
    assert ["124M, stage 3: tokens/s at least 0.97 of plain torch", "0.98", "met"] in lines
    assert ["124M, stage 3: tokens/s at least 1.0 of FSDP2", "1.09", "met"] in lines
    assert ["fits on 4 ranks", "not done after 9 s", "failed"] in lines
    figures = ["124M", "hpczero, stage 3", "100.0", "980", "300", "0.98", "3.00", "1.00"]
    assert figures in lines
    (tmp_path / PAGES[0]).write_text("no marks")
    with pytest.raises(ConfigError, match="expected one line <!-- gpu: begin"):
        write_pages(results, tmp_path)
    with pytest.raises(ConfigError, match="no results"):
        write_pages(tmp_path, tmp_path)


def test_unknown_checks_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected some of contact facts kernels"):
        Options(checks=("kernel",))
