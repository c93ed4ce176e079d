"""The watchdog: ends a job whose collective does not return, and says where every rank is."""

from __future__ import annotations

import atexit
import faulthandler
import math
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpczero.errors import EXIT_FAILURE, EXIT_HANG, abort_job, report

if TYPE_CHECKING:
    from mpi4py import MPI


QUESTION, ANSWER = 1, 2  # tags
POLL_S = 0.02


class RollCall:
    """One rank's part in the roll call."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Not collective. Nothing else uses ``comm``, all ranks that may be asked; ``free`` frees it."""
        self._comm = comm
        self._pending: list[Any] = []  # requests whose messages must stay
        self._asked = -math.inf  # when another rank's question was seen last

    @property
    def size(self) -> int:
        """Ranks that may be asked, this one included."""
        return self._comm.size

    @property
    def asked_s(self) -> float:
        """Seconds since another rank has asked, as far as ``answer`` has seen; infinite if none has."""
        return time.monotonic() - self._asked

    def answer(self, state: Callable[[], str]) -> None:
        """Send ``state`` to whoever has asked. Not collective."""
        while self._comm.iprobe(tag=QUESTION):
            asker = self._comm.recv(tag=QUESTION)
            self._asked = time.monotonic()
            self._pending.append(self._comm.isend((self._comm.rank, state()), asker, tag=ANSWER))

    def ask(self, patience_s: float, state: Callable[[], str]) -> dict[int, str]:
        """Answers of the other ranks within ``patience_s`` seconds, by rank.

        Not collective. Questions are answered meanwhile.
        """
        others = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        for rank in others:
            self._pending.append(self._comm.isend(self._comm.rank, rank, tag=QUESTION))
        answers: dict[int, str] = {}
        deadline = time.monotonic() + patience_s
        while len(answers) < len(others) and time.monotonic() < deadline:
            while self._comm.iprobe(tag=ANSWER):
                rank, said = self._comm.recv(tag=ANSWER)
                answers[rank] = said
            self.answer(state)
            time.sleep(POLL_S)
        return answers

    def free(self) -> None:
        """Collective over the communicator."""
        self._comm.Free()


# What follows when an exception leaves a collective call that the other ranks are still in.
#
# [Note: Why the job ends]
# A signal handler of the program's own may raise anywhere, so also between two messages of one call. MPI has been told
# of some messages and goes on with them whenever this process calls it again; the others were never sent. A later call
# on the same communicator would be matched with them, and ranks would take one unit's values for another's. Memory that
# was given back would be written to. A program that catches the exception cannot know that. So the rank says what left
# which call, and ends the job, as it would if the exception were caught by nobody.


def end_if_alone(error: BaseException, what: str, *, rank: int, ranks: int) -> None:
    """End the job because ``error`` leaves the call ``what`` on this rank while others wait for the rest of it.

    Returns if nobody waits: one rank makes such calls alone, and an error that all of them raise together leaves none.

    ``ranks`` make these calls together. ``rank`` is that of the job, for the message.
    """
    together = getattr(error, "agreed", False) or getattr(error, "raised_by", 0) >= ranks
    if ranks == 1 or together:
        return
    if isinstance(error, SystemExit):
        said, code = f"sys.exit({error.code!r})", error.code
        code = code if isinstance(code, int) and code else EXIT_FAILURE
    else:
        code = report(error)
        said = type(error).__name__
    _say(
        rank,
        f"{said} cut off {what}, for the rest of which other ranks wait: the job ends. Raise between steps: a signal "
        "handler sets a flag, and the loop looks at the flag",
    )
    abort_job(code)


def _say(rank: int, line: str) -> None:
    sys.stderr.write(f"[rank {rank}] {line}\n")
    sys.stderr.flush()


# The watchdog: a call that does not return ends the job instead of holding the allocation.
#
# [Note: Few ask]
# In a hang almost every rank waits, and all their limits pass within seconds. If all asked, N ranks would send N**2
# questions and write N stacks. Rank r therefore waits STAGGER_S * log2(1 + r) longer. Whoever is asked meanwhile
# answers and leaves the rest to the asker, who ends the job. It asks by itself only if the job has not ended some time
# later. The questions do not pass from rank to rank in a tree: a rank that is gone would then hide those behind it.
# After NOTICE_S one rank asks in the same way, and only says what it has heard.

