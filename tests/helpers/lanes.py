"""Tests of one process side by side: one pytest collects, then forks lanes, which run the files that it hands them.

The lanes say what they find, and the process that collected reports for all. A test that takes its lane down has
failed; what is left of its file goes on in a new lane.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.records import took_down

if TYPE_CHECKING:
    from tests.helpers.plugin import Ranks

ALONE, MACHINE = "alone", "machine"

File = list[int]
"""Positions of the tests of one file among all that were collected."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hpczero")
    group.addoption("--lanes", type=int, help="run files side by side in so many forked processes")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(args: list[str]) -> None:
    """Called only where ``-p`` names this file, as ``tests/run.py`` does for lanes."""
    if any(argument.startswith("--lanes") for argument in args):
        import mpi4py

        mpi4py.rc.initialize = False  # what is collected may import MPI; each lane starts its own


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    lanes = config.getoption("--lanes")
    if lanes:
        atexit.register(_end_mpi)  # the first, so called after what other libraries register
        config.pluginmanager.register(Lanes(lanes), "hpczero-lanes")


@dataclass
class Lane:
    """A lane as the process sees it that collected.

    Attributes:
        tests: that were handed to it and have not ended, by position.
    """

    pid: int
    tests: deque[int] = field(default_factory=deque)


class Lanes:
    """The process that collected: hands out files, and reports what lanes say."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lanes: dict[Connection, Lane] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In place of pytest's own loop. Tests that must be alone come last, in one lane."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # of errors of collecting: pytest's own loop says so
        tests = range(len(session.items))
        alone = [test for test in tests if session.items[test].get_closest_marker(ALONE)]
        beside = [test for test in tests if test not in set(alone)]
        for some, most in ((beside, self._most), (alone, 1)):
            files = deque(
                [*file] for _, file in groupby(some, key=lambda test: session.items[test].path)
            )
            if self._run(session, files, most):
                break  # this is a lane, and has run its part
        return True

    def _run(self, session: pytest.Session, files: deque[File], most: int) -> bool:
        """Run ``files`` in lanes, ``most`` at a time. Returns in each lane too, where it is True."""
        for _ in range(min(most, len(files))):
            if self._fork(session):
                return True
        while self._lanes:
            for connection in wait(list(self._lanes)):
                assert isinstance(connection, Connection)
                lane = self._lanes[connection]
                try:
                    kind, told = connection.recv()
                except (EOFError, ConnectionResetError):
                    del self._lanes[connection]
                    connection.close()
                    self._ended(session, lane)
                    if lane.tests:
                        files.appendleft([*lane.tests])
                    if files and self._fork(session):
                        return True
                    continue
                if kind == "next":
                    file = self._next(session, files)
                    lane.tests.extend(file)
                    connection.send(file)
                elif kind == "ended":
                    lane.tests.popleft()
                else:
                    _report(session, told)
        return False

    def _next(self, session: pytest.Session, files: deque[File]) -> File:
        """The next file that may run now; none if there is none, or the user wants no more."""
        if session.shouldfail or session.shouldstop:
            files.clear()
        busy = any(_of_machine(session, lane.tests) for lane in self._lanes.values())
        for file in files:
            if not (busy and _of_machine(session, file)):
                files.remove(file)
                return file
        return []

    def _fork(self, session: pytest.Session) -> bool:
        """Start a lane; True in it, at its end."""
        ours, theirs = Pipe()
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads, which no lane needs
            pid = os.fork()
        if pid:
            theirs.close()
            self._lanes[ours] = Lane(pid)
            return False
        for other in (ours, *self._lanes):
            other.close()
        _become_a_lane(session, theirs)
        for test, following in _pairs(_handed(theirs)):
            item = session.items[test]
            after = None if following is None else session.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            theirs.send(("ended", None))
        return True

    def _ended(self, session: pytest.Session, lane: Lane) -> None:
        """See how a lane ended: a test that was running has failed."""
        _, status = os.waitpid(lane.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if lane.tests:
            item = session.items[lane.tests.popleft()]
            ranks: Ranks | None = session.config.pluginmanager.get_plugin("hpczero-ranks")
            assert ranks is not None
            ranks.record(item, "failed", took_down(code))
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", took_down(code), "call"
            )
            session.config.hook.pytest_runtest_logreport(report=report)
        elif code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            pytest.exit(f"a lane ended with exit code {code}", returncode=1)


def _report(session: pytest.Session, told: dict[str, Any]) -> None:
    hook = session.config.hook
    report = hook.pytest_report_from_serializable(config=session.config, data=told)
    hook.pytest_runtest_logreport(report=report)


def _of_machine(session: pytest.Session, tests: Iterator[int] | File | deque[int]) -> bool:
    return any(session.items[test].get_closest_marker(MACHINE) for test in tests)


# --- in a lane


def _become_a_lane(session: pytest.Session, connection: Connection) -> None:
    """Replace what a forked process must not share: the screen, files of captured output, the watchdog, MPI."""
    config, manager = session.config, session.config.pluginmanager
    manager.unregister(name="terminalreporter")
    capture: Any = manager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    ranks: Ranks | None = manager.get_plugin("hpczero-ranks")
    assert ranks is not None
    ranks.watch()
    _start_mpi()
    manager.register(Sender(config, connection), "hpczero-sender")


class Sender:
    """Hands reports on to the process that collected."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """As xdist does it."""
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", told))


def _handed(connection: Connection) -> Iterator[int]:
    while True:
        connection.send(("next", None))
        file = connection.recv()
        if not file:
            return
        yield from file


def _pairs(tests: Iterator[int]) -> Iterator[tuple[int, int | None]]:
    """Each test with the one after it. A file is asked for when the last test of the one before is about to begin."""
    test = next(tests, None)
    while test is not None:
        following = next(tests, None)
        yield test, following
        test = following


def _start_mpi() -> None:
    import mpi4py

    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    mpi4py.rc.initialize = True


def _end_mpi() -> None:
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()
