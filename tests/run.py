"""Runs the tests: those of one process, then the MPI tests on 1 to 4 ranks. ``make test`` calls it.

``python tests/run.py [pytest arguments]`` runs the core (``helpers/cases.py``); tests under paths that are named run
whatever their marks. ``HPCZERO_TEST_ALL=1`` runs every case on every number of ranks (``make test-all``).
``HPCZERO_TEST_RANKS="0 2 3"`` narrows the phases; 0 is for the tests of one process. A test that takes its job down, by
hanging or crashing, counts as failed and the rest of its phase goes on in a new launch. ``build/tests.jsonl`` keeps
what each test cost. The last line says ``N passed, N failed, N skipped``; the exit code is 0 only if some test passed
and none failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, os.fspath(ROOT))

from tests.helpers.cases import EVERYTHING  # noqa: E402  (needs the line above)
from tests.helpers.processes import end_family, launch_environment  # noqa: E402
from tests.helpers.records import EXIT_QUIET, Record, read_records, took_down  # noqa: E402
from tests.helpers.session_folder import kept_session_folder  # noqa: E402

QUIET_S = 3600.0  # longer than any test may take on a machine as slow as is waited for: nothing goes on any more
MAX_LAUNCHES = 6  # of one phase: a machine on which everything hangs must not take all day
LANES = 6  # of the tests of one process, which mostly wait for jobs of theirs
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
        # Each rank has a session's folder; ranks that tidy up those of each other run into each other.
        pytest.append("-otmp_path_retention_count=100")
        # mpirun shows each rank a terminal
        pytest.append(f"--color={'yes' if sys.stdout.isatty() else 'no'}")
        if not self.ranks:
            # Early, before a conftest of the files in question can start MPI.
            return [*pytest, "-p", "tests.helpers.lanes", f"--lanes={LANES}", *arguments]
        return ["install/launch.sh", str(self.ranks), *pytest, "--with-mpi", *arguments]

    def beside(self, others: list[Launch]) -> bool:
        """Whether it may run while these do: tests of 1 rank and of one process leave each other a core."""
        return not others or (self.ranks == 1 and all(not one.phase.ranks for one in others))


@dataclass
class Tally:
    """What became of the tests of a phase; each entry is (test, why)."""

    passed: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    elsewhere: set[str] = field(default_factory=set)
    spared: set[str] = field(default_factory=set)
    ended: list[Record] = field(default_factory=list)

    def add(self, records: list[Record], exit_code: int) -> bool:
        """Count one launch; True if a test took the job down, so that others may not have run."""
        begun: set[str] = set()
        for record in records:
            if record.outcome in ("elsewhere", "spared"):
                (self.elsewhere if record.outcome == "elsewhere" else self.spared).add(record.test)
                continue
            if record.outcome == "started":
                begun.add(record.test)
            else:
                begun.discard(record.test)
                self.ended.append(record)
            if record.outcome == "passed":
                self.passed.append(record.test)
            elif record.outcome == "failed":
                self.failed.append((record.test, record.reason.partition("\n")[0]))
            elif record.outcome == "skipped":
                self.skipped.append((record.test, record.reason))
        if begun:
            for record in records:  # pytest did not live to show them
                if record.outcome == "failed":
                    print(f"\n{record.test}\n{record.reason}")
            self.failed += [(test, took_down(exit_code)) for test in sorted(begun)]
        elif exit_code not in PYTEST_ENDED_WELL and not any(r.outcome == "failed" for r in records):
            self.failed.append(("(no test)", f"pytest ended with exit code {exit_code}"))
        return bool(begun)

    def __str__(self) -> str:
        return f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


def keep(records: dict[str, list[Record]], path: Path) -> None:
    """Write what each test cost, by phase, where the next run overwrites it: one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {"phase": phase, **asdict(replace(record, reason=record.reason.partition("\n")[0]))}
        )
        for phase, of in records.items()
        for record in of
    ]
    path.write_text("".join(f"{line}\n" for line in lines))