# At 400 ranks the last two are 4 ms apart, and a message takes less; see [Note: Few ask].
STAGGER_S = 1.0
LEAST_LOOK_S = 0.01
GRACE_S = 10.0  # for an asker to end the job, after its patience
NOTICE_S = 30.0  # of waiting until one rank says where all are; the job goes on
MOST_NAMED = 8

# Where code lies that is not a program's: this package, the standard library, what is installed, what has no file.
NOT_OF_PROGRAM = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",
)
# Whose threads still run. They must not ask for the interpreter at exit.
_watching: weakref.WeakSet[Watchdog] = weakref.WeakSet()


@atexit.register
def stop_all() -> None:
    """End the threads of all watchdogs. Not collective."""
    for watchdog in list(_watching):
        watchdog.stop()


class Watchdog:
    """Watches the calls in progress from a daemon thread, which the first watched call starts.

    Attributes:
        timeout_s: seconds one call may take before the job is ended with exit 86; 0 waits for ever.
    """

    def __init__(self, rank: int, timeout_s: float, *, ranks: int = 2) -> None:
        """Not collective. ``rank`` is that of the job, for messages; ``ranks`` make these calls together."""
        self.rank, self.ranks = rank, ranks
        self.timeout_s = timeout_s
        # Calls of two threads may be open at a time; the one that began last is the one that holds things up. A call
        # whose context is gone was left by a signal handler's exception as it began or ended.
        self._calls: dict[int, tuple[weakref.ref[_Watch], str, float]] = {}
        self._begun = 0
        self._last = ("nothing yet", time.monotonic())
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._roll_call: RollCall | None = None
        self._noticed = 0  # the number of calls begun when this rank has last said where all are

    def attend(self, roll_call: RollCall) -> None:
        """Use ``roll_call``: answer where this rank is when others ask, and ask them."""
        self._roll_call = roll_call

    def leave(self) -> None:
        """Stop to answer and to ask; after ``stop``. Collective over the ranks of the roll call."""
        if self._roll_call is not None:
            self._roll_call.free()
            self._roll_call = None

    def watch(self, what: str) -> _Watch:
        """Context manager around one blocking call; ``what`` is printed if it does not return in time."""
        return _Watch(self, what)

    def collective(self, what: str) -> _Watch:
        """As ``watch``, around messages that peers wait for: an exception of this rank alone ends the job."""
        return _Watch(self, what, met=True)

    @contextmanager
    def operation(self, what: str, *, begun: bool = False) -> Iterator[None]:
        """Context around several calls: an exception of this rank alone, after the first call, ends the job.

        With ``begun``, peers wait from the start: for messages that are no calls of this watchdog's.
        """
        before = self._begun
        try:
            yield
        except BaseException as error:
            if begun or self._begun != before:
                self.left(what, error)
            raise

    def left(self, what: str, error: BaseException) -> None:
        """``error`` leaves the call ``what``: end the job if other ranks wait for the rest of the call."""
        end_if_alone(error, what, rank=self.rank, ranks=self.ranks)

    def stop(self) -> None:
        """End the thread and wait for it, so that it does not ask for the interpreter at exit."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            _watching.discard(self)

    def _begin(self, call: _Watch, what: str) -> None:
        self._begun += 1
        self._calls[id(call)] = (weakref.ref(call), what, time.monotonic())
        if self._thread is None and self.timeout_s > 0 and not self._stop.is_set():
            # The thread does not keep the watchdog: of a topology that nobody has any more, it ends.
            forgotten = weakref.finalize(self, self._stop.set)
            forgotten.atexit = False
            self._thread = threading.Thread(
                target=_watch,
                args=(weakref.ref(self), self._stop),
                name="hpczero-watchdog",
                daemon=True,
            )
            self._thread.start()
            _watching.add(self)

    def _end(self, call: _Watch) -> None:
        found = self._calls.pop(id(call), None)
        if found is not None:
            self._last = (found[1], time.monotonic())

    def _latest(self) -> tuple[str, float] | None:
        """The open call that began last, and when it began."""
        calls = reversed(list(self._calls.values()))
        return next(((what, since) for call, what, since in calls if call() is not None), None)

    def _state(self) -> str:
        """Where this rank is, in words for the others."""
        latest = self._latest()
        if latest is not None:
            what, since = latest
            return f"in {what}, for {time.monotonic() - since:.0f} s{place_in_program()}"
        what, since = self._last
        past_s, place = time.monotonic() - since, place_in_program()
        return f"outside of any collective for {past_s:.0f} s{place}, the last was {what}"

    def _look(self) -> float:
        """Look once at the call that is open. Returns seconds until the next look."""
        period = min(max(self.timeout_s / 10, 0.05), 5.0)
        patience_s = 2 * period + 1.0  # the others look for questions once a period
        # Not while all is well: no second thread in MPI unless something already looks like a hang.
        latest = self._latest()
        unchanged_s = time.monotonic() - max(self._last[1], (latest or self._last)[1])
        if self._roll_call and unchanged_s > min(self.timeout_s, 2 * NOTICE_S) / 4:
            self._roll_call.answer(self._state)
        if latest is None:
            return period
        what, start = latest
        later_s = STAGGER_S * math.log2(1 + self.rank)
        waited_s = time.monotonic() - start
        if NOTICE_S + later_s < waited_s and self.timeout_s > 2 * NOTICE_S:
            self._notice(what, waited_s, patience_s)
        left_s = self.timeout_s + later_s - (time.monotonic() - start)
        if left_s > 0:
            return max(min(period, left_s), LEAST_LOOK_S)
        if self._roll_call is None or self._roll_call.asked_s > patience_s + GRACE_S:
            self._end_job(what, patience_s)
        return period

    def _notice(self, what: str, waited_s: float, patience_s: float) -> None:
        """Say once for each call where the ranks are that it waits for, unless another rank does."""
        if self._roll_call is None or self._noticed == self._begun:
            return
        self._noticed = self._begun
        if self._roll_call.asked_s > waited_s:
            where = "; ".join(self._missing(what, patience_s))
            _say(
                self.rank,
                f"waits in {what}{place_in_program()} for {waited_s:.0f} s: {where}. "
                "Every rank makes this call: forward, step, save and load are collective",
            )

    def _end_job(self, what: str, patience_s: float) -> None:
        _say(
            self.rank,
            f"hang: {what} has not finished after {self.timeout_s:g} s{place_in_program()}. "
            "A peer failed, left early, runs other modules, or still works. HPCZERO_TIMEOUT sets this limit.",
        )
        for line in (*self._missing(what, patience_s), "stacks of this rank:"):
            _say(self.rank, line)
        faulthandler.dump_traceback(all_threads=True)
        abort_job(EXIT_HANG)
        # The job is this process alone: nobody to abort, and the call never returns.
        os._exit(EXIT_HANG)

    def _missing(self, what: str, patience_s: float) -> list[str]:
        """Ranks that are not in the same call, and where they are instead. Those that say nothing share one line."""
        if self._roll_call is None:
            return []
        answers = self._roll_call.ask(patience_s, self._state)
        others = [rank for rank in range(self._roll_call.size) if rank != self.rank]
        silent = [rank for rank in others if rank not in answers]
        elsewhere = {r: said for r, said in answers.items() if not said.startswith(f"in {what}, ")}
        lines = [f"missing: rank {r} is {elsewhere[r]}" for r in sorted(elsewhere)[:MOST_NAMED]]
        if len(elsewhere) > MOST_NAMED:
            lines.append(f"missing: {len(elsewhere) - MOST_NAMED} more ranks are elsewhere")
        if silent:
            named = ", ".join(map(str, silent[:MOST_NAMED])) + " ..." * (len(silent) > MOST_NAMED)
            lines.append(
                f"missing: rank(s) {named} do not answer: they ended, hang outside of Python, or have just gone on"
            )
        return lines or [
            "all ranks are in this call: the network or the MPI library does not deliver"
        ]


def place_in_program() -> str:
    """File and line of the program's own code that the main thread is in, for messages; empty where there is none."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_OF_PROGRAM):
        frame = frame.f_back
    return "" if frame is None else f" (line {frame.f_lineno} of {frame.f_code.co_filename})"


def _watch(held: weakref.ref[Watchdog], stop: threading.Event) -> None:
    pause_s = LEAST_LOOK_S
    while not stop.wait(pause_s):
        watchdog = held()
        if watchdog is None:
            return
        pause_s = watchdog._look()
        del watchdog


class _Watch:
    def __init__(self, watchdog: Watchdog, what: str, *, met: bool = False) -> None:
        self._watchdog = watchdog
        self._what = what
        self._met = met

    def __enter__(self) -> None:
        self._watchdog._begin(self, self._what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._watchdog._end(self)
        if error is not None and self._met:
            self._watchdog.left(self._what, error)
