"""Real MPI jobs of our own commands, started from a test that runs in one process."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.forkserver import BASE
from tests.helpers.forkserver import server as forkserver
from tests.helpers.pace import Limit, pace
from tests.helpers.processes import end_family, launch_environment

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Waited:
    """Jobs that the tests of this process have started so far, and seconds they have waited for them."""

    jobs: int = 0
    seconds: float = 0.0


waited = Waited()


@dataclass(frozen=True)
class Finished:
    """How a job ended."""

    args: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def ended(self, code: int = 0) -> Finished:
        """Itself; where it ended with another exit code the test fails with all that it said."""
        __tracebackhide__ = True
        assert self.returncode == code, self
        return self

    @property
    def said(self) -> str:
        """On both streams."""
        return self.stdout + self.stderr

    def __str__(self) -> str:
        return (
            f"{' '.join(self.args)}\nexit code {self.returncode} after {self.seconds:.1f} s\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def run_ranks(
    n: int,
    args: Sequence[str | os.PathLike[str]],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Finished:
    """Run ``python args...`` on ``n`` ranks; at the limit its processes are ended and the test fails with the output.

    Args:
        n: number of ranks; they may outnumber the cores.
        args: what follows ``python``, as in ``["-m", "hpczero.train", "--help"]``.
        timeout: wall limit in seconds.
        env: variables set on top of this process's environment.
        cwd: folder that the job starts in.
    """
    launch = os.fspath(ROOT / "install" / "launch.sh")
    return run_command([launch, str(n), sys.executable, *args], timeout, env, cwd)


def run_alone(
    args: Sequence[str | os.PathLike[str]], timeout: float, env: Mapping[str, str] | None = None
) -> Finished:
    """Run ``python args...`` as the only rank, without a launcher, as users type it; the arguments mean the same."""
    # Open MPI would start a daemon, for processes that this one might start.
    isolated = {"OMPI_MCA_ess_singleton_isolated": "1"}
    return run_command([sys.executable, *args], timeout, {**isolated, **(env or {})})


def run_typed(n: int, args: Sequence[str | os.PathLike[str]], timeout: float) -> Finished:
    """Run ``python args...`` as users do: one rank alone, several by the launcher; the arguments mean the same."""
    return run_alone(args, timeout) if n == 1 else run_ranks(n, args, timeout)


def run_command(
    args: Sequence[str | os.PathLike[str]],
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    fresh: bool = False,
) -> Finished:
    """Run one command under the same care as ``run_ranks``; the arguments mean the same.

    ``fresh`` is what the marker of that name is, for what other tests may call: never from the fork server.
    """
    command = tuple(os.fspath(arg) for arg in args)
    environment = launch_environment(**{**BASE, **(env or {})})
    # Files, not pipes: a rank that outlives its launcher would keep a pipe open and us waiting.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.monotonic()
        process = subprocess.Popen(
            command if fresh else forkserver.forked(command, environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        expired = False
        try:
            expired = not _ended(process, timeout)
        finally:
            end_family(process.pid)
            returncode = process.wait()
        seconds = time.monotonic() - start
        waited.jobs += 1
        waited.seconds += seconds
        out.seek(0)
        err.seek(0)
        finished = Finished(command, returncode, out.read(), err.read(), seconds)
    if expired:
        pytest.fail(f"not done within {timeout} s and ended: {finished}")
    return finished


def _ended(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait until it has, or until it has had ``timeout`` seconds of a machine that does nothing else."""
    limit = Limit(timeout)
    more_s = timeout
    end = os.pidfd_open(process.pid)  # Popen.wait with a limit looks only every 50 ms
    try:
        while more_s:
            if select.select([end], [], [], more_s)[0]:
                return True
            more_s = limit.more_s(pace())
    finally:
        os.close(end)
    return False
