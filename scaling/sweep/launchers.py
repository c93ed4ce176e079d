"""How the points of a sweep are started: here, one after the other, or as jobs of SLURM.

Owns: command lines and what came of them. Must not know: what a point measures, what a study is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpczero.errors import ConfigError, HpcZeroError
from scaling.evidence.record import HOME, LAUNCH, ROOT, SCRIPTS

POINT_SCRIPT = SCRIPTS / "slurm" / "point.sh"
TAIL_LINES = 15


@dataclass(frozen=True)
class Local:
    """This machine, by install/launch.sh (which takes HPCZERO_LAUNCH, if it is set).

    Attributes:
        limit_s: longest time of one job.
    """

    limit_s: float

    def start(self, arguments: Sequence[str], *, ranks: int, nodes: int, threads: int = 0) -> None:
        """Run ``python arguments...`` on ``ranks`` ranks, treated as ``nodes`` equal nodes, to its end.

        Args:
            arguments: of Python.
            ranks: of the job.
            nodes: they are treated as.
            threads: of each rank; 0: install/launch.sh decides.

        Raises:
            HpcZeroError: it failed, or took too long; with the last lines it said.
        """
        environment = {**os.environ, "PYTHONPATH": _python_path()}
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        if nodes > 1:
            environment["HPCZERO_FAKE_NODES"] = f"{nodes}x{ranks // nodes}"
        launch = [str(LAUNCH), str(ranks), sys.executable]
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                [*launch, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(self.limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # whatever outlived the launcher
                process.wait()
            said.seek(0)
            tail = "\n".join(said.read().splitlines()[-TAIL_LINES:])
        if code != 0:
            how = f"took more than {self.limit_s:g} s" if code is None else f"ended with {code}"
            raise HpcZeroError(f"{how}; the last it said was\n{tail or '(nothing)'}")


@dataclass(frozen=True)
class Slurm:
    """SLURM, by ``sbatch slurm/point.sh``.

    Attributes:
        options: of sbatch, beside the sizes: partition, account, time.
        logs: folder of what the jobs say.
        in_turn: each job waits for the one before, so that no two disturb each other.
    """

    options: Sequence[str]
    logs: Path
    in_turn: bool

    def submit(
        self,
        arguments: Sequence[str],
        *,
        nodes: int,
        ranks_per_node: int,
        after: Sequence[str] = (),
        name: str,
    ) -> str:
        """Submit ``python arguments...``; returns the job's number.

        Args:
            arguments: of Python.
            nodes: of the job.
            ranks_per_node: tasks of each.
            after: jobs that must have ended before, however they ended.
            name: of the job.

        Raises:
            ConfigError: there is no sbatch, or no script.
            HpcZeroError: sbatch refused; with what it said.
        """
        sbatch = shutil.which("sbatch")
        if sbatch is None:
            raise ConfigError(
                "--by sbatch: there is no sbatch here; log in to a node that submits jobs, or leave --by out to run "
                "on this machine"
            )
        if not POINT_SCRIPT.is_file():
            raise ConfigError(f"--by sbatch: {POINT_SCRIPT} is missing; check out the whole tree")
        command = [sbatch, "--parsable", f"--job-name={name}"]
        command += [f"--nodes={nodes}", f"--ntasks-per-node={ranks_per_node}"]
        command.append(f"--output={self.logs}/%x-%j.log")
        if after:
            command.append(f"--dependency=afterany:{':'.join(after)}")
        command += [*self.options, str(POINT_SCRIPT), "python", *arguments]
        self.logs.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False)
        number = re.match(r"\d+", done.stdout.strip())
        if done.returncode != 0 or number is None:
            raise HpcZeroError(
                f"sbatch refused ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}; the command was "
                f"{shlex.join(command)}"
            )
        return number.group()

    def queued(self, jobs: Sequence[str], clusters: str = "") -> set[str]:
        """Those of ``jobs`` that wait or run.

        Args:
            jobs: numbers, of this user.
            clusters: where they were sent, if not to the one here.

        Raises:
            HpcZeroError: squeue is missing or does not answer; with what to do.
        """
        if not jobs:
            return set()
        command = ["squeue", "--noheader", "--format=%A", f"--user={os.getuid()}"]
        command += [f"--clusters={clusters}"] if clusters else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            code = done.returncode
            problem = (done.stderr.strip() or f"exit code {code}") if code else ""
        except OSError as error:
            problem = str(error)
        if problem:
            raise HpcZeroError(
                f"squeue cannot say whether jobs {', '.join(jobs)} of this study are still in the queue ({problem}); "
                f"type the same command again later, or, if they are not: rm {self.logs.parent}/points/*.job "
                f"{self.logs.parent}/*.collector"
            )
        return set(jobs) & set(done.stdout.split())


def _python_path() -> str:
    """The tree first, so that the job runs this code from any folder."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def absolute(path: str | Path) -> Path:
    """Relative to where the user is, which is not where a job starts."""
    return Path(path).expanduser().absolute()
