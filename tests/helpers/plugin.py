"""pytest on several MPI ranks: one verdict, one voice, and no test that hangs.

Every rank runs the same tests in the same order. After set-up, call and tear-down of each test the ranks agree: what
failed on one has failed on all, and the reports say where. Only rank 0 prints. A watchdog stands over every test, with
or without MPI.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import pytest_mpi

from tests.helpers.cases import EVERYTHING, LEFT_OUT, MOST_IN_CORE, Case, each_value, spread
from tests.helpers.forkserver import server as forkserver
from tests.helpers.mpirun import waited
from tests.helpers.records import Outcome, Record, of_rank, read_records
from tests.helpers.watchdog import Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

EXIT_DISAGREE = 3
MOST_RANKS = 8
GRACE_S = 15.0  # how long a rank that failed waits for the others to end the same test


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hpczero")
    group.addoption("--test-limit", type=float, default=120.0, help="seconds a test may take")
    group.addoption("--records", type=Path, help="file that rank 0 adds a line to per test")
    group.addoption("--mpi-files", type=Path, help="file for which files have MPI tests, by ranks")
    group.addoption("--core", action="store_true", help=f"leave out tests marked {LEFT_OUT}")
    group.addoption("--sizes", help="numbers of ranks to spread cases over; all run here without")
    group.addoption("--done", type=Path, help="records of tests that are not to run again")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    comm = None
    if config.getoption("--with-mpi"):
        from mpi4py import MPI  # starts MPI: only where ranks were asked for

        comm = MPI.COMM_WORLD.Dup()
        comm.Set_name("hpczero tests")
    if comm is not None and comm.rank > 0:
        # pytest's reporter is about to take it: rank 0 speaks for all.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (open to the end)
    config.pluginmanager.register(Ranks(config, comm), "hpczero-ranks")


class Verdict(NamedTuple):
    """How one phase of a test ended on one rank: in a word, in a line, in full."""

    outcome: str
    headline: str
    text: str

    @classmethod
    def of(cls, report: pytest.TestReport) -> Verdict:
        """What ``report`` says, with what the test printed."""
        sections = [f"--- {name}\n{body}" for name, body in report.sections]
        return cls(report.outcome, _headline(report), "\n".join([report.longreprtext, *sections]))


class Ranks:
    """This rank's part of the session."""

    def __init__(self, config: pytest.Config, comm: MPI.Intracomm | None) -> None:
        """Collective over ``comm``, which is ours from now on; None where pytest runs without MPI."""
        self.comm = comm
        self.size = comm.size if comm else 1
        self.stderr = os.dup(sys.stderr.fileno())  # before pytest captures it
        self.watchdog = Watchdog(comm, self.stderr)
        self.limit_s: float = config.getoption("--test-limit")
        records: Path | None = config.getoption("--records")
        rank = comm.rank if comm else 0
        self.costs = of_rank(records, rank) if records else None
        self.records = records if rank == 0 else None
        done: Path | None = config.getoption("--done")
        self.done = {record.test for record in read_records(done)} if done else set()
        given: str | None = config.getoption("--sizes")
        self.sizes = [int(word) for word in given.split()] if given else []
        self.collect_errors: list[str] = []
        self.ended: dict[str, Record] = {}

    def watch(self) -> None:
        """Start a watchdog of this process's own, which has been forked."""
        self.watchdog.close()
        self.watchdog = Watchdog(None, self.stderr)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Mute pytest-mpi's section at the end: the version text of Open MPI holds a NUL, it makes logs binary."""
        for plugin in session.config.pluginmanager.get_plugins():
            if isinstance(plugin, pytest_mpi.MPIPlugin):
                plugin._is_testing_mpi = False

    # --- which tests

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Generator[None, object, object]:
        """Choose cases before others choose tests, and say where MPI tests run, if no phase has before."""
        marked = [
            item
            for item in items
            if config.getoption("--core") and any(map(item.get_closest_marker, LEFT_OUT))
        ]
        sizes = _sizes_by_item([item for item in items if item not in set(marked)], self.sizes)
        noted: Path | None = config.getoption("--mpi-files")
        first = noted is not None and not noted.exists()
        if noted and first and self.records:
            noted.write_text(json.dumps(_mpi_files(sizes)))
        kept: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            mpi = item.get_closest_marker("mpi") is not None
            if item not in sizes:
                if first:
                    self.record(item, "spared", "make test-all runs it")
            elif mpi and not sizes[item]:
                if first:
                    self.record(item, "elsewhere", "needs another number of ranks")
            elif self.comm is not None and mpi and self.size not in sizes[item]:
                pass  # another phase
            elif item.nodeid not in self.done:
                kept.append(item)
                continue
            left_out.append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = kept
        return (yield)

    def pytest_collection_finish(self) -> None:
        """What is imported by now stays: a test that collects garbage need not go through all of torch for it."""
        gc.collect()
        gc.freeze()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """All ranks must have collected the same tests, or they would wait for each other in different ones."""
        if self.comm is None:
            return
        self.watchdog.start("collecting the tests", self.limit_s)
        mine = ([item.nodeid for item in session.items], "\n".join(self.collect_errors))
        found = self.comm.allgather(mine)
        self.watchdog.stop()
        odd = [rank for rank, other in enumerate(found) if other != found[0]]
        if odd:
            tests, errors = found[odd[0]]
            only_one_has = sorted(set(tests) ^ set(found[0][0]))
            message = f"ranks {odd} collected other tests than rank 0: {only_one_has}\n{errors}"
            pytest.exit(message, returncode=EXIT_DISAGREE)

    # --- one test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        limit = item.get_closest_marker("limit")
        self.record(item, "started")
        off = forkserver.off
        forkserver.off = off or item.get_closest_marker("fresh") is not None
        start, jobs, job_seconds = time.monotonic(), waited.jobs, waited.seconds
        cpu_seconds, anew = _cpu_seconds(), forkserver.anew()
        self.watchdog.start(item.nodeid, limit.args[0] if limit else self.limit_s)
        try:
            return (yield)
        finally:
            self.watchdog.stop()
            forkserver.off = off
            ended = self.ended.pop(item.nodeid, None)
            if ended and self.costs:
                cost = dataclasses.replace(
                    ended,
                    seconds=time.monotonic() - start,
                    jobs=waited.jobs - jobs,
                    anew=forkserver.anew() - anew,
                    job_seconds=waited.seconds - job_seconds,
                    cpu_seconds=_cpu_seconds() - cpu_seconds,
                )
                cost.append_to(self.costs)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("gpu"):
            import torch

            if not torch.cuda.is_available():
                pytest.skip("no CUDA device")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        verdict = self._agree(report)
        before = self.ended.get(item.nodeid)
        if before is None or report.failed or (report.skipped and before.outcome == "passed"):
            reason = f"{verdict.headline}\n{verdict.text}" if report.failed else verdict.headline
            self.ended[item.nodeid] = Record(item.nodeid, report.outcome, reason)
        return report

    def _agree(self, report: pytest.TestReport) -> Verdict:
        """Give ``report`` the same outcome on all ranks and return it. Collective over all ranks."""
        mine = Verdict.of(report)
        if self.comm is None or self.size == 1:
            return mine
        if report.failed:
            note = f"failed in {report.when} and waits for the other ranks:\n{mine.text}"
            self.watchdog.hurry(GRACE_S, note)
        verdicts = [Verdict(*fields) for fields in self.comm.allgather(tuple(mine))]
        outcomes = {verdict.outcome for verdict in verdicts}
        if len(outcomes) == 1 and not report.failed:
            return mine
        odd = "failed" if "failed" in outcomes else "skipped"
        where = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == odd]
        first = verdicts[where[0]]
        heading = f"{odd} in {report.when} on {len(where)} of {self.size} ranks, {where}: {first.headline}"
        if report.failed:
            report.sections.append(("all ranks", heading))
        else:
            report.outcome = "failed"
            report.longrepr = f"{heading}\nrank {where[0]}:\n{first.text}"
        return Verdict("failed", heading, f"rank {where[0]}:\n{first.text}")

    def record(self, item: pytest.Item, outcome: Outcome, reason: str = "") -> None:
        """Note what became of a test."""
        if self.records:
            Record(item.nodeid, outcome, reason).append_to(self.records)

    # --- the end

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """pytest itself broke on this rank: the others must not wait for it."""
        if self.comm is not None and self.size > 1:
            text = "".join(traceback.format_exception(excinfo.value))
            os.write(self.stderr, f"[rank {self.comm.rank}] pytest broke:\n{text}".encode())
            self.comm.Abort(EXIT_DISAGREE)

    def pytest_unconfigure(self) -> None:
        self.watchdog.close()
        if self.size > 1:
            # What is found at the end, in garbage or in threads, is no test's. As an error on one rank it would end
            # the others.
            warnings.filterwarnings("default", category=pytest.PytestUnraisableExceptionWarning)
            warnings.filterwarnings(
                "default", category=pytest.PytestUnhandledThreadExceptionWarning
            )
        if self.comm is not None:
            self.comm.Free()


