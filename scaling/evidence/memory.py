"""Memory as the kernel counts it.

Owns: PSS of this process and its peak, what the machine has left. Must not know: what runs meanwhile. PSS counts a
page that k processes share as 1/k of a page in each, so the sum over ranks is what the job takes.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

PERIOD_S = 0.02


def pss_nbytes() -> int:
    """Proportional set size of this process."""
    return _kernel_nbytes("/proc/self/smaps_rollup", "Pss:")  # Linux 4.14 or newer


def available_nbytes() -> int:
    """What new processes of this machine may take without swapping, page cache that can go included."""
    return _kernel_nbytes("/proc/meminfo", "MemAvailable:")


def _kernel_nbytes(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class PeakPss:
    """Context manager that looks at the PSS from a thread, every 20 ms.

    It slows the process down (the kernel walks all its pages), so nothing is timed meanwhile.

    Attributes:
        nbytes: the largest value seen.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="peak-pss")

    def __enter__(self) -> PeakPss:
        self.nbytes = pss_nbytes()
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.nbytes = max(self.nbytes, pss_nbytes())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.nbytes = max(self.nbytes, pss_nbytes())
