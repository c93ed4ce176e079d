"""The harness itself: what fails on one rank fails, what hangs ends, and nothing passes by not running.

Each scenario is a small test file of its own, run by the real ``tests/run.py`` in real MPI jobs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import mpirun
from tests.helpers.mpirun import ROOT, Finished, run_alone, run_command, run_ranks
from tests.helpers.pace import REFERENCE_S, SLOWEST, Limit, pace
from tests.helpers.processes import Process, end_family, launch_environment, write_tool
from tests.helpers.session_folder import kept_session_folder

PLUGIN = ["-p", "tests.conftest", "-c", "setup.cfg"]


def write_tests(folder: Path, body: str) -> Path:
    path = folder / "test_scenario.py"
    path.write_text("import pytest\n" + textwrap.dedent(body))
    return path


def run_all(path: Path, ranks: str, *options: str) -> Finished:
    """``tests/run.py`` on one throw-away file."""
    command: list[str | Path] = [sys.executable, "tests/run.py", path, *PLUGIN]
    command.append(f"--rootdir={path.parent}")
    return run_command([*command, *options], timeout=90, env={"HPCZERO_TEST_RANKS": ranks})


def summary(finished: Finished, code: int = 1) -> str:
    """The last line of a run that ended with ``code``."""
    return finished.ended(code).stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def trouble(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One run with every kind of trouble in it, on 2 ranks."""
    body = """
        import os

        @pytest.mark.mpi
        def test_good(comm):
            assert comm.allreduce(1) == 2

        @pytest.mark.mpi
        def test_bad_on_one(comm):
            assert comm.rank != 1, "only rank one knows"

        @pytest.mark.mpi
        @pytest.mark.limit(2)
        def test_deadlock(comm):
            if comm.rank == 1:
                raise RuntimeError("left before the barrier")
            comm.Barrier()

        @pytest.mark.mpi
        def test_dies(comm):
            if comm.rank == 1:
                os._exit(7)
            comm.Barrier()

        @pytest.mark.mpi
        def test_after_the_deadlock(comm):
            comm.Barrier()

        @pytest.mark.mpi
        def test_skips_on_one(comm):
            if comm.rank == 1:
                pytest.skip("not here")

        @pytest.mark.mpi
        def test_skips(comm):
            pytest.skip("a good reason")

        @pytest.mark.mpi
        @pytest.mark.ranks(2)
        def test_two(comm):
            assert comm.size == 2

        @pytest.mark.mpi
        @pytest.mark.ranks(3)
        def test_three(comm):
            assert comm.size == 3

        @pytest.mark.mpi(min_size=3)
        def test_many(comm):
            assert comm.size >= 3
    """
    path = write_tests(tmp_path_factory.mktemp("trouble"), body)
    return run_all(path, "2")


@pytest.mark.worth("the harness: what fails on one rank, hangs or dies has failed")
def test_run_with_failures_ends_with_the_sum_and_a_bad_code(trouble: Finished) -> None:
    # passed: good, after_the_deadlock, two; failed: bad_on_one, deadlock, dies, skips_on_one;
    # skipped: skips, and three and many, which no phase had ranks for
    assert summary(trouble) == "3 passed, 4 failed, 3 skipped"


FAILED, SKIPPED = "FAILED test_scenario.py::", "SKIPPED test_scenario.py::"


@pytest.mark.parametrize(
    "said",
    [
        f"{FAILED}test_bad_on_one [2 ranks]: failed in call on 1 of 2 ranks, [1]: AssertionError: only",
        '>       assert comm.rank != 1, "only rank one knows"',
        f"{FAILED}test_deadlock [2 ranks]: took the job down, exit code 86",
        f"{FAILED}test_dies [2 ranks]: took the job down, exit code 7",
        "skipped in call on 1 of 2 ranks, [1]: not here",
        f"{SKIPPED}test_skips [2 ranks]: a good reason",
        f"{SKIPPED}test_three: needs another number of ranks",
        f"{SKIPPED}test_many: needs another number of ranks",
    ],
)
def test_each_trouble_is_told_with_its_test_its_ranks_and_its_reason(
    trouble: Finished, said: str
) -> None:
    assert said in trouble.stdout, trouble


def test_deadlock_shows_the_stacks_of_all_ranks(trouble: Finished) -> None:
    assert "test_scenario.py::test_deadlock hangs, limit 2 s" in trouble.stderr, trouble
    assert re.search(r"\[rank 0\].*test_scenario\.py.* in test_deadlock", trouble.stderr), trouble
    assert re.search(r"\[rank 1\] E +RuntimeError: left before", trouble.stderr), trouble


@pytest.mark.tool
def test_hang_in_one_process_ends_with_its_jobs_and_the_rest_still_runs(tmp_path: Path) -> None:
    body = f"""
        import subprocess, sys

        @pytest.mark.limit(1)
        def test_waits():
            job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open({str(tmp_path / "pid")!r}, "w").write(str(job.pid))
            job.wait()

        def test_after():
            assert 1 + 1 == 2
    """
    finished = run_all(write_tests(tmp_path, body), "0")
    assert summary(finished) == "1 passed, 1 failed, 0 skipped"
    # the second lane's errors are in its output, which is shown when it has ended
    assert " in test_waits" in finished.stdout + finished.stderr, finished
    assert Process.read(int((tmp_path / "pid").read_text())) is None, "the test's own job lives on"


