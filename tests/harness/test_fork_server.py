"""Jobs from the fork server are what they are without it; those that would not be start anew."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.forkserver import server
from tests.helpers.mpirun import ROOT, Finished, run_command, run_ranks
from tests.helpers.processes import Process, end_family, launch_environment

FORKED = "import sys; print('forked' if 'tyro' in sys.modules else 'anew')"
LOWERS = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
TELLS = """
import os, signal, sys
print(os.getcwd(), sys.argv, __name__, os.environ.get("OF_THE_JOB"), sorted(os.sched_getaffinity(0)))
print(sys.path[0], [p for p in os.environ["PYTHONPATH"].split(":") if p not in sys.path])
print(oct(os.umask(0)), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGPIPE), os.environ.get("HOME"))
print(sorted({"hpczero", "mpi4py", "h5py", "tests", "pytest"} & set(sys.modules)), file=sys.stderr)
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


def test_it_is_the_server_that_runs_plain_jobs() -> None:
    forked, anew = both("-c", FORKED)
    assert (forked.stdout, anew.stdout) == ("forked\n", "anew\n")


@pytest.mark.skipif(server.off, reason="there is no server")
def test_processor_time_of_jobs_that_have_ended_is_the_servers() -> None:
    burn = "import os, time\nwhile time.process_time() < 0.3: pass\n"
    burn += "if os.fork(): os.wait()\nelse:\n while time.process_time() < 0.3: pass"
    run_command([sys.executable, "-c", "pass"], 60)
    before = server.cpu_seconds()
    done = run_command([sys.executable, "-c", burn], 60)
    assert done.returncode == 0, done
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


WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(33))
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


def waiting(path: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A forked job that waits: its shim, and its own id."""
    environment = launch_environment(PYTHONPATH=os.fspath(ROOT), OMP_NUM_THREADS="1")
    command = server.forked((sys.executable, "-c", WAITS, os.fspath(path)), environment)
    assert len(command) > 4
    shim = subprocess.Popen(command, env=environment, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
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
    deadline = time.monotonic() + 30
    while Process.read(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_of_a_job_are_processes_of_mpi_with_numbers_of_their_own() -> None:
    # One write a line: with PYTHONUNBUFFERED set the pieces of several ranks would mix.
    program = (
        "from mpi4py import MPI; import numpy, os, random; comm = MPI.COMM_WORLD\n"
        "mine = (os.getpid(), random.random(), numpy.random.rand())\n"
        "found = comm.allgather(mine)\n"
        "assert all(len(set(column)) == comm.size for column in zip(*found)), found\n"
        "print(f'{comm.rank} {comm.size}\\n', end='')"
    )
    done = run_ranks(3, ["-c", program], 60)
    assert done.returncode == 0, done
    assert sorted(done.stdout.split("\n")) == ["", "0 3", "1 3", "2 3"]


def test_what_a_job_starts_with_its_own_interpreter_comes_from_the_server_too() -> None:
    starts = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {FORKED!r}], env=None))"
    forked, anew = both("-c", starts)
    assert (forked.stdout, anew.stdout) == ("forked\n", "anew\n")
    other = starts.replace("env=None", "env={**__import__('os').environ, 'OMP_NUM_THREADS': '7'}")
    limited = starts.replace("sys.exit", f"{LOWERS}; sys.exit")
    for program in (other, limited):
        assert both("-c", program)[0].stdout == "anew\n"


def test_ranks_come_from_the_server_whatever_their_launcher_adds() -> None:
    assert sorted(run_ranks(2, ["-c", FORKED], 60).stdout.split()) == ["forked", "forked"]


def test_a_program_that_stands_for_python(tmp_path: Path) -> None:
    python = tmp_path / "python"
    server.write_python(python)
    told = "import sys; print(sys.executable, sys.argv[1:])"
    assert run_command([python, "-c", FORKED], 60).stdout == "forked\n"
    assert run_command([python, "-c", told, "a b"], 60).stdout == f"{python} ['a b']\n"
    assert run_command([python, "-S", "-c", FORKED], 60).stdout == "anew\n"


def test_job_in_another_network_starts_anew() -> None:
    """A process that the server forked would be in the server's network."""
    program = "import os; print(os.readlink('/proc/self/ns/net'))"
    inside = f"import subprocess, sys; subprocess.run(['unshare', '-n', sys.executable, '-c', {program!r}], check=True)"
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody make a network of its own")
    done = run_command([sys.executable, "-c", inside], timeout=60)
    assert done.returncode == 0, done
    assert done.stdout.strip() != os.readlink("/proc/self/ns/net"), done
