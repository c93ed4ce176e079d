"""Everything there is to check and measure on a GPU, in one command: ``python -m scaling.gpu``.

Owns: which checks run on how many ranks, the limit of time, how a job is started and ended. Must not know: what a
check does, what its figures should be (``scaling.gpu.goals``). Each check is a job of its own, so that one that
crashes or hangs costs only its own figures. Ranks share one device where there is no other: MPI and CUDA IPC allow it.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options.reading import parse_command_line
from scaling.evidence.record import (
    HOME,
    LAUNCH,
    LEFT,
    ROOT,
    Recorder,
    Row,
    circumstances,
    machine_name,
    slug,
)
from scaling.gpu.goals import report

ALL_S = 450.0
GRACE_S = 5.0
STARVED_S = 20.0  # a check that has less left is not started
TAIL_LINES, TAIL_CHARACTERS = 60, 6000


@dataclass(frozen=True)
class Options:
    """What to run. HPCZERO_LAUNCH="srun -n" replaces mpirun.

    Attributes:
        checks: as in "kernels parity"; left out, all.
        twin: the same checks on the host with small sizes, to test them where there is no device.
        limit_s: seconds for all of them together.
        results: folder of all machines' results; left out, scaling/results.
    """

    checks: tuple[str, ...] = ()
    twin: tyro.conf.UseCounterAction[int] = 0  # a bare --twin
    limit_s: float = ALL_S
    results: str | None = None

    def __post_init__(self) -> None:
        known = list(dict.fromkeys(name for name, _, _ in JOBS))
        unknown = [name for name in self.checks if name not in known]
        if unknown:
            raise ConfigError(f"--checks: got {unknown[0]!r}, expected some of {' '.join(known)}")
        if self.limit_s <= 0:
            raise ConfigError(f"--limit_s: got {self.limit_s}, expected seconds above 0")


# Check, ranks, most seconds; in the order of what is worth most if time runs out.
JOBS: tuple[tuple[str, int, float], ...] = (
    ("facts", 1, 90),  # a trial of device memory given to MPI may take a minute
    ("smoke", 2, 60),
    ("kernels", 1, 90),
    ("parity", 2, 100),
    ("collectives", 2, 60),
    ("speed", 1, 120),
    ("overlap", 2, 150),
    ("fits", 4, 90),  # four ranks fill a device
    ("fits_not", 4, 90),
    ("parity", 4, 90),
    ("parity", 1, 40),
    ("collectives", 4, 60),
    ("trace", 1, 120),
)

# What a launcher that we ourselves were started by tells its ranks; a job of ours would take it for its own.
OF_OUR_LAUNCHER = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMIX_", "PMI_", "PRTE_", "HYDI_")


def main() -> int:
    """Run the jobs one after the other; write rows, print the table. Returns 1 if a check could not be run."""
    options = parse_command_line(
        Options,
        sys.argv[1:],
        prog="python -m scaling.gpu",
        description="All checks and measurements on a GPU; starts its ranks itself.",
        default=Options(),
    )
    name = "gpu-twin" if options.twin else "gpu"
    path = HOME / (options.results or "scaling/results") / _machine(options) / f"{name}.jsonl"
    with Recorder(path) as recorder:
        recorder.write("run", {**circumstances(), "twin": bool(options.twin)})
        for kind, row in results(options):
            recorder.write(kind, row)
    sys.stdout.write(report(recorder.rows) + "\n")
    sys.stderr.write(f"rows in {path}\n")
    return int(any(row["kind"] == "failure" for row in recorder.rows))


def _machine(options: Options) -> str:
    if options.twin:
        return machine_name()
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return machine_name()
    names = done.stdout.splitlines() if done.returncode == 0 else []
    return slug(names[0]) if names else machine_name()


def results(options: Options) -> Iterator[tuple[str, Row]]:
    """Kind and content of each row, as they come."""
    end = time.monotonic() + options.limit_s
    settings: dict[str, str] = {}
    for check, ranks, most_s in JOBS:
        if options.checks and check not in options.checks:
            continue
        left_s = end - time.monotonic()
        if left_s < STARVED_S:
            yield "failure", {"check": check, "ranks": ranks, "said": "no time was left for it"}
            continue
        start = time.monotonic()
        rows, problem = job(
            launcher(ranks),
            check,
            min(most_s, left_s),
            twin=bool(options.twin),
            settings=settings,
        )
        for row in rows:
            if "gpu_aware" in row:  # tried once, for all jobs: it takes seconds
                settings["HPCZERO_GPU_AWARE"] = str(int(row.pop("gpu_aware")))
            yield check, {"ranks": ranks, **row}
        if problem:
            yield "failure", {"check": check, "ranks": ranks, "said": problem}
        took_s = time.monotonic() - start
        first = problem.partition("\n")[0] or "done"
        sys.stderr.write(f"gpu: {check} on {ranks} rank(s): {first} ({took_s:.0f} s)\n")


def launcher(ranks: int) -> list[str]:
    """What comes before a command to start it on ``ranks`` ranks: nothing for one, which is a world by itself."""
    if ranks == 1 and not os.environ.get("HPCZERO_LAUNCH"):
        return []
    return ["bash", str(LAUNCH), str(ranks)]


def job(
    launch: list[str],
    check: str,
    limit_s: float,
    *,
    twin: bool,
    settings: Mapping[str, str] | None = None,
) -> tuple[list[Row], str]:
    """The rows that the ranks of one check print, and what went wrong, with the last they said.

    Args:
        launch: what starts the ranks.
        check: by name.
        limit_s: seconds until it is ended.
        twin: as in Options.
        settings: variables of its environment.
    """
    given = json.dumps({"twin": twin, "end": time.time() + limit_s})
    command = [*launch, sys.executable, "-m", "scaling.gpu.checks", check, given]
    environment = {**_environment(limit_s), **(settings or {})}
    # Files, not pipes: a rank that outlives its launcher would keep a pipe open and us waiting.
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as err,
    ):
        problem = _run(command, environment, limit_s, out, err)
        out.seek(0)
        rows, cut_off = _rows(out.read())
        if LEFT in rows:  # all was said, and the launcher does not like how it ended
            rows = [row for row in rows if row != LEFT]
            problem = ""
        if cut_off:
            problem = f"{problem or 'done'}; {cut_off} row(s) cut off and left out"
        if problem:
            err.seek(0)
            problem = "\n".join([problem, *_tail(err.read())])
    return rows, problem


def _run(
    command: list[str],
    environment: Mapping[str, str],
    limit_s: float,
    out: IO[str],
    err: IO[str],
) -> str:
    """Run ``command`` to its end or the limit's; what went wrong, or nothing."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    except OSError as error:
        return f"{command[0]} cannot be started: {error.strerror}"
    try:
        code = process.wait(limit_s)
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"not done after {limit_s:.0f} s"
    finally:
        # First politely: a launcher ends its ranks, which have groups of their own. No wait is without a limit, as
        # what hangs in a driver cannot be killed.
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None or number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)


def _environment(limit_s: float) -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if "_MCA_" in name or not name.startswith(OF_OUR_LAUNCHER)
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment["HPCZERO_TIMEOUT"] = f"{limit_s / 2:g}"  # time is left to say who is missing where
    folder = Path(sys.executable).parent
    if sys.prefix != sys.base_prefix and (folder / "mpirun").exists():
        # An MPI from PyPI: mpi4py loads the one of its own environment, activated or not.
        environment["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", os.defpath)])
    if os.geteuid() == 0:
        # Also for one rank without a launcher, which may start a trial of two.
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        environment.update(dict.fromkeys(names, "1"))
    return environment


def _rows(text: str) -> tuple[list[Row], int]:
    """The rows in what a job has printed, and how many lines were cut off when it was ended."""
    rows, cut_off = [], 0
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                cut_off += 1
    return rows, cut_off


def _tail(text: str) -> list[str]:
    """The last lines that say something."""
    lines = [line for line in text[-TAIL_CHARACTERS:].splitlines() if line.strip(" -")]
    return lines[-TAIL_LINES:]


if __name__ == "__main__":
    run(main)