def costliest(records: dict[str, list[Record]], many: int = 30) -> list[str]:
    """A line for each of the tests that cost most: processor time of all ranks and jobs, seconds, jobs."""
    every = [(record.cpu_seconds, phase, record) for phase, of in records.items() for record in of]
    every.sort(key=lambda one: -one[0])
    lines = [
        f"  {cpu:6.1f} s of processor, {record.seconds:5.1f} s, {record.jobs:2} job(s): {record.test} [{phase}]"
        for cpu, phase, record in every[:many]
    ]
    jobs, anew = (sum(getattr(r, name) for _, _, r in every) for name in ("jobs", "anew"))
    used = sum(cpu for cpu, _, _ in every)
    return [
        f"{used / 60:.1f} minutes of processor in {len(every)} tests; {jobs} jobs, {anew} of them and of theirs "
        f"started anew instead of forked. The costliest tests:",
        *lines,
    ]


class Launch:
    """A pytest, on one or more ranks, started again where a test takes it down; and what became of its tests."""

    def __init__(
        self, phase: Phase, arguments: list[str], expression: str, folder: Path, quiet: bool
    ):
        """
        Args:
            phase: whose tests it runs.
            arguments: for pytest.
            expression: what the user said with ``-m``.
            folder: for records; the same for all phases.
            quiet: show its output at its end.
        """
        self.phase = phase
        self.tally = Tally()
        self.ended = False
        self.begun = time.monotonic()
        self._expression = expression
        self._records = folder / f"{phase.ranks}.records"
        self._done = folder / f"{phase.ranks}.done"
        self._done.touch()
        self._temporary = folder / str(phase.ranks)
        self._arguments = [*arguments, f"--records={self._records}", f"--done={self._done}"]
        self._output = (folder / f"{phase.ranks}.out").open("w+") if quiet else None
        self._launches, self._launched = 0, 0.0
        self._process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        self._launches += 1
        self._launched = time.time()
        for old in self._records.parent.glob(f"{self._records.name}*"):
            old.unlink()
        self._temporary.mkdir(exist_ok=True)
        environment = launch_environment(
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
            PYTHONPATH=os.fspath(ROOT),
            PYTEST_DEBUG_TEMPROOT=os.fspath(self._temporary),
        )
        # Without bytecode each of a thousand jobs compiles hpczero, a third of what a short one costs.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.Popen(
            self.phase.command(self._arguments, self._expression),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output and subprocess.STDOUT,
            start_new_session=True,
        )

    def look(self) -> None:
        """Whether the launch has ended, and if so what comes next."""
        code = self._process.poll()
        if code is None:
            self._end_if_quiet()
            return
        self.stop()
        records = read_records(self._records)
        if not self.tally.add(records, code) or "-x" in self._arguments:
            self.ended = True
        elif self._launches == MAX_LAUNCHES:
            self._give_up(f"{MAX_LAUNCHES} launches used up")
        else:
            for record in records:
                if record.outcome not in ("elsewhere", "spared"):
                    record.append_to(self._done)
            self._process = self._launch()

    def _end_if_quiet(self) -> None:
        """End it where no test has begun or ended for long: pytest itself is stuck, and whatever watches over tests."""
        heard = self._records.stat().st_mtime if self._records.exists() else self._launched
        if time.time() - max(heard, self._launched) > QUIET_S:
            print(f"nothing heard for {QUIET_S:.0f} s: ending {self.phase}", file=sys.stderr)
            self.stop()
            self.tally.add(read_records(self._records), EXIT_QUIET)
            self._give_up(f"nothing heard for {QUIET_S:g} s")

    def _give_up(self, why: str) -> None:
        self.tally.failed.append(("(the rest)", f"not run: {why}"))
        self.ended = True

    def stop(self) -> None:
        """End what runs."""
        end_family(self._process.pid)
        self._process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def show(self) -> None:
        """What was not shown as it went."""
        if self._output is not None:
            self._output.seek(0)
            print(self._output.read(), flush=True)
            self._output.close()


