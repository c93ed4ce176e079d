"""Jobs from the fork server are what they are without it; those that would not be start anew."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.forkserver import server
from tests.helpers.mpirun import ROOT, Finished, run_command, run_ranks
from tests.helpers.processes import Process, end_family, launch_environment

pytestmark = pytest.mark.tool

FORKED = "import sys; print('forked' if 'tyro' in sys.modules else 'anew')"
LOWERS = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
TELLS = """
import os, signal, sys
print(os.getcwd(), sys.argv, __name__, os.environ.get("OF_THE_JOB"), sorted(os.sched_getaffinity(0)))
print(sys.path[0], [p for p in os.environ["PYTHONPATH"].split(":") if p not in sys.path])
print(oct(os.umask(0)), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGPIPE), os.environ.get("HOME"))
print(sorted({"mpi4py", "h5py", "tests", "pytest"} & set(sys.modules)), file=sys.stderr)
"""


def both(*args: str | Path, **how: object) -> tuple[Finished, Finished]:
    """The same job by the server and without it."""
    found = []
    before = server.off
    try:
        for server.off in (False, True):
            found.append(run_command([sys.executable, *args], 60, **how))  # type: ignore[arg-type]
    finally:
        server.off = before
    return found[0], found[1]


def test_job_has_its_arguments_environment_folder_and_cores(tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    for args in (("-c", TELLS), ("-m", "tells"), (os.fspath(tmp_path / "tells.py"),)):
        forked, anew = both(*args, "a b", "-x", env={"OF_THE_JOB": "é"}, cwd=tmp_path)
        assert forked.returncode == 0, forked
        assert (forked.stdout, forked.stderr) == (anew.stdout, anew.stderr)


@pytest.mark.skipif(server.off, reason="there is no server")
def test_processor_time_of_jobs_that_have_ended_is_the_servers() -> None:
    burn = "import os, time\nwhile time.process_time() < 0.3: pass\n"
    burn += "if os.fork(): os.wait()\nelse:\n while time.process_time() < 0.3: pass"
    run_command([sys.executable, "-c", "pass"], 60)
    before = server.cpu_seconds()
    run_command([sys.executable, "-c", burn], 60).ended()
    assert 0.5 < server.cpu_seconds() - before < 30


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(75)",
        "raise SystemExit('a sentence')",
        "1 / 0",
        "import os; os._exit(9)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit; atexit.register(print, 'at the end'); print('x' * 100000)",
        "class A:\n def __del__(self): print('gone', __name__)\na = A(); a.itself = a",
        "import atexit, torch; atexit.register(lambda: print(torch.ones(2).sum()))",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
        "import ctypes; ctypes.CDLL(None).printf(b'by C, without a line end')",
        "import weakref, torch; t = torch.ones(1); weakref.finalize(t, print, 'finalized')",
        "raise KeyboardInterrupt",
    ],
)
def test_job_ends_as_it_would(program: str) -> None:
    forked, anew = both("-c", program)
    assert forked.returncode == anew.returncode
    assert forked.stdout == anew.stdout
    if "Keyboard" not in program:
        assert forked.stderr == anew.stderr


@pytest.mark.fresh
def test_marked_tests_start_their_jobs_anew() -> None:
    assert run_command([sys.executable, "-c", FORKED], 60).stdout == "anew\n"


def test_what_is_read_at_the_start_of_a_process_makes_it_start_anew() -> None:
    for variable in ("PYTHONHASHSEED", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"):
        done = run_command([sys.executable, "-c", FORKED], 60, env={variable: "2"})
        assert done.stdout == "anew\n", variable
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**36, limits[1]))
    try:
        assert run_command([sys.executable, "-c", FORKED], 60).stdout == "anew\n"
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert run_command(["nice", sys.executable, "-c", FORKED], 60).stdout == "anew\n"
    assert run_command([sys.executable, "-X", "utf8", "-c", FORKED], 60).stdout == "anew\n"


AROUND_AN_OPTIMIZER = f"""
import os, sys, torch
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
from tests.helpers.forkserver import server
from tests.helpers.mpirun import run_command
job = [sys.executable, "-c", {FORKED!r}]
print(run_command(job, 60).stdout, end="")
torch.optim.AdamW([torch.ones(1, requires_grad=True)])
assert "TORCHINDUCTOR_CACHE_DIR" in os.environ, "torch sets it no more: the exception for it may go"
print(run_command(job, 60).stdout, end="")
before = server.anew()
run_command(job, 60, env={{"MALLOC_ARENA_MAX": "2"}})
print(before, server.anew())
"""


@pytest.mark.fresh
def test_an_optimizer_that_a_test_makes_leaves_its_jobs_forked_and_those_that_are_not_are_counted() -> (
    None
):
    done = run_command([sys.executable, "-c", AROUND_AN_OPTIMIZER], 100)
    assert done.stdout == "forked\nforked\n0 1\n", done


WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def waiting(path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A forked job that waits: its shim, and its own id."""
    environment = launch_environment(PYTHONPATH=os.fspath(ROOT), OMP_NUM_THREADS="1")
    command = server.forked((sys.executable, "-c", WAITS, os.fspath(path)), environment)
    assert len(command) > 4
    shim = subprocess.Popen(command, env=environment, start_new_session=True)
    wait_until(lambda: path.exists() and bool(path.read_text()))
    return shim, int(path.read_text())