@pytest.mark.tool
def test_lanes_run_each_test_once_side_by_side_and_what_is_alone_after_them(tmp_path: Path) -> None:
    body = f"""
        import os, time
        from pathlib import Path

        FOLDER = Path({str(tmp_path)!r})

        @pytest.fixture(scope="module", autouse=True)
        def of_file():
            (FOLDER / "{{0}}.begun").touch()
            yield
            (FOLDER / "{{0}}.ended").touch()

        def test_meets_the_other():
            (FOLDER / "{{0}}.here").touch()
            deadline = time.monotonic() + 30
            while len(list(FOLDER.glob("*.here"))) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(list(FOLDER.glob("*.here"))) >= 2

        @pytest.mark.alone
        def test_alone():
            assert len(list(FOLDER.glob("*.ended"))) == 3
            assert not (FOLDER / "in").exists()
            (FOLDER / "in").touch()
            time.sleep(0.2)
            (FOLDER / "in").unlink()

        def test_once():
            (FOLDER / "{{0}}.once").touch(exist_ok=False)
            if "{{0}}" == "b":
                os._exit(7)
    """
    for name in "abc":
        path = tmp_path / f"test_{name}.py"
        path.write_text("import pytest\n" + textwrap.dedent(body).replace("{0}", name))
    (tmp_path / "b.ended").touch()  # its process ends inside
    finished = run_all(tmp_path, "0")
    assert finished.stdout.splitlines()[-1] == "8 passed, 1 failed, 0 skipped", finished
    assert "test_b.py::test_once [one process]: took the job down, exit code 7" in finished.stdout


@pytest.mark.tool
@pytest.mark.parametrize(
    ("body", "failed"),
    [("", 0), ("def test_serial():\n    pass\n", 0), ("import absent_module\n", 1)],
    ids=["empty", "deselected", "cannot be collected"],
)
def test_no_test_run_is_not_a_success(tmp_path: Path, body: str, failed: int) -> None:
    finished = run_all(write_tests(tmp_path, body), "0", "-k", "absent")
    assert summary(finished) == f"0 passed, {failed} failed, 0 skipped"


@pytest.mark.tool
def test_ranks_that_collect_other_tests_end_at_once(tmp_path: Path) -> None:
    body = """
        from mpi4py import MPI

        @pytest.mark.mpi
        @pytest.mark.parametrize("case", range(1 + MPI.COMM_WORLD.rank))
        def test_case(comm, case):
            comm.Barrier()
    """
    path = write_tests(tmp_path, body)
    args: list[str | Path] = ["-m", "pytest", "--with-mpi", path, f"--rootdir={tmp_path}", *PLUGIN]
    finished = run_ranks(2, args, timeout=60)
    assert finished.returncode != 0, finished
    assert "ranks [1] collected other tests than rank 0: ['test_scenario.py::test_case[1]']" in (
        finished.stdout
    ), finished


@pytest.mark.tool
def test_run_ranks_ends_a_job_at_its_limit_and_shows_the_output(tmp_path: Path) -> None:
    code = """
        import os, pathlib, sys, time
        pathlib.Path(sys.argv[1], str(os.getpid())).touch()
        print("still waiting", flush=True)
        time.sleep(60)
    """
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="not done within 2 s") as raised:
        run_ranks(2, ["-c", textwrap.dedent(code), tmp_path], timeout=2)
    assert time.monotonic() - start < 45
    assert "still waiting" in str(raised.value)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert [Process.read(pid) for pid in pids] == [None, None]