def narrowed(arguments: list[str], files: list[str]) -> list[str]:
    """``arguments`` with only these files in place of folders that they are in."""
    words: list[str] = []
    for argument in arguments:
        inside = [file for file in files if Path(file).is_relative_to(ROOT / argument)]
        words += inside if (ROOT / argument).is_dir() else [argument]
    return words


def run_phases(
    phases: list[Phase], arguments: list[str], expression: str, folder: Path
) -> list[Launch]:
    """Run them, one after the other or beside each other, and print a line for each."""
    # Which files have tests for which numbers of ranks, as the first phase finds
    found = folder / "mpi-files"
    arguments = [*arguments, f"--mpi-files={found}"]
    waiting, running, ended = [*phases], list[Launch](), list[Launch]()
    try:
        while waiting or running:
            if waiting and waiting[0].beside(running) and (found.exists() or not running):
                phase, words = waiting.pop(0), arguments
                if phase.ranks and found.exists():
                    files = json.loads(found.read_text())[str(phase.ranks)]
                    if not files:
                        continue
                    words = narrowed(arguments, files)
                running.append(Launch(phase, words, expression, folder, quiet=bool(running)))
            time.sleep(0.1)
            for launch in running:
                launch.look()
                if launch.ended:
                    launch.show()
                    wall_s = time.monotonic() - launch.begun
                    print(f"phase {launch.phase}: {launch.tally} in {wall_s:.1f} s", flush=True)
                    if "-x" in arguments and launch.tally.failed:
                        waiting.clear()
            ended += [launch for launch in running if launch.ended]
            running = [launch for launch in running if not launch.ended]
    finally:
        for launch in running:
            launch.stop()
    return ended


def main() -> int:
    """Run the phases, print a line for each, what failed, what was skipped, and the sum."""
    parser = argparse.ArgumentParser(usage="tests/run.py [-m EXPRESSION] [pytest arguments]")
    parser.add_argument("-m", dest="expression", default="")
    options, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))  # through finally
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        arguments += ["tests"] if EVERYTHING else ["tests", "--core"]
    ranks = os.environ.get("HPCZERO_TEST_RANKS") or ("0 1 2 3 4 5" if EVERYTHING else "0 1 2 3 4")
    phases = [Phase(int(word)) for word in ranks.split()]
    arguments.append(f"--sizes={' '.join(str(phase.ranks) for phase in phases if phase.ranks)}")

    with tempfile.TemporaryDirectory(prefix="hpczero-tests-") as folder, kept_session_folder():
        launches = run_phases(phases, arguments, options.expression, Path(folder))
    total = Tally()
    ran: set[str] = set()
    for launch in launches:
        tally = launch.tally
        total.passed += tally.passed
        total.failed += [(f"{test} [{launch.phase}]", why) for test, why in tally.failed]
        total.skipped += [(f"{test} [{launch.phase}]", why) for test, why in tally.skipped]
        total.spared |= tally.spared
        total.elsewhere |= tally.elsewhere
        ran |= {*tally.passed, *(test for test, _ in tally.failed + tally.skipped)}
    total.skipped += [
        (test, "needs another number of ranks") for test in sorted(total.elsewhere - ran)
    ]
    ended = {str(launch.phase): launch.tally.ended for launch in launches}
    keep(ended, ROOT / "build" / "tests.jsonl")
    print("\n".join(f"SKIPPED {test}: {why}" for test, why in total.skipped))
    print("\n".join(costliest(ended)))
    if total.spared:
        print(f"left to make test-all: {len(total.spared)} case(s), and most numbers of ranks")
    print("\n".join(f"FAILED {test}: {why}" for test, why in total.failed))
    if not total.passed and not total.failed:
        print("no test ran")
    print(total)
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main())
