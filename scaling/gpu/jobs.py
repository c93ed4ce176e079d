"""Jobs of checks: which plans there are, how ranks are started, read while they run, and ended.

Each check has a share of the time in seconds. The deadline of a check is the end of its share, counted from the start
of the plan: what one check leaves is there for the next, and no check takes the share of a later one. Checks of as many
ranks are one job where that is sound, because a start costs 10 seconds. If a check crashes or hangs, the checks after
it get a job of their own. Rows are yielded as soon as rank 0 has printed them. Ranks share one device where there is no
other: MPI and CUDA IPC allow it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from scaling.evidence.record import LAUNCH, LEFT, ROOT, Row

GRACE_S = 5.0
LOOK_S = 0.05  # between looks at what has been printed
TAIL_LINES, TAIL_CHARACTERS = 60, 6000
TWIN_SLOWNESS = 4.0  # shares of time are those of a device
BEGINS = "begins"  # names the check that all rows after this one belong to

# What a launcher that we ourselves were started by tells its ranks; a job of ours would take it for its own.
OF_OUR_LAUNCHER = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_", "HYDI_")


@dataclass(frozen=True)
class Job:
    """Checks that the same processes do one after the other.

    Attributes:
        ranks: 0 is one process without MPI.
        checks: name and share of the time in seconds. What follows a colon is given to the check.
        openmpi: by the Open MPI that the command was given; left out where it was given none.
    """

    ranks: int
    checks: tuple[tuple[str, float], ...]
    openmpi: bool = False


PLANS: dict[str, tuple[Job, ...]] = {
    # Does it work? In the order of what is worth most if the time runs out.
    "first": (
        Job(0, (("contact", 35),)),
        Job(1, (("facts", 25), ("kernels", 25), ("parity", 15))),
        Job(2, (("smoke", 20), ("parity", 40))),
        Job(0, (("train:small", 60),)),
        Job(1, (("speed:124M", 60),)),
        Job(4, (("parity", 45),)),
    ),
    # How fast, and how large?
    "second": (
        Job(1, (("speed:1.5B", 75),)),
        Job(2, (("collectives", 30), ("overlap", 45))),
        Job(0, (("train:124M", 50),)),
        Job(2, (("facts", 25), ("collectives", 25)), openmpi=True),
        Job(4, (("fits", 25),)),
        Job(4, (("fits_not", 20),)),
        Job(1, (("trace:124M", 25), ("trace:1.5B", 25))),
        Job(4, (("collectives", 20),)),
    ),
}


def chosen(plan: str, checks: Sequence[str] = (), *, openmpi: bool = False) -> list[Job]:
    """The jobs of one plan, or of both for ``all``.

    Args:
        plan: by name.
        checks: only these, by name or by the part of it before the colon; none: all.
        openmpi: whether there is an Open MPI for the jobs that want it.
    """
    found = []
    for name, jobs in PLANS.items():
        for job in jobs if plan in ("all", name) else ():
            taken = tuple(
                (check, share)
                for check, share in job.checks
                if not checks or {check, kind_of(check)} & set(checks)
            )
            if taken and (openmpi or not job.openmpi):
                found.append(replace(job, checks=taken))
    return found


def known_checks() -> list[str]:
    """The names of all checks."""
    jobs = [job for plan in PLANS.values() for job in plan]
    return list(dict.fromkeys(name for job in jobs for name, _ in job.checks))


def kind_of(check: str) -> str:
    """What the rows of a check are called."""
    return check.partition(":")[0]


def seconds_of(jobs: Sequence[Job]) -> float:
    """All shares together."""
    return sum(share for job in jobs for _, share in job.checks)


def results(
    jobs: Sequence[Job], limit_s: float, *, twin: bool, openmpi: Path | None = None
) -> Iterator[tuple[str, Row]]:
    """Kind and content of each row, as they come; what went wrong is a row of kind ``failure``.

    Args:
        jobs: one after the other.
        limit_s: seconds for all of them.
        twin: on the host, with small sizes.
        openmpi: folder of an installed Open MPI, if there are jobs that want it.
    """
    end, scale = time.time(), limit_s / seconds_of(jobs)
    told: dict[bool, dict[str, str]] = {True: {}, False: {}}  # what a check found, for the next
    for job in jobs:
        left: list[tuple[str, float]] = []
        for name, share in job.checks:
            end += share * scale
            left.append((name, end))
        settings = told[job.openmpi]
        mpi = openmpi_environment(openmpi) if openmpi and job.openmpi else {}
        while left:
            running = Running(launcher(job.ranks), left, twin=twin, settings={**mpi, **settings})
            for name, row in running.rows():
                if "gpu_aware" in row:  # tried once, for all jobs: it takes seconds
                    settings["HPCZERO_GPU_AWARE"] = str(int(row.pop("gpu_aware")))
                yield kind_of(name), {"ranks": job.ranks, **row, **_mark(job)}
            if running.problem:
                failed = left[max(running.over - 1, 0)][0] if running.begun else left[0][0]
                said = {"check": failed, "ranks": job.ranks, "said": running.problem}
                yield "failure", {**said, **_mark(job)}
            for name, _ in left[: running.over]:
                yield "took", {"check": name, "ranks": job.ranks, "s": running.took_s.get(name)}
            left = left[running.over :]


def _mark(job: Job) -> Row:
    return {"mpi": "openmpi"} if job.openmpi else {}


class Running:
    """One job while it runs.

    Attributes:
        over: how many of the checks are done, or have failed and are not to be tried again.
        begun: whether its ranks came as far as the first check.
        problem: what went wrong, with the last lines of stderr; nothing if all is well.
        took_s: of each check that has begun.
    """

    def __init__(
        self,
        launch: list[str],
        checks: Sequence[tuple[str, float]],
        *,
        twin: bool,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            launch: what starts the ranks.
            checks: name and deadline of each, in seconds since the epoch.
            twin: see ``results``.
            settings: variables of its environment.
        """
        self.over, self.begun, self.problem = 0, False, ""
        self.took_s: dict[str, float] = {}
        self._at = 0.0
        self._checks, self._cut_off, self._left = checks, 0, False
        given = json.dumps({"twin": twin, "checks": checks})
        self._command = [*launch, sys.executable, "-m", "scaling.gpu.checks", given]
        longest = max(end for _, end in checks) - time.time()
        self._environment = {**environment(longest), **(settings or {})}

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Name of the check and each row. At the end ``over`` and ``problem`` are right."""
        # Files, not pipes: a rank that outlives its launcher would keep a pipe open and us waiting.
        with (
            tempfile.NamedTemporaryFile("w", suffix=".out") as out,
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as err,
            Path(out.name).open(encoding="utf-8", errors="replace") as printed,
        ):
            try:
                process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                self.problem = f"{self._command[0]} cannot be started: {error.strerror}"
                self.over = len(self._checks)
                return
            start, rest = time.time(), [""]
            try:
                while process.poll() is None and time.time() < self._deadline():
                    time.sleep(LOOK_S)
                    yield from self._read(printed, rest)
            finally:
                code = process.poll()
                end(process)
            yield from self._read(printed, rest)
            self._conclude(code, time.time() - start, rest[0])
            if self.problem:
                err.seek(0)
                self.problem = "\n".join([self.problem, *_tail(err.read())])

    def _deadline(self) -> float:
        return self._checks[max(self.over - 1, 0)][1]

    def _read(self, printed: IO[str], rest: list[str]) -> Iterator[tuple[str, Row]]:
        """What is new in whole lines; the part of a line is kept in ``rest``."""
        *lines, rest[0] = (rest[0] + printed.read()).split("\n")
        for line in lines:
            if not line.startswith("{"):
                continue
            try:
                row = json.loads(line)
            except ValueError:
                self._cut_off += 1
                continue
            if BEGINS in row:
                self._take_time()
                self.over, self.begun = self.over + 1, True
            elif row == LEFT:  # all was said, and the launcher may not like how it ended
                self._left = True
            else:
                yield self._checks[max(self.over - 1, 0)][0], row

    def _take_time(self) -> None:
        """The check that runs ends here."""
        now = time.time()
        if self.begun:
            self.took_s[self._checks[self.over - 1][0]] = round(now - self._at, 1)
        self._at = now

    def _conclude(self, code: int | None, took_s: float, rest: str) -> None:
        self._take_time()
        if code is None:
            self.problem = f"not done after {took_s:.0f} s"
        elif code and not self._left:
            self.problem = f"exit code {code}"
        elif not self._left and self.over < len(self._checks):
            self.problem = f"ended before {self._checks[self.over][0]}"
        self._cut_off += rest.startswith("{")
        if self._cut_off:
            self.problem = f"{self.problem or 'done'}; {self._cut_off} row(s) cut off and left out"
        if not self.begun:  # nor would it begin with the other checks
            self.over = len(self._checks)


def launcher(ranks: int) -> list[str]:
    """What comes before a command to start it on ``ranks`` ranks: nothing for one, which is a world by itself."""
    if ranks == 0 or (ranks == 1 and not os.environ.get("HPCZERO_LAUNCH")):
        return []
    return ["bash", str(LAUNCH), str(ranks)]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group. No wait is without a limit, as what hangs in a driver cannot be killed."""
    # First politely: a launcher ends its ranks, which have groups of their own.
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None or number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)


