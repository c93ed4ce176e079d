"""Runs every test: those of one process, then the MPI tests on 1 to 5 ranks. ``make test`` calls it.

``python tests/run.py [pytest arguments]``. ``HPCZERO_TEST_RANKS="2 3"`` narrows the numbers of ranks,
``HPCZERO_TEST_ALL=1`` runs every case on each of them (``make test-all``); else ``helpers/pairwise.py`` chooses. A test
that takes its job down, by hanging or crashing, counts as failed and the rest of its phase goes on in a new launch.
The last line says ``N passed, N failed, N skipped``; the exit code is 0 only if some test passed and none failed.
"""

from __future__ import annotations

import argparse
import json
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
from tests.helpers.session_folder import kept_session_folder  # noqa: E402

RANKS = "1 2 3 4 5"
MPI_FILES = "mpi-files"  # which have tests for which numbers of ranks, as the first phase has found
QUIET_S = 3600.0  # longer than any test may take on a machine as slow as is waited for: nothing goes on any more
MAX_LAUNCHES = 6  # of one phase: a machine on which everything hangs must not take all day
LANES = 4  # of the tests of one process, which mostly wait for jobs of theirs; no more than there are files
EXIT_HANG, EXIT_QUIET = 86, 124
WHY = {EXIT_HANG: "it hung", EXIT_QUIET: "no test began or ended for long"}
EXIT_TERMINATED = 128 + signal.SIGTERM
PYTEST_ENDED_WELL = (0, 5)  # all passed; nothing to run


@dataclass(frozen=True)
class Phase:
    """The tests of one process (``ranks`` 0), in so many lanes at most, or of some number of ranks."""

    ranks: int
    most: int = LANES

    def __str__(self) -> str:
        return {0: "one process", 1: "1 rank"}.get(self.ranks, f"{self.ranks} ranks")

    @property
    def lanes(self) -> bool:
        """Whether its tests are divided among several pytests that run side by side."""
        return self.ranks == 0 and self.most > 1

    @property
    def names(self) -> list[str]:
        """Of its lanes; the first speaks as it goes."""
        return [str(number) for number in range(1, self.most + 1)] if self.lanes else ["1"]

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
    spared: set[str] = field(default_factory=set)
    ended: list[Record] = field(default_factory=list)

    def add(self, records: list[Record], exit_code: int) -> bool:
        """Count one launch; True if a test took the job down, so that others may not have run."""
        open_test = ""
        for record in records:
            if record.outcome in ("elsewhere", "spared"):
                (self.elsewhere if record.outcome == "elsewhere" else self.spared).add(record.test)
                continue
            open_test = record.test if record.outcome == "started" else ""
            if record.outcome != "started":
                self.ended.append(record)
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

    def join(self, other: Tally) -> None:
        """Add what another has counted."""
        self.passed += other.passed
        self.failed += [
            new for new in other.failed if new not in self.failed
        ]  # files that no lane could read
        self.skipped += other.skipped
        self.ended += other.ended
        self.elsewhere |= other.elsewhere
        self.spared |= other.spared

    def __str__(self) -> str:
        return f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped"


def costliest(records: list[Record], many: int = 20) -> list[str]:
    """A line for each of the files whose tests cost most: processor time, seconds, those spent in jobs, jobs."""
    files: dict[str, list[Record]] = {}
    for record in records:
        files.setdefault(record.test.partition("::")[0], []).append(record)
    sums = [
        (
            sum(r.cpu_seconds for r in of),
            sum(r.seconds for r in of),
            sum(r.job_seconds for r in of),
            sum(r.jobs for r in of),
            name,
        )
        for name, of in files.items()
    ]
    lines = [
        f"  {cpu:7.1f} s of processor, {seconds:6.1f} s, {waited:6.1f} s in {jobs:3} job(s): {name}"
        for cpu, seconds, waited, jobs, name in sorted(sums, reverse=True)[:many]
    ]
    whole = (
        f"costliest of {len(files)} files, {sum(s[0] for s in sums):.0f} s of processor (of rank 0) "
        f"and {sum(s[1] for s in sums):.0f} s in all, {sum(s[2] for s in sums):.0f} s of them in "
        f"{sum(s[3] for s in sums)} job(s):"
    )
    return [whole, *lines]