def _cpu_seconds() -> float:
    """Processor time so far of this process and of all whose end it, or the fork server, has seen."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used) + forkserver.cpu_seconds()


def _wants(item: pytest.Item, size: int) -> bool:
    """Whether a test runs on that many ranks."""
    for mark in item.iter_markers("ranks"):
        if size not in mark.args:
            return False
    return all(size >= mark.kwargs.get("min_size", 1) for mark in item.iter_markers("mpi"))


def _sizes_by_item(items: list[pytest.Item], phases: list[int]) -> dict[pytest.Item, set[int]]:
    """The items that run, with the numbers of ranks on which they do; those without MPI on none.

    Args:
        items: all that may run.
        phases: the numbers of ranks that this run has; empty where pytest was started by hand, with any number.
    """
    if EVERYTHING:
        return {item: _wanted(item, phases or range(1, MOST_RANKS + 1)) for item in items}
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    found: dict[pytest.Item, set[int]] = {}
    for test, of_test in tests.items():
        turn = zlib.crc32(test.encode())
        chosen = [of_test[at] for at in each_value([_case(item) for item in of_test], turn)]
        wanted = [_wanted(item, phases or range(1, MOST_RANKS + 1)) for item in chosen]
        if phases:
            wanted = spread(
                [_in_core(item, sizes) for item, sizes in zip(chosen, wanted, strict=True)], turn
            )
        found.update(zip(chosen, wanted, strict=True))
    return found


def _in_core(item: pytest.Item, sizes: set[int]) -> list[int]:
    """Of these numbers of ranks those that are worth their time: few, unless the test names more."""
    named = any(True for _ in item.iter_markers("ranks"))
    return sorted(size for size in sizes if named or size <= MOST_IN_CORE) or sorted(sizes)


def _case(item: pytest.Item) -> Case:
    """The name of its value in each ``parametrize``; values that one of these gives together are one."""
    case = getattr(item, "callspec", None)
    return {} if case is None else dict(enumerate(case._idlist))


def _wanted(item: pytest.Item, sizes: Iterable[int]) -> set[int]:
    if item.get_closest_marker("mpi") is None:
        return set()
    return {size for size in sizes if _wants(item, size)}


def _mpi_files(sizes: dict[pytest.Item, set[int]]) -> dict[str, list[str]]:
    """Files with tests for each number of ranks."""
    return {
        str(size): sorted({str(item.path) for item, of in sizes.items() if size in of})
        for size in range(1, MOST_RANKS + 1)
    }


def _headline(report: pytest.TestReport) -> str:
    """Why a phase failed or was skipped, in a line; empty if it passed."""
    wasxfail = getattr(report, "wasxfail", None)
    if wasxfail is not None and report.skipped:
        return f"expected to fail: {wasxfail}"
    if isinstance(report.longrepr, tuple):  # a skip: file, line, "Skipped: why"
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else crash.message
    return next(iter(text.splitlines()), "")
