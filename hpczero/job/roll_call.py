"""The roll call: where is everybody? Asked by the watchdog of a rank whose call does not return.

Owns: questions and answers between watchdog threads, on a communicator of their own. Must not know: what ranks do, when
to ask. It needs an MPI that lets a second thread call it while the first one waits inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

QUESTION, ANSWER = 1, 2  # tags
POLL_S = 0.02


class RollCall:
    """One rank's part in it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        """Not collective.

        Args:
            comm: all ranks that may be asked; nothing else uses it. Freed by ``free``.
        """
        self._comm = comm
        self._pending: list[Any] = []  # requests whose messages must stay

    @property
    def size(self) -> int:
        """Ranks that may be asked, this one included."""
        return self._comm.size

    def answer(self, state: Callable[[], str]) -> None:
        """Tell whoever has asked what ``state`` says. Not collective."""
        while self._comm.iprobe(tag=QUESTION):
            asker = self._comm.recv(tag=QUESTION)
            self._pending.append(self._comm.isend((self._comm.rank, state()), asker, tag=ANSWER))

    def ask(self, patience_s: float, state: Callable[[], str]) -> dict[int, str]:
        """What the others answer within ``patience_s``, by rank; who is asked meanwhile answers. Not collective."""
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