def test_signals_reach_the_job(tmp_path: Path) -> None:
    shim, pid = waiting(tmp_path / "pid")
    try:
        shim.send_signal(signal.SIGTERM)
        assert shim.wait(30) == 33
    finally:
        end_family(shim.pid)
        shim.wait()
    assert Process.read(pid) is None


def test_job_whose_shim_is_killed_is_killed(tmp_path: Path) -> None:
    shim, pid = waiting(tmp_path / "pid")
    shim.kill()
    shim.wait()
    wait_until(lambda: Process.read(pid) is None)


def test_ranks_of_a_job_are_processes_of_mpi_with_numbers_of_their_own() -> None:
    # One write a line: with PYTHONUNBUFFERED set the pieces of several ranks would mix.
    program = (
        "from mpi4py import MPI; import numpy, os, random; comm = MPI.COMM_WORLD\n"
        "mine = (os.getpid(), random.random(), numpy.random.rand())\n"
        "found = comm.allgather(mine)\n"
        "assert all(len(set(column)) == comm.size for column in zip(*found)), found\n"
        "print(f'{comm.rank} {comm.size}\\n', end='')"
    )
    done = run_ranks(3, ["-c", program], 60).ended()
    assert sorted(done.stdout.split("\n")) == ["", "0 3", "1 3", "2 3"]
    assert run_ranks(2, ["-c", FORKED], 60).stdout.split() == ["forked", "forked"]


def test_rank_that_raises_ends_the_others_by_mpi4py() -> None:
    program = "from mpi4py import MPI; 1 / MPI.COMM_WORLD.rank; MPI.COMM_WORLD.Barrier()"
    done = run_ranks(2, ["-m", "mpi4py", "-c", program], 60)
    assert done.returncode not in (0, None), done
    assert "ZeroDivisionError" in done.stderr, done


def test_what_a_job_starts_with_its_own_interpreter_comes_from_the_server_too() -> None:
    starts = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {FORKED!r}], env=None))"
    forked, anew = both("-c", starts)
    assert (forked.stdout, anew.stdout) == ("forked\n", "anew\n")
    other = starts.replace("env=None", "env={**__import__('os').environ, 'OMP_NUM_THREADS': '7'}")
    limited = starts.replace("sys.exit", f"{LOWERS}; sys.exit")
    for program in (other, limited):
        assert both("-c", program)[0].stdout == "anew\n"


def test_a_program_that_stands_for_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    server.write_python(python)
    told = "import sys; print(sys.executable, sys.argv[1:])"
    assert run_command([python, "-c", FORKED], 60).stdout == "forked\n"
    assert run_command([python, "-c", told, "a b"], 60).stdout == f"{python} ['a b']\n"
    assert run_command([python, "-S", "-c", FORKED], 60).stdout == "anew\n"