def environment(limit_s: float) -> dict[str, str]:
    """Of a job that may take ``limit_s`` seconds."""
    found = {
        name: value
        for name, value in os.environ.items()
        if "_MCA_" in name or not name.startswith(OF_OUR_LAUNCHER)
    }
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), found.get("PYTHONPATH")]))
    # Time is left to say who is missing where.
    found["HPCZERO_TIMEOUT"] = f"{round(limit_s / 2, 1):g}"
    folder = Path(sys.executable).parent
    if sys.prefix != sys.base_prefix and (folder / "mpirun").exists():
        # An MPI from PyPI: mpi4py loads the one of its own environment, activated or not.
        found["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
    if os.geteuid() == 0:
        # Also for one rank without a launcher, which may start a trial of two.
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        found.update(dict.fromkeys(names, "1"))
    return found


def openmpi_environment(folder: Path) -> dict[str, str]:
    """What makes mpi4py and the launcher take the Open MPI in ``folder``, wherever it was built."""
    paths = {"PATH": folder / "bin", "LD_LIBRARY_PATH": folder / "lib"}
    before = {name: os.environ.get(name, "") for name in paths}
    found = {n: os.pathsep.join(filter(None, [str(p), before[n]])) for n, p in paths.items()}
    return {**found, "OPAL_PREFIX": str(folder)}


def nvidia_smi(what: str) -> tuple[bool, str]:
    """Whether ``nvidia-smi`` answers, and what it says of each device."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{type(error).__name__}: {error}"
    return done.returncode == 0, (done.stdout or done.stderr).strip()


def _tail(text: str) -> list[str]:
    """The last lines that say something."""
    lines = [line for line in text[-TAIL_CHARACTERS:].splitlines() if line.strip(" -")]
    return lines[-TAIL_LINES:]
