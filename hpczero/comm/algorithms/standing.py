"""Standing requests: messages that recur with the same memory and peers are described to MPI once.

Owns: persistent requests, by the memory that they move, and when they are freed. Must not know: whose turn it is, what
is in the memory.

A message costs a fraction of a microsecond to start again, and all messages of a step are started by one call
(docs/scale.md). Memory that was given back and taken again at the same address is the same memory to MPI.
"""

from __future__ import annotations

from collections.abc import Hashable

from mpi4py import MPI

# Requests kept at a time: a few hundred bytes each in the MPI library.
MOST_REQUESTS = 2**16

Step = list[MPI.Prequest]


class Standing:
    """Requests of recurring calls, step by step."""

    def __init__(self, *, most: int = MOST_REQUESTS) -> None:
        """Not collective.

        Args:
            most: requests kept; those of the call that was longest not seen go first.
        """
        self._most = most
        self._kept: dict[Hashable, list[Step]] = {}
        self._requests = 0

    def get(self, key: Hashable) -> list[Step] | None:
        """Requests of the call ``key``; None if they are not there."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found  # the latest is last
        return found

    def must_free(self, requests: int) -> bool:
        """Whether ``keep`` would free others for as many requests."""
        return self._requests + requests > self._most

    def keep(self, key: Hashable, steps: list[Step]) -> None:
        """Keep the requests of one more call. Those that are freed for it must be complete."""
        self._requests += sum(map(len, steps))
        while self._kept and self._requests > self._most:
            self._drop(next(iter(self._kept)))
        self._kept[key] = steps

    def _drop(self, key: Hashable) -> None:
        for step in self._kept.pop(key):
            self._requests -= len(step)
            for request in step:
                request.Free()

    def free(self) -> None:
        """Free all. Not collective; MPI lets those that are under way end first."""
        for key in list(self._kept):
            self._drop(key)
