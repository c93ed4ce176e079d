"""Everything there is to check and measure on a GPU, in one command: ``python -m scaling.gpu``.

Owns: which checks run on how many ranks, their goals, the limit of time, the table. Must not know: what a check does.
Each check is a job of its own, so that one that crashes or hangs costs only its own figures. Ranks share one device
where there is no other: MPI and CUDA IPC allow it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tyro

from hpczero.errors import ConfigError, run
from hpczero.options import parse_command_line
from scaling.record import ROOT, Recorder, Row, circumstances, machine_name, slug
from scaling.table import table

ALL_S = 450.0
GRACE_S = 5.0
STARVED_S = 20.0  # a check that has less left is not started


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        checks: as in "kernels parity"; left out, all.
        twin: the same checks on the host with small sizes, to test them where there is no device.
        limit_s: seconds for all of them together.
        launch: what starts {ranks} ranks of one machine.
        results: folder of all machines' results; left out, scaling/results.
    """

    checks: tuple[str, ...] = ()
    twin: tyro.conf.UseCounterAction[int] = 0  # a bare --twin
    limit_s: float = ALL_S
    launch: str = "mpirun --oversubscribe --bind-to none -n {ranks}"
    results: str | None = None

    def __post_init__(self) -> None:
        known = list(dict.fromkeys(name for name, _, _ in JOBS))
        unknown = [name for name in self.checks if name not in known]
        if unknown:
            raise ConfigError(f"--checks: got {unknown[0]!r}, expected some of {' '.join(known)}")
        if "{ranks}" not in self.launch:
            raise ConfigError(f"--launch: got {self.launch!r}, expected {{ranks}} in it")
        if self.limit_s <= 0:
            raise ConfigError(f"--limit_s: got {self.limit_s}, expected seconds above 0")


# Check, ranks, most seconds; in the order of what is worth most if time runs out.
JOBS: tuple[tuple[str, int, float], ...] = (
    ("facts", 1, 40),
    ("kernels", 1, 60),
    ("parity", 2, 60),
    ("collectives", 2, 60),
    ("speed", 1, 120),
    ("overlap", 2, 90),
    ("fits", 4, 60),
    ("fits_not", 4, 60),
    ("parity", 4, 90),
    ("parity", 1, 40),
    ("collectives", 4, 60),
)
MAY_END_BADLY = ("fits_not",)  # what does not fit leaves its ranks in the middle of things


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
    path = ROOT / (options.results or "scaling/results") / _machine(options) / f"{name}.jsonl"
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
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return machine_name()
    names = done.stdout.splitlines() if done.returncode == 0 else []
    return slug(names[0]) if names else machine_name()


def results(options: Options) -> Iterator[tuple[str, Row]]:
    """Kind and content of each row, as they come."""
    end = time.monotonic() + options.limit_s
    for check, ranks, most_s in JOBS:
        if options.checks and check not in options.checks:
            continue
        left_s = end - time.monotonic()
        if left_s < STARVED_S:
            yield "failure", {"check": check, "ranks": ranks, "said": "no time was left for it"}
            continue
        start = time.monotonic()
        launch = options.launch.format(ranks=ranks).split()
        rows, problem = job(launch, check, min(most_s, left_s), twin=bool(options.twin))
        for row in rows:
            yield check, {"ranks": ranks, **row}
        if problem and not (rows and check in MAY_END_BADLY):
            yield "failure", {"check": check, "ranks": ranks, "said": problem}
        took_s = time.monotonic() - start
        sys.stderr.write(f"gpu: {check} on {ranks} rank(s): {problem or 'done'} ({took_s:.0f} s)\n")


def job(launch: list[str], check: str, limit_s: float, *, twin: bool) -> tuple[list[Row], str]:
    """The rows that the ranks of one check print, and what went wrong."""
    command = [
        *launch,
        sys.executable,
        "-m",
        "scaling.gpu_checks",
        check,
        json.dumps({"twin": twin}),
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    if os.geteuid() == 0:
        names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        environment.update(dict.fromkeys(names, "1"))
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    problem = ""
    try:
        out, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(
            process.pid, signal.SIGTERM
        )  # a launcher ends its ranks, which have groups of their own
        try:
            out, errors = process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
        problem = f"not done after {limit_s:.0f} s"
    if process.returncode and not problem:
        last = [line for line in errors.splitlines() if line.strip(" -")][-12:]
        problem = f"exit code {process.returncode}: {' | '.join(last)[-1500:]}"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], problem