WHERE = """
import json, os, sys
print(json.dumps([
    "tyro" in sys.modules, os.getpid(), os.path.realpath("/proc/self").rpartition("/")[2],
    {name: os.readlink(f"/proc/self/ns/{name}") for name in os.listdir("/proc/self/ns")},
]))
"""


def unshared(*flags: str, code: str = "0") -> tuple[int, list[Any]]:
    """The exit code of a job in namespaces of its own, and what it says of itself."""
    program = f"{WHERE}import signal; sys.stdout.flush(); {code}"
    inside = "import subprocess, sys; sys.exit(abs(subprocess.run("  # of a signal its number
    inside += f"['unshare', *{flags!r}, sys.executable, '-c', {program!r}]).returncode))"
    if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody make such namespaces")
    done = run_command([sys.executable, "-c", inside], timeout=60)
    assert done.stdout, done
    return done.returncode, json.loads(done.stdout)


@pytest.mark.skipif(server.off, reason="there is no server")
def test_job_is_in_the_namespaces_of_its_shim() -> None:
    kinds = ("net", "uts", "ipc", "mnt", "pid")
    flags = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc")
    code, (forked, pid, own, found) = unshared(*flags)
    assert (code, forked) == (0, True)
    assert pid == int(own) < 10
    others = {kind for kind, link in found.items() if link != os.readlink(f"/proc/self/ns/{kind}")}
    assert others == {*kinds, "pid_for_children"}


@pytest.mark.skipif(server.off, reason="there is no server")
@pytest.mark.parametrize("code", ["sys.exit(9)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_job_among_other_numbers_of_processes_ends_as_it_would(code: str) -> None:
    for flags in (("--net",), ("--net", "--pid", "--fork", "--mount-proc")):
        ended, (forked, *_) = unshared(*flags, code=code)
        assert forked
        assert ended in ((9,) if "exit" in code else (9, 137)), flags


def test_job_in_a_namespace_that_none_can_go_into_starts_anew() -> None:
    code, (forked, *_) = unshared("--user", "--map-root-user")
    assert (code, forked) == (0, False)


def test_job_of_another_checkout_has_its_own_package(tmp_path: Path) -> None:
    (tmp_path / "hpczero").mkdir()
    (tmp_path / "hpczero" / "__init__.py").write_text("__version__ = 'another'\n")
    (tmp_path / "tells.py").write_text("import hpczero; print(hpczero.__version__)\n")
    tells = (tmp_path / "tells.py").read_text()
    for args, how in (
        (("-c", tells), {"env": {"PYTHONPATH": os.fspath(tmp_path)}, "cwd": Path("/")}),
        (("-c", tells), {"cwd": tmp_path}),
        (("-m", "tells"), {"cwd": tmp_path}),
        ((tmp_path / "tells.py",), {}),
    ):
        assert {done.stdout for done in both(*args, **how)} == {"another\n"}, args


def test_a_command_of_ours_runs_once_and_without_a_word() -> None:
    for name in ("train", "plan.auto", "plan"):
        forked, anew = both("-W", "error", "-m", f"hpczero.{name}", "--help")
        assert (forked.returncode, forked.stdout) == (0, anew.stdout), forked
        forked = both("-m", f"hpczero.{name}", "--help")[0]
        assert (forked.returncode, forked.stdout, forked.stderr) == (0, anew.stdout, "")


def test_streams_without_buffers_and_stacks_of_crashes_are_as_told() -> None:
    program = """
import faulthandler, os, sys
print(faulthandler.is_enabled(), sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdout.newlines)
print(sys.stdout.name, sys.stderr.name, sys.stdout is sys.__stdout__)
sys.stdout.write("é, no line")
sys.stderr.write("nor here")
os._exit(3)
"""
    told = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    forked, anew = both("-c", program, env=told)
    assert (forked.returncode, forked.stdout, forked.stderr) == (3, anew.stdout, anew.stderr)
    assert forked.stdout.endswith("no line")
    assert run_command([sys.executable, "-c", FORKED], 60, env=told).stdout == "forked\n"