class Lane:
    """The launches of one pytest, one after the other where a test takes it down, and what became of its tests."""

    def __init__(
        self, phase: Phase, name: str, arguments: list[str], expression: str, folder: Path
    ):
        """
        Args:
            phase: whose tests it runs.
            name: of the lane; the tests of a phase are divided among its lanes as they come to them.
            arguments: for pytest.
            expression: what the user said with ``-m``.
            folder: for records; the same for all lanes of all phases.
        """
        self.tally = Tally()
        self.ended = False
        self._phase, self._name, self._expression = phase, name, expression
        self._records = folder / f"{phase.ranks}.{name}.records"
        self._done = folder / f"{phase.ranks}.{name}.done"
        self._done.touch()
        claims = folder / f"{phase.ranks}.claims"
        claims.mkdir(exist_ok=True)
        self._arguments = [*arguments, f"--records={self._records}", f"--done={self._done}"]
        if phase.lanes:
            self._arguments += [f"--lane={name}", f"--claims={claims}"]
        # One lane speaks as it goes, the others when they have ended.
        self._output = (
            None if name == phase.names[0] else (folder / f"{phase.ranks}.{name}.out").open("w+")
        )
        if not phase.ranks:
            self._arguments.append(f"--mpi-files={folder / MPI_FILES}")
        self._launches, self._launched = 0, 0.0
        self._process = self._launch()

    def _launch(self) -> subprocess.Popen[bytes]:
        self._launches += 1
        self._launched = time.time()
        self._records.unlink(missing_ok=True)
        environment = launch_environment(
            OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"), PYTHONPATH=os.fspath(ROOT)
        )
        # Without bytecode each of a thousand jobs compiles hpczero, a third of what a short one costs.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return subprocess.Popen(
            self._phase.command(self._arguments, self._expression),
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
        if code is None or self.ended:
            return
        self.stop()
        records = read_records(self._records)
        if not self.tally.add(records, code):
            self.ended = True
        elif self._launches == MAX_LAUNCHES:
            self._give_up(f"{MAX_LAUNCHES} launches used up")
        else:
            for record in records:
                if record.outcome not in ("elsewhere", "spared"):
                    record.append_to(self._done)
            self._process = self._launch()

    def end_if_quiet(self) -> None:
        """End it where no test has begun or ended for long: pytest itself is stuck, and whatever watches over tests."""
        heard = self._records.stat().st_mtime if self._records.exists() else self._launched
        if not self.ended and time.time() - max(heard, self._launched) > QUIET_S:
            print(f"nothing heard for {QUIET_S:.0f} s: ending {self._phase}", file=sys.stderr)
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

    def show(self) -> None:
        """What was not shown as it went."""
        if self._output is not None:
            self._output.seek(0)
            print(self._output.read(), flush=True)
            self._output.close()


def run_phase(phase: Phase, arguments: list[str], expression: str, folder: Path) -> Tally:
    """All tests of ``phase``: those of its lanes side by side, then those that must be alone."""
    whole = Tally()
    for names in (phase.names, ["alone"]):
        if names == ["alone"] and not (folder / f"{phase.ranks}.claims" / "alone").exists():
            break  # no lane has left anything to it
        lanes = [Lane(phase, name, arguments, expression, folder) for name in names]
        try:
            while not all(lane.ended for lane in lanes):
                time.sleep(0.1)
                for lane in lanes:
                    lane.end_if_quiet()
                    lane.look()
        finally:
            for lane in lanes:
                lane.stop()
        for lane in lanes:
            lane.show()
            whole.join(lane.tally)
    return whole


def lanes_for(arguments: list[str]) -> int:
    """How many lanes have something to do: a lane claims whole files."""
    paths = {Path(argument.partition("::")[0]) for argument in arguments}
    given = [path for path in paths if path.exists()]
    if any(path.is_dir() for path in given):
        return LANES
    return min(LANES, sum(path.suffix == ".py" for path in given))  # setup.cfg is none


def narrowed(arguments: list[str], phase: Phase, folder: Path) -> list[str]:
    """``arguments`` with only those files in place of folders that have tests for ``phase``, if that is known.

    The phase of one rank, or the only one, looks at all: what no phase runs must be told by some.
    """
    found = folder / MPI_FILES
    if phase.ranks < 2 or os.environ.get("HPCZERO_TEST_RANKS") or not found.exists():
        return arguments
    files = json.loads(found.read_text()).get(str(phase.ranks))
    words: list[str] = []
    for argument in arguments:
        inside = (ROOT / argument).is_dir() and files is not None
        words += (
            [f for f in files if Path(f).is_relative_to(ROOT / argument)] if inside else [argument]
        )
    return words


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
        phases.insert(0, Phase(0, lanes_for(arguments)))

    if phases:  # a part of each test's cases runs in each
        arguments.append(f"--sizes={' '.join(str(phase.ranks) for phase in phases if phase.ranks)}")

    total = Tally()
    lines = []
    ran: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="hpczero-tests-") as folder, kept_session_folder():
        for phase in phases:
            start = time.monotonic()
            tally = run_phase(
                phase, narrowed(arguments, phase, Path(folder)), options.expression, Path(folder)
            )
            lines.append(f"phase {phase}: {tally} in {time.monotonic() - start:.1f} s")
            print(lines[-1], flush=True)
            total.passed += tally.passed
            total.failed += [(f"{test} [{phase}]", why) for test, why in tally.failed]
            total.skipped += [(f"{test} [{phase}]", why) for test, why in tally.skipped]
            total.elsewhere |= tally.elsewhere
            total.spared |= tally.spared
            total.ended += tally.ended
            ran |= {*tally.passed, *(test for test, _ in tally.failed + tally.skipped)}
    total.skipped += [
        (test, "needs another number of ranks") for test in sorted(total.elsewhere - ran)
    ]

    print("\n".join(["", *(f"SKIPPED {test}: {why}" for test, why in total.skipped), *lines]))
    print("\n".join(costliest(total.ended)))
    if total.spared:
        print(f"left to HPCZERO_TEST_ALL=1: {len(total.spared)} case(s), and most numbers of ranks")
    print("\n".join(f"FAILED {test}: {why}" for test, why in total.failed))
    if not total.passed and not total.failed:
        print("no test ran")
    print(total)
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main())
