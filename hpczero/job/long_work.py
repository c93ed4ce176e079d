"""Long work on a thread of its own, so that the caller can show how far it is, end it, or tell that it is stuck.

[Note: Signs of life]
Work reports progress whenever it has read or written something. A library may be silent for minutes while it computes;
there the sign is processor time. In ``Progress.silent()`` and ``computing()`` the work is alive if its thread and those
it has started have used ``LIVELY`` of the time of one core since the last sign. Threads that were there before do not
count: MPI may have one that never rests. A read that hangs (a server that is gone) uses no processor time, so it is
seen. A library that computes for ever is not seen.

[Note: Cores]
A thread that changes its affinity changes its own, and that of the threads it starts from then on. Work that is given
more cores than the process has therefore takes them for itself and for threads that start with it, such as the pool of
a library. Every other thread, torch's among them, stays where it was, and nothing must be put back.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Item = TypeVar("Item")

LIVELY = 0.01  # of a core; a machine that many share may give no more
LOOK_S = 0.1
PATIENCE_S = 10.0  # for work that was told to end; between two words of it
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Ended(Exception):
    """Raised in the work where it reports progress, once it shall end. Nobody else needs it."""


@dataclass(frozen=True)
class Moment:
    """How far the work is.

    Attributes:
        what: the phase, e.g. ``"tokenize"``; empty before the first.
        done_nbytes: bytes of the phase that are done.
        total_nbytes: bytes of the phase; None where they are unknown or mean nothing.
        elapsed_s: seconds since the phase began.
    """

    what: str = ""
    done_nbytes: int = 0
    total_nbytes: int | None = None
    elapsed_s: float = 0.0


class Progress:
    """What work says of itself, from any of its threads. Calls are cheap, and nobody need listen.

    Attributes:
        is_silent: whether the work is in ``silent``.
        got_on: set at each sign of life.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._what, self._done, self._since = "", 0, time.monotonic()
        self._total: int | None = None
        self.is_silent = self._computing = False
        self._ended = False
        self.got_on = threading.Event()

    def phase(self, what: str, total_nbytes: int | None = None) -> None:
        """Begin another phase.

        Raises:
            Ended: the work shall end.
        """
        with self._lock:
            self._what, self._done, self._since = what, 0, time.monotonic()
            self._total = total_nbytes
        self.advance()

    def advance(self, nbytes: int = 0) -> None:
        """Report that the work has got on, by ``nbytes`` of its phase.

        Raises:
            Ended: the work shall end.
        """
        with self._lock:
            self._done += nbytes
        self.got_on.set()
        if self._ended:
            raise Ended

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Context: the work reports nothing, and may be abandoned when the process ends ([Note: Signs of life])."""
        self.is_silent = True
        try:
            yield
        finally:
            self.is_silent = False
            self.got_on.set()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context: the work may report nothing for long, and must not be abandoned ([Note: Signs of life])."""
        self._computing = True
        try:
            yield
        finally:
            self._computing = False

    @property
    def is_computing(self) -> bool:
        """Whether processor time is a sign of life now."""
        return self.is_silent or self._computing

    def end(self) -> None:
        """Have the work end when it next reports progress."""
        self._ended = True

    def now(self) -> Moment:
        """How far it is."""
        with self._lock:
            elapsed_s = time.monotonic() - self._since
            return Moment(self._what, self._done, self._total, elapsed_s)


class LongWork(Generic[T]):
    """One call of ``work`` on a thread, which begins at once."""

    def __init__(self, work: Callable[[Progress], T], cores: Collection[int] = ()) -> None:
        """Start the thread.

        Args:
            work: called with the ``Progress`` that it reports to.
            cores: cores it may run on; if there are none, or the system refuses them, it runs on those of the caller.
        """
        self.progress = Progress()
        self._work = work
        self._cores = cores
        self._future: Future[T] = Future()
        self._others = frozenset(_threads())
        self._cpu_s, self._looked = 0.0, time.monotonic()
        # A daemon: where the job ends for another reason, nothing waits for it.
        threading.Thread(target=self._run, name="hpczero-work", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._cores:
                with suppress(OSError):  # of a cgroup; then on our own
                    os.sched_setaffinity(0, self._cores)  # See [Note: Cores].
            self._future.set_result(self._work(self.progress))
        except BaseException as error:
            self._future.set_exception(error)
        self.progress.got_on.set()

    def wait(self, seconds: float) -> bool:
        """Whether the work has finished; returns then, or after ``seconds``."""
        return bool(wait([self._future], seconds).done)

    def has_got_on(self) -> bool:
        """Whether the work has finished, or given a sign of life since the last call that saw one."""
        if self.progress.got_on.is_set():
            self.progress.got_on.clear()
            self._cpu_s, self._looked = self._cpu(), time.monotonic()
            return True
        if not self.progress.is_computing:
            return False
        cpu_s, now = self._cpu(), time.monotonic()
        self._cpu_s = min(self._cpu_s, cpu_s)  # threads that have ended took theirs with them
        if cpu_s - self._cpu_s <= LIVELY * (now - self._looked):
            return False
        self._cpu_s, self._looked = cpu_s, now
        return True

    def _cpu(self) -> float:
        """Seconds of processor time of the work's threads that are alive."""
        return sum(_thread_cpu_s(thread) for thread in _threads() if thread not in self._others)

    def end(self) -> None:
        """Have the work end. Returns when it has cleaned up, when it is silent, or after ``PATIENCE_S`` seconds."""
        self.progress.end()
        give_up = time.monotonic() + PATIENCE_S
        while not (self.wait(LOOK_S) or self.progress.is_silent or time.monotonic() > give_up):
            pass

    def result(self) -> T:
        """What the call returned; raises what it raised. Waits for it."""
        return self._future.result()


def watched(work: Callable[[Progress], T], show: Callable[[Moment], None]) -> T:
    """Do ``work`` on a thread while ``show`` is told how far it is. An exception here, as of a signal, ends it."""
    task = LongWork(work)
    try:
        while not task.wait(LOOK_S):
            show(task.progress.now())
    except BaseException:
        task.end()
        raise
    return task.result()


def in_order(
    executor: Executor, work: Callable[[Item], T], items: Iterable[Item], ahead: int
) -> Iterator[tuple[Item, T]]:
    """Yield each item with what ``work`` makes of it, in order. Work on the next ``ahead`` items goes on meanwhile."""
    started: deque[tuple[Item, Future[T]]] = deque()
    for item in items:
        started.append((item, executor.submit(work, item)))
        if len(started) > ahead:
            first, future = started.popleft()
            yield first, future.result()
    for item, future in started:
        yield item, future.result()


def _threads() -> list[int]:
    """Numbers of this process's threads in the kernel."""
    return [int(name) for name in os.listdir("/proc/self/task")]


def _thread_cpu_s(thread: int) -> float:
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S  # utime, stime: proc(5)