# --- goals and table -----------------------------------------------------------------------------------------------

Verdict = tuple[str, str]  # what, with its figure


def report(rows: list[Row]) -> str:
    """All rows as tables, then each goal with its figure."""
    parts = []
    for check in dict.fromkeys(name for name, _, _ in JOBS):
        found = [row for row in rows if row["kind"] == check]
        if found:
            parts.append(f"{check}\n\n{_table(found)}")
    failures = [
        f"{r['check']} on {r['ranks']} rank(s): {r['said']}" for r in rows if r["kind"] == "failure"
    ]
    if failures:
        parts.append("not run or failed\n\n" + "\n".join(f"- {line}" for line in failures))
    parts.append("goals\n\n" + "\n".join(f"- {what}: {how}" for what, how in goals(rows)))
    return "\n\n".join(parts)


def _table(rows: list[Row]) -> str:
    columns = [
        c for c in dict.fromkeys(k for row in rows for k in row) if c not in ("kind", "all_ms")
    ]
    return table(columns, [[_text(row.get(column)) for column in columns] for row in rows])


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def goals(rows: list[Row]) -> Iterator[Verdict]:
    """Each goal of a GPU run that these rows can speak of."""
    twin = any(row.get("twin") for row in rows)  # whose times mean nothing

    def of(check: str, wanted: Callable[[Row], bool] = lambda row: True) -> list[Row]:
        return [row for row in rows if row["kind"] == check and wanted(row)]

    sums = of("kernels", lambda row: "sum" in row["kernel"] or "cast" in row["kernel"])
    if sums:
        least = min(row["of_copy"] for row in sums)
        if not twin:
            yield "kernels at least 0.85 of the copy's rate", _met(least, least >= 0.85)
        bits = all(row.get("bits_equal", True) for row in sums)
        yield "sums have the host's bits", _met("yes" if bits else "no", bits)
    pairs = of("parity")
    if pairs:
        equal = all(row["bits_equal"] for row in pairs)
        yield "stages and transports bit-identical", _met("yes" if equal else "no", equal)
        fp32 = [r["largest_relative_difference"] for r in pairs if r["precision"] == "fp32"]
        if fp32:
            yield "fp32 losses within 1e-5 of plain torch", _met(max(fp32), max(fp32) <= 1e-5)
    moved = of("collectives")
    for row in (r for r in moved if r["way"] == "ipc"):
        same = [r for r in moved if (r["ranks"], r["nbytes"]) == (row["ranks"], row["nbytes"])]
        where = f"{row['operation']} of {row['nbytes'] / 2**20:.0f} MiB, {row['ranks']} ranks"
        yield f"{where}: right", _met(str(row["right"]), row["right"])
        for other, least in () if twin else (("copy", 0.8), ("mpi", 2.0), ("staged", 5.0)):
            ops = [
                r["ms"]
                for r in same
                if r["way"] == other and r["operation"] in ("copy", row["operation"])
            ]
            if ops:
                ratio = ops[0] / row["ms"]
                yield f"{where}: {other} / ipc at least {least}", _met(ratio, ratio >= least)
    if twin:
        return
    for row in of("speed", lambda row: row["way"] == "hpczero"):
        ratio = row["of_plain"]
        yield f"{row['model']}: tokens/s at least 0.97 of plain torch", _met(ratio, ratio >= 0.97)
    for row in of("overlap", lambda row: row["way"] == "beside" and row["exposed"] is not None):
        yield (
            "exposed communication at most 0.2 of the serial",
            _met(row["exposed"], row["exposed"] <= 0.2),
        )
    capped = [row for check in ("fits", "fits_not") for row in of(check)]
    held = {row["stage"]: row["trains"] for row in capped if row["cap_nbytes"] is not None}
    if held:
        right = held.get(3, False) and not held.get(0, False)
        yield "does not fit at stage 0, trains at stage 3", _met(str(held), right)


def _met(figure: float | str, met: bool) -> str:
    return f"{_text(figure)}, {'met' if met else 'missed'}"


if __name__ == "__main__":
    run(main)
