"""Standing requests: messages that recur with the same memory and peers are described to MPI once.

Owns: persistent requests, by the memory that they move, which of them are kept, and when they are freed. Must not know:
whose turn it is, what is in the memory.

A message costs a fraction of a microsecond to start again, and all messages of a step are started by one call
(docs/scale.md). Memory that was given back and taken again at the same address is the same memory to MPI.

[Note: Which requests stand]
A call whose memory is taken anew each time, as at stage 3, may come from another address each time. Its requests would
never be started again, and MPI would hold them for good. So a call stands from the second time on that it is seen, and
requests are few. Where there are too many, a call takes the place only of calls that were not seen for longer than
twice the time after which it came again. So a step with more calls than there is room for keeps some of them; if the
oldest had to go, each would be dropped just before it comes again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from mpi4py import MPI

# Requests that stand at a time: about 1 KiB each in the MPI library and Python.
MOST_REQUESTS = 2**13
# Calls that are remembered because they may come again: about 100 bytes each.
MOST_SEEN = 2**14


@dataclass(slots=True)
class Step:
    """Messages that start together.

    Attributes:
        requests: persistent.
        stands: whether they are started again; otherwise they are freed when they are complete.
    """

    requests: list[MPI.Prequest]
    stands: bool

    def free(self) -> None:
        """Free the requests. MPI lets those that are under way end first."""
        for request in self.requests:
            request.Free()


class Standing:
    """Requests of recurring calls, step by step; see [Note: Which requests stand]."""

    def __init__(self, *, most: int = MOST_REQUESTS, most_seen: int = MOST_SEEN) -> None:
        """Not collective.

        Args:
            most: requests kept.
            most_seen: calls remembered whose requests are not kept.
        """
        self._most = most
        self._most_seen = most_seen
        self._kept: dict[Hashable, list[Step]] = {}  # the latest is last
        self._used: dict[Hashable, int] = {}  # of those that are kept: by number of the call
        self._seen: dict[int, int] = {}  # of others: hash of the key, number of the call
        self._calls = 0
        self._requests = 0

    def get(self, key: Hashable) -> list[Step] | None:
        """Requests of the call ``key``; None if they are not there. Once for each call."""
        self._calls += 1
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found
            self._used[key] = self._calls
        return found

    def displaced(self, key: Hashable, requests: int) -> list[Hashable] | None:
        """Calls whose requests ``keep`` must free for those of a call that ``get`` has not found.

        Args:
            key: of the call.
            requests: as many as it has.

        Returns:
            Keys; None if the requests of this call are not to be kept.
        """
        before = self._seen.pop(hash(key), None)
        if before is None or requests > self._most:
            self._seen[hash(key)] = self._calls
            if len(self._seen) > self._most_seen:
                del self._seen[next(iter(self._seen))]
            return None
        recent = self._calls - 2 * (self._calls - before)
        excess = self._requests + requests - self._most
        gone: list[Hashable] = []
        for other, steps in self._kept.items():
            if excess <= 0:
                break
            if self._used[other] >= recent:
                self._seen[hash(key)] = self._calls
                return None
            gone.append(other)
            excess -= sum(len(step.requests) for step in steps)
        return gone

    def keep(self, key: Hashable, steps: list[Step], gone: list[Hashable]) -> None:
        """Keep the requests of one more call, and free those of ``gone``, which must be complete."""
        for other in gone:
            self._drop(other)
        self._kept[key] = steps
        self._used[key] = self._calls
        self._requests += sum(len(step.requests) for step in steps)

    def _drop(self, key: Hashable) -> None:
        del self._used[key]
        for step in self._kept.pop(key):
            self._requests -= len(step.requests)
            step.free()

    def free(self) -> None:
        """Free all. Not collective; MPI lets those that are under way end first."""
        for key in list(self._kept):
            self._drop(key)
        self._seen.clear()