def test_terminating_the_run_ends_its_jobs(tmp_path: Path) -> None:
    body = f"""
        import os, time

        @pytest.mark.mpi
        def test_waits(comm):
            open({str(tmp_path)!r} + f"/{{os.getpid()}}.pid", "w").close()
            time.sleep(60)
    """
    command = [sys.executable, "tests/run.py", *PLUGIN, f"--rootdir={tmp_path}"]
    path = write_tests(tmp_path, body)
    run = subprocess.Popen(
        [*command, path],
        cwd=ROOT,
        env=launch_environment(HPCZERO_TEST_RANKS="2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while len(pids := [int(found.stem) for found in tmp_path.glob("*.pid")]) < 2:
            assert time.monotonic() < deadline, "the ranks never started"
            time.sleep(0.05)
        run.terminate()
        assert run.wait(30) == 128 + signal.SIGTERM
    finally:
        end_family(run.pid)
    assert [Process.read(pid) for pid in pids] == [None, None]


@pytest.mark.tool
def test_parallel_assert_fails_on_every_rank_and_names_the_wrong_ones() -> None:
    code = """
        from mpi4py import MPI
        from tests.helpers.parallel import parallel_assert

        comm = MPI.COMM_WORLD
        parallel_assert(comm, True)
        try:
            parallel_assert(comm, comm.rank != 1, f"saw {comm.rank}")
        except AssertionError as error:
            assert "false on 1 of 3 ranks" in str(error), error
            assert "rank 1: saw 1" in str(error), error
            print("failed together\\n", end="", flush=True)
    """
    finished = run_ranks(3, ["-c", textwrap.dedent(code)], timeout=60).ended()
    assert finished.stdout.count("failed together") == 3, finished


@pytest.mark.tool
def test_launcher_refuses_a_bad_number_of_ranks_with_the_line_to_type() -> None:
    launch = ROOT / "install" / "launch.sh"
    finished = run_command([launch, "two", "hostname"], timeout=20).ended(78)
    assert "type: install/launch.sh 2 hostname" in finished.stderr


@pytest.mark.tool
def test_what_is_found_when_all_tests_have_passed_is_told_and_ends_nothing(tmp_path: Path) -> None:
    body = """
        class Cycle:
            pass

        @pytest.mark.mpi
        def test_leaves_a_file_open(comm):
            if comm.rank == 1:
                cycle = Cycle()
                cycle.itself, cycle.file = cycle, open(__file__)
    """
    finished = run_all(write_tests(tmp_path, body), "2").ended()
    assert "unclosed file" in finished.stderr, finished


# --- which mpirun install/launch.sh takes: that of the interpreter before that of the checkout


def says(path: Path, what: str) -> Path:
    """A program in place of a launcher or an interpreter."""
    return write_tool(path, f'#!/bin/sh\n[ "$1" = --version ] || echo {what} "$@"\n')


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout that was set up with an mpirun of its own, and another in PATH."""
    monkeypatch.delenv("HPCZERO_LAUNCH", raising=False)
    checkout = tmp_path / "checkout"
    script = write_tool(
        checkout / "install" / "launch.sh", (ROOT / "install" / "launch.sh").read_text()
    )
    chosen = says(tmp_path / "site" / "mpirun", "of the checkout")
    write_tool(checkout / ".venv" / "hpczero-mpirun", f"{chosen}\n")
    path = says(tmp_path / "path" / "mpirun", "of PATH").parent
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    return script


def launched(launch: Path, command: str) -> str:
    return run_command([launch, "2", command, "-c", "1"], timeout=20).ended().stdout.strip()


def test_the_mpirun_beside_the_interpreter_wins(launch: Path, tmp_path: Path) -> None:
    python = says(tmp_path / "other" / "bin" / "python", "never run")
    assert launched(launch, str(python)) == f"of the checkout -n 2 {python} -c 1"
    says(python.parent / "mpirun", "of the interpreter")
    assert launched(launch, str(python)) == f"of the interpreter -n 2 {python} -c 1"
    assert launched(launch, "python") == "of the checkout -n 2 python -c 1"


def test_without_either_it_is_that_of_the_path(launch: Path, tmp_path: Path) -> None:
    (tmp_path / "checkout" / ".venv" / "hpczero-mpirun").unlink()
    assert launched(launch, "hostname") == "of PATH -n 2 hostname -c 1"


# --- limits stretch with the pace of the machine, and only so far


SLEEPS = [sys.executable, "-c", "import time; time.sleep(2)"]


@pytest.mark.parametrize(("took_s", "found"), [(0.2, 1.0), (1.0, 1.0), (2.5, 2.5), (99.0, SLOWEST)])
def test_pace_is_how_many_times_as_long_a_piece_of_work_takes(took_s: float, found: float) -> None:
    times = iter((100.0, 100.0 + took_s * REFERENCE_S))
    assert pace(lambda: next(times)) == pytest.approx(found)


def test_a_limit_is_stretched_once_for_each_pace_that_is_found() -> None:
    limit = Limit(10.0)
    assert limit.more_s(1.05) == 0.0, "a twentieth is no reason to look again"
    assert limit.more_s(3.0) == pytest.approx(20.0)
    assert limit.more_s(3.0) == 0.0, "it has had them"
    assert limit.more_s(4.0) == pytest.approx(10.0)


@pytest.mark.tool
def test_a_job_on_a_slow_machine_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpirun, "pace", lambda: 1.0)
    with pytest.raises(pytest.fail.Exception, match="not done within 1 s"):
        run_command(SLEEPS, 1)
    monkeypatch.setattr(mpirun, "pace", lambda: SLOWEST)
    assert run_command(SLEEPS, 1).returncode == 0


# --- Open MPI's folder of jobs stays while tests run: jobs side by side take it from one another


LISTS = "import os; from mpi4py import MPI; print(*os.listdir(os.environ['TMPDIR']))"


@pytest.mark.tool
@pytest.mark.fresh
def test_no_job_removes_the_folder_and_it_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with kept_session_folder() as folder:
        marks = sorted(folder.rglob("*"))
        for run in (partial(run_ranks, 1), run_alone):
            done = run(["-c", LISTS], 30).ended()
            assert done.stdout.split() == [folder.name], "a job has its folder here"
            assert sorted(folder.rglob("*")) == marks
    assert not list(tmp_path.iterdir())
