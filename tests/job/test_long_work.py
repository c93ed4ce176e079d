"""Work on a thread: what it tells of itself, what counts as a sign of life, and how it is ended."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpczero.job.long_work import Ended, LongWork, Moment, Progress, in_order, watched

WAIT_S = 30.0


class Held:
    """Work that does something over and over, silently, until it is let go."""

    def __init__(self, something: Callable[[], object]) -> None:
        self._something = something
        self.silent, self.let_go = threading.Event(), threading.Event()

    def __call__(self, progress: Progress) -> str:
        with progress.silent():
            self.silent.set()
            while not self.let_go.is_set():
                self._something()
        return "done"


def test_result_and_error_are_those_of_the_work() -> None:
    assert watched(lambda progress: "text", lambda moment: None) == "text"

    def fail(progress: Progress) -> None:
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        watched(fail, lambda moment: None)


def test_moments_say_how_far_each_phase_is() -> None:
    progress = Progress()
    assert progress.now().what == ""
    progress.phase("hash", 30)
    progress.advance(10)
    progress.advance(15)
    moment = progress.now()
    assert (moment.what, moment.done_nbytes, moment.total_nbytes) == ("hash", 25, 30)
    progress.phase("learn")
    moment = progress.now()
    assert (moment.what, moment.done_nbytes, moment.total_nbytes) == ("learn", 0, None)


def test_silent_work_that_computes_has_got_on() -> None:
    work = Held(lambda: hashlib.sha256(bytes(2**22)).digest())
    task = LongWork(work)
    assert work.silent.wait(WAIT_S)
    for _ in range(3):
        while not task.has_got_on():
            assert not task.wait(0.05)
    work.let_go.set()
    assert task.result() == "done"


def test_silent_work_that_only_waits_has_not_got_on_though_other_threads_compute() -> None:
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            hashlib.sha256(bytes(2**22)).digest()

    other = threading.Thread(target=compute)
    other.start()
    work = Held(lambda: work.let_go.wait(WAIT_S))
    task = LongWork(work)
    try:
        assert work.silent.wait(WAIT_S)
        task.wait(0.2)
        task.has_got_on()  # what it took to begin
        assert not any(task.has_got_on() or task.wait(0.1) for _ in range(10))
    finally:
        ended.set()
        other.join()
        work.let_go.set()
    assert task.result() == "done"


def test_work_that_computes_but_is_not_silent_has_not_got_on() -> None:
    begun, let_go = threading.Event(), threading.Event()

    def compute(progress: Progress) -> str:
        begun.set()
        while not let_go.is_set():
            hashlib.sha256(bytes(2**20)).digest()
        return "done"

    task = LongWork(compute)
    assert begun.wait(WAIT_S)
    assert not any(task.has_got_on() or task.wait(0.1) for _ in range(5))
    let_go.set()
    assert task.result() == "done"
    assert task.has_got_on()


def test_exception_in_the_caller_ends_the_work_after_it_has_cleaned_up() -> None:
    cleaned_up = threading.Event()

    def work(progress: Progress) -> None:
        try:
            while True:
                progress.advance()
        except Ended:
            cleaned_up.set()
            raise

    def interrupt(moment: Moment) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watched(work, interrupt)
    assert cleaned_up.is_set()


def test_silent_work_is_left_alone_at_the_end() -> None:
    work = Held(lambda: work.let_go.wait(WAIT_S))
    task = LongWork(work)
    assert work.silent.wait(WAIT_S)
    task.end()
    assert not task.wait(0)
    work.let_go.set()
    assert task.result() == "done"


@pytest.mark.parametrize("there", [True, False])
def test_work_has_the_cores_it_is_given_if_there_are_such_and_the_caller_keeps_its_own(
    there: bool,
) -> None:
    mine = os.sched_getaffinity(0)
    given = {min(mine)} if there else {10**4}
    task = LongWork(lambda progress: os.sched_getaffinity(0), given)
    assert task.result() == (given if there else mine)
    assert os.sched_getaffinity(0) == mine


def test_results_come_in_the_order_of_the_items_and_errors_at_their_place() -> None:
    with ThreadPoolExecutor(3) as executor:
        found = list(in_order(executor, lambda n: n * n, range(20), 3))
        assert found == [(n, n * n) for n in range(20)]
        results = (result for _, result in in_order(executor, lambda n: 6 // n, [3, 2, 0, 1], 2))
        assert [next(results), next(results)] == [2, 3]
        with pytest.raises(ZeroDivisionError):
            next(results)
