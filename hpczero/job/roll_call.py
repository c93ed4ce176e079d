"""The roll call: the watchdog of a rank whose call does not return asks where the other ranks are.

Owns: the messages, two for each rank that is asked. Must not know: when to ask, what the answers mean.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

QUESTION, ANSWER = 1, 2  # tags
POLL_S = 0.02


class RollCall:
    """One rank's part in the roll call."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Not collective.

        Args:
            comm: all ranks that may be asked. Nothing else uses it; ``free`` frees it.
        """
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
