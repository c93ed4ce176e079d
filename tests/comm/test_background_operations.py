"""Operations in the background: their order, their errors, their end."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from hpczero.accelerator import HostAccelerator
from hpczero.comm.background import Background
from hpczero.job.watchdog import Watchdog


@pytest.fixture
def background():
    background = Background(Watchdog(0, 0.0, ranks=1), HostAccelerator())
    yield background
    background.close()


def test_operations_run_one_after_the_other_in_the_order_they_were_started(
    background: Background,
) -> None:
    go, done = threading.Event(), []

    def first() -> None:
        go.wait(10)
        done.append("first")

    waits = [background.start("first", first)]
    waits += [background.start(name, partial(done.append, name)) for name in ("second", "third")]
    assert done == [], "the caller does not wait"
    go.set()
    waits[1]()
    assert done[:2] == ["first", "second"]
    background.drain()
    assert done == ["first", "second", "third"]
    for wait in waits:
        wait()


def test_error_is_raised_where_it_is_waited_for_and_nothing_runs_after_it(
    background: Background,
) -> None:
    done = []

    def fail() -> None:
        raise OSError("no link")

    fine = background.start("fine", lambda: done.append("fine"))
    broken = background.start("broken", fail)
    later = background.start("later", lambda: done.append("later"))
    fine()
    for wait in (broken, later, background.drain):
        with pytest.raises(OSError, match="no link"):
            wait()
    assert done == ["fine"]


def test_operations_record_no_graph(background: Background) -> None:
    weight, found = torch.ones(2, requires_grad=True), []
    background.start("sum", lambda: found.append((weight * 2).requires_grad))()
    assert found == [False]


def test_close_ends_the_thread_after_what_was_started() -> None:
    before = set(threading.enumerate())
    background, done = Background(Watchdog(0, 0.0), HostAccelerator()), []
    background.start("last", lambda: done.append("last"))
    background.close()
    assert done == ["last"]
    assert set(threading.enumerate()) <= before


def test_watchdog_sees_the_operation_that_runs_and_not_those_that_wait() -> None:
    watchdog = Watchdog(0, 0.0)
    background = Background(watchdog, HostAccelerator())
    go, running = threading.Event(), threading.Event()

    def first() -> None:
        running.set()
        go.wait(10)

    background.start("the first", first)
    background.start("the second", lambda: None)
    running.wait(10)
    with watchdog.watch("a call of the main thread"):
        assert "a call of the main thread" in watchdog._state()
    assert watchdog._state().startswith("in the first, ")
    go.set()
    background.close()
    assert "the last was the second" in watchdog._state()
