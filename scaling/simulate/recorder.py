"""Recorder: what one rank does, written down as its stand-ins are called.

Owns: in which lane an entry lies, what a call is for, and the work between entries. Must not know: communicators, the
engine, how work is measured (`Clock`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from hpczero.errors import HpcZeroError
from scaling.simulate.programs import MAIN, Await, Call, Entry, Origin, Signal, Work


class Clock(Protocol):
    """Measures or counts the work of this rank."""

    def take(self) -> Work:
        """Work since the last call, or since the clock was started."""

    def start(self) -> None:
        """Forget what was done since the last call of ``take``."""


class NoClock:
    """Work costs nothing."""

    def take(self) -> Work:
        """None."""
        return Work()

    def start(self) -> None:
        """Nothing to forget."""


class Recorder:
    """Of one rank.

    Attributes:
        lanes: entries of each lane, while ``on``.
        comms: world ranks of every communicator, by its name.
        origins: where each comes from.
        on: whether entries are kept.
        begun: how often that was begun; a token is of one of these times.
        clock: of the work.
        operation, name, dtype: what is going on, for calls.
        reads: communicator of a node, and bytes that this rank is about to read from each peer beside the next call.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lanes: dict[str, list[Entry]] = {MAIN: []}
        self.comms: dict[str, tuple[int, ...]] = {}
        self.origins: dict[str, Origin] = {}
        self.on, self.begun = False, 0
        self.operation, self.name, self.dtype = "", "", ""
        self.reads: tuple[str, int] = ("", 0)
        self._lane = MAIN
        self._meanwhile: list[Work] = []
        self._tokens = 0

    def begin(self) -> None:
        """Keep entries from now on, and forget those of before."""
        self.lanes = {MAIN: []}
        self._tokens = 0
        self.begun += 1
        self.on = True
        self.clock.start()

    def end(self) -> dict[str, list[Entry]]:
        """Keep no more entries; those of each lane."""
        self.flush()
        self.on = False
        return self.lanes

    def new_name(self, wished: str, ranks: tuple[int, ...], origin: Origin) -> str:
        """A name for one more communicator: ranks make them in the same order, so names are alike."""
        name, number = wished, 1
        while name in self.comms:
            number += 1
            name = f"{wished} ({number})"
        self.comms[name] = ranks
        self.origins[name] = origin
        return name

    def flush(self) -> None:
        """Note the work since the last entry."""
        work = self.clock.take()
        if not (self.on and work):
            return
        if self._meanwhile:
            self._meanwhile[-1] += work
        else:
            lane = self.lanes.setdefault(self._lane, [])
            if lane and isinstance(lane[-1], Work):
                lane[-1] += work
            else:
                lane.append(work)

    def record(self, entry: Entry) -> None:
        """One more entry of the lane that is recorded now."""
        self.flush()
        if self.on:
            self.lanes.setdefault(self._lane, []).append(entry)
        self.clock.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose work is not counted."""
        self.flush()
        yield
        self.clock.start()

    # --- calls

    @contextmanager
    def labelled(self, operation: str, name: str, dtype: str) -> Iterator[None]:
        """Context in which calls are for ``operation`` of ``name``."""
        before = self.operation, self.name, self.dtype
        self.operation, self.name, self.dtype = operation, name, dtype
        try:
            yield
        finally:
            self.operation, self.name, self.dtype = before

    def open(self) -> None:
        """From now to ``close`` work goes on while a call does."""
        self.flush()
        self._meanwhile.append(Work())

    def close(self) -> Work:
        """The work since ``open``."""
        self.flush()
        return self._meanwhile.pop()

    def call(
        self,
        comm: str,
        nbytes: int,
        *,
        operation: str = "",
        dtype: str = "",
        sent: int = 0,
        messages: int = 0,
        batches: int = 1,
        work: Work | None = None,
    ) -> None:
        """A call over ``comm``; it takes over what is read from peers. ``Call`` says what the arguments are."""
        if len(self.comms[comm]) == 1:
            return
        beside, beside_sent = self.reads if sent else ("", 0)
        if sent:
            self.reads = "", 0
        # Work that went on while an inner call of this lane did is before it.
        entry = Call(
            comm,
            self.operation or operation,
            self.name,
            self.dtype or dtype,
            nbytes,
            sent,
            messages,
            batches,
            beside if beside_sent else "",
            beside_sent,
            work or Work(),
        )
        self.record(entry)

    # --- lanes

    def started(self, lane: str) -> Starting:
        """Context around what ``lane`` does, started by the lane that is recorded now."""
        self._tokens += 1
        return Starting(self, lane, self._tokens)

    def enter(self, lane: str) -> str:
        """Record ``lane`` from now on; the one of before."""
        self.flush()
        before, self._lane = self._lane, lane
        return before


class Starting:
    """Context: entries are those of a lane that was handed something to do. ``wait`` waits for its end."""

    def __init__(self, recorder: Recorder, lane: str, number: int) -> None:
        self._recorder, self._lane = recorder, lane
        self._number, self._begun = number, recorder.begun
        self._begin, self._end = f"begin {number}", f"end {number}"
        self._before = MAIN

    def __enter__(self) -> Starting:
        recorder = self._recorder
        recorder.record(Signal(self._begin))
        self._before = recorder.enter(self._lane)
        recorder.record(Await(self._begin, self._before))
        return self

    def __exit__(self, *exception: object) -> None:
        self._recorder.record(Signal(self._end))
        self._recorder.enter(self._before)

    def wait(self) -> None:
        """The lane that is recorded now waits for the end.

        Raises:
            HpcZeroError: it was started before what is recorded now, in which nobody gives its token.
        """
        recorder = self._recorder
        if recorder.on and recorder.begun != self._begun:
            raise HpcZeroError(
                f"lane {self._lane!r}: the step that is recorded waits for operation {self._number} of the one before, "
                "which it does not have, expected one of its own; cut steps where nothing is on its way"
            )
        recorder.record(Await(self._end, self._lane))
