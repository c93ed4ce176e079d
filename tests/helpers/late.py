"""A device whose lanes are late: copies happen some time after they were started, as on a real one.

The memory is the host's. Whoever reads the result of a copy without waiting for a mark behind it, or changes its source
before, gets wrong values, at once and on any machine. What torch itself computes is done when it returns.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from hpczero.accelerator import HostAccelerator, Lane, Mark

LATE_S = 300e-6


class LateMark(Mark):
    def __init__(self) -> None:
        self.passed = threading.Event()

    def wait(self) -> None:
        self.passed.wait()


class LateLane(Lane):
    """Its work is done by a thread, after a while."""

    def __init__(self, seed: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._random = random.Random(seed)
        threading.Thread(target=self._run, daemon=True, name="late").start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def after(self, mark: Mark) -> None:
        self._work.put(mark.wait)

    def copy(self, into: Tensor, source: Tensor) -> None:
        late_s = self._random.random() * LATE_S

        def work() -> None:
            time.sleep(late_s)
            into.copy_(source)

        self._work.put(work)

    def mark(self) -> Mark:
        mark = LateMark()
        self._work.put(mark.passed.set)
        return mark

    @contextmanager
    def current(self) -> Iterator[None]:
        self.finish()
        yield


class LateAccelerator(HostAccelerator):
    """Counts as a device: collectives overlap, and staging is needed."""

    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self._lanes = 0

    def lane(self) -> Lane:
        self._lanes += 1
        return LateLane(self._lanes)

    def describe(self) -> str:
        return "a late twin"
