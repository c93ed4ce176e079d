"""Traffic: how many bytes of which part went through a tier, and how long somebody waited for them.

Owns: the counts. Must not know: what moves the bytes. Bytes are those of the parts; what is moved beyond their end to
fill a page is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Flow:
    """Of one part, or of all of them, since the tier was made.

    Attributes:
        read_nbytes: fetched from the medium.
        written_nbytes: evicted to it.
        waited_s: seconds in which a caller stood still for them.
    """

    read_nbytes: int = 0
    written_nbytes: int = 0
    waited_s: float = 0.0

    def __add__(self, other: Flow) -> Flow:
        return Flow(
            self.read_nbytes + other.read_nbytes,
            self.written_nbytes + other.written_nbytes,
            self.waited_s + other.waited_s,
        )

    def __sub__(self, earlier: Flow) -> Flow:
        return Flow(
            self.read_nbytes - earlier.read_nbytes,
            self.written_nbytes - earlier.written_nbytes,
            self.waited_s - earlier.waited_s,
        )


class Traffic:
    """Flows by the name of the part, over all records."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._lock = threading.Lock()  # results are waited for on any thread

    def __getitem__(self, part: str) -> Flow:
        """Nothing, of a part that never moved."""
        with self._lock:
            return self._flows.get(part, Flow())

    @property
    def parts(self) -> Mapping[str, Flow]:
        """All that moved, as of now."""
        with self._lock:
            return dict(self._flows)

    @property
    def total(self) -> Flow:
        """Over all parts."""
        return sum(self.parts.values(), Flow())

    def read(self, sizes: Mapping[str, int]) -> None:
        """Count parts, by name and bytes, whose reading starts."""
        for part, nbytes in sizes.items():
            self._add(part, Flow(read_nbytes=nbytes))

    def written(self, sizes: Mapping[str, int]) -> None:
        """Count parts whose writing starts."""
        for part, nbytes in sizes.items():
            self._add(part, Flow(written_nbytes=nbytes))

    def waited(self, sizes: Mapping[str, int], seconds: float) -> None:
        """Count a wait for several parts at once: each takes its share by bytes."""
        whole = sum(sizes.values())
        for part, nbytes in sizes.items():
            share = nbytes / whole if whole else 1 / len(sizes)
            self._add(part, Flow(waited_s=seconds * share))

    def _add(self, part: str, flow: Flow) -> None:
        with self._lock:
            self._flows[part] = self._flows.get(part, Flow()) + flow
