"""Runs every test: those of one process, then the MPI tests on 1 to 5 ranks. ``make test`` calls it.

``python tests/run.py [pytest arguments]``. ``HPCZERO_TEST_RANKS="2 3"`` narrows the numbers of ranks. A test that
takes its job down, by hanging or crashing, counts as failed and the rest of its phase goes on in a new launch. The
last line says ``N passed, N failed, N skipped``; the exit code is 0 only if some test passed and none failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, os.fspath(ROOT))

from tests.helpers.processes import end_family, launch_environment  # noqa: E402  (needs the line above)
from tests.helpers.records import Record, read_records  # noqa: E402

RANKS = "1 2 3 4 5"
PHASE_LIMIT_S = 2700.0
MAX_LAUNCHES = 6  # of one phase: a machine on which everything hangs must not take all day
EXIT_HANG, EXIT_PHASE_LIMIT = 86, 124
WHY = {EXIT_HANG: "it hung", EXIT_PHASE_LIMIT: "the time of its phase was up"}
EXIT_TERMINATED = 128 + signal.SIGTERM
PYTEST_ENDED_WELL = (0, 5)  # all passed; nothing to run


@dataclass(frozen=True)
class Phase:
    """The tests of one process (``ranks`` 0) or of some number of ranks."""

    ranks: int

    def __str__(self) -> str:
        return {0: "one process", 1: "1 rank"}.get(self.ranks, f"{self.ranks} ranks")

    def command(self, arguments: list[str], expression: str) -> list[str]:
        """The command line; ``expression`` is what the user said with ``-m``."""
        marked = "mpi" if self.ranks else "not mpi"
        chosen = f"{marked} and ({expression})" if expression else marked
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen]
        pytest.append(
            f"--color={'yes' if sys.stdout.isatty() else 'no'}"
        )  # mpirun shows each rank a terminal
        pytest += [
            "--durations=12",
            "--durations-min=8",
        ]  # what to look at when the suite gets long
        if not self.ranks:
            return [*pytest, *arguments]
        return ["install/launch.sh", str(self.ranks), *pytest, "--with-mpi", *arguments]


@dataclass
class Tally:
    """What became of the tests of a phase; each entry is (test, why)."""

    passed: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)

    def add(self, records: list[Record], exit_code: int) -> bool:
        """Count one launch; True if a test took the job down, so that others may not have run."""
        open_test = ""
        for record in records:
            if record.outcome == "elsewhere":
                self.elsewhere.add(record.test)
                continue
            open_test = record.test if record.outcome == "started" else ""
            if record.outcome == "passed":
                self.passed.append(record.test)
            elif record.outcome == "failed":
                self.failed.append((record.test, record.reason.partition("\n")[0]))
            elif record.outcome == "skipped":
                self.skipped.append((record.test, record.reason))
        if open_test:
            for record in records:  # pytest did not live to show them
                if record.outcome == "failed":
                    print(f"\n{record.test}\n{record.reason}")
            self.failed.append(
                (
                    open_test,
                    f"took the job down, exit code {exit_code} ({WHY.get(exit_code, 'it crashed')})",
                )
            )
        elif exit_code not in PYTEST_ENDED_WELL and not any(r.outcome == "failed" for r in records):
            self.failed.append(("(no test)", f"pytest ended with exit code {exit_code}"))
        return bool(open_test)

    def __str__(self) -> str:
        return f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


def launch(command: list[str], limit_s: float) -> int:
    """Run ``command`` with our output; past the limit its processes are ended and the code is EXIT_PHASE_LIMIT."""
    environment = launch_environment(
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"), PYTHONPATH=os.fspath(ROOT)
    )
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        print(f"{limit_s:.0f} s are over: ending {' '.join(command)}", file=sys.stderr)
        return EXIT_PHASE_LIMIT
    finally:
        end_family(process.pid)
        process.wait()


def run_phase(phase: Phase, arguments: list[str], expression: str, folder: Path) -> Tally:
    """All tests of ``phase``, in as many launches as it takes."""
    tally = Tally()
    deadline = time.monotonic() + PHASE_LIMIT_S
    done = folder / f"{phase.ranks}.done"
    done.touch()
    for attempt in range(MAX_LAUNCHES):
        path = folder / f"{phase.ranks}.{attempt}.records"
        command = phase.command([*arguments, f"--records={path}", f"--done={done}"], expression)
        code = launch(command, deadline - time.monotonic())
        records = read_records(path)
        if not tally.add(records, code):
            return tally
        for record in records:
            if record.outcome != "elsewhere":
                record.append_to(done)
        if code == EXIT_PHASE_LIMIT:
            break
    tally.failed.append(
        ("(the rest)", f"not run: {attempt + 1} launches or {PHASE_LIMIT_S:g} s used up")
    )
    return tally


def main() -> int:
    """Run the phases, print a line for each, what failed, what was skipped, and the sum."""
    parser = argparse.ArgumentParser(usage="tests/run.py [-m EXPRESSION] [pytest arguments]")
    parser.add_argument("-m", dest="expression", default="")
    parser.add_argument(
        "--only-mpi", action="store_true", help="leave out the tests of one process"
    )
    options, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # through launch's finally
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        arguments.append("tests")
    sizes = [int(word) for word in (os.environ.get("HPCZERO_TEST_RANKS") or RANKS).split()]
    phases = [Phase(ranks) for ranks in sizes if ranks > 0]
    if not options.only_mpi:
        phases.insert(0, Phase(0))

    total = Tally()
    lines = []
    ran: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="hpczero-tests-") as folder:
        for phase in phases:
            start = time.monotonic()
            tally = run_phase(phase, arguments, options.expression, Path(folder))
            lines.append(f"phase {phase}: {tally} in {time.monotonic() - start:.1f} s")
            print(lines[-1], flush=True)
            total.passed += tally.passed
            total.failed += [(f"{test} [{phase}]", why) for test, why in tally.failed]
            total.skipped += [(f"{test} [{phase}]", why) for test, why in tally.skipped]
            total.elsewhere |= tally.elsewhere
            ran |= {*tally.passed, *(test for test, _ in tally.failed + tally.skipped)}
    total.skipped += [
        (test, "needs another number of ranks") for test in sorted(total.elsewhere - ran)
    ]

    print("\n".join(["", *(f"SKIPPED {test}: {why}" for test, why in total.skipped), *lines]))
    print("\n".join(f"FAILED {test}: {why}" for test, why in total.failed))
    if not total.passed and not total.failed:
        print("no test ran")
    print(total)
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main())
