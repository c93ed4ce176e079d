"""The contract of an accelerator: where tensors live, in which order its work is done, what others may see of it.

[Note: Two clocks]
Work on a device is issued now and done later, in the order of its lane. MPI, other processes and the host's own memory
know nothing of that order. Two rules follow, and all transports keep them. Device memory is handed to MPI, another
process or the host only after the host has waited for a ``Mark`` behind the last operation that wrote it. A result of
the host is handed to the device only after the host has it. On the host's own memory every mark has passed at once. The
same transports therefore run there, and tests run them with a twin whose lanes are late on purpose.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

# Mark, Lane and Span are those of the host, where everything is done at once. A device has subclasses.


class Mark:
    """A place in the order of a lane's work."""

    def wait(self) -> None:
        """Return when everything before the mark is done. Any thread may call it."""


class Lane:
    """An order of work on the device, beside that of the caller."""

    def after(self, mark: Mark) -> None:
        """Have what is started here from now on begin when ``mark`` has passed. Returns at once on a device."""
        mark.wait()

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Start a copy; either side may be pinned memory of the host. Both must live until a later mark has passed."""
        into.copy_(source)

    def mark(self) -> Mark:
        """Mark the end of what was started here so far."""
        return Mark()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Context: what torch starts on this thread goes to this lane."""
        yield

    def finish(self) -> None:
        """Return when everything started here is done."""
        self.mark().wait()


class Span:
    """A stretch of the caller's lane, from ``Accelerator.span`` to ``end``, timed by the device's own clock."""

    def __init__(self) -> None:
        self._from = self._to = time.perf_counter()

    def end(self) -> None:
        """End the span; returns at once."""
        self._to = time.perf_counter()

    def passed(self) -> bool:
        """Whether the device has worked through the span. Call it after ``end``."""
        return True

    def seconds(self) -> float:
        """Length of the span in seconds. Call it after ``end``; it waits until the device has worked through it."""
        return self._to - self._from


class MemoryExport(ABC):
    """One block of device memory that other processes of the node may map.

    Attributes:
        memory: (nbytes,) uint8 on the device.
        ticket: what ``Accelerator.attach`` needs in another process.
    """

    memory: Tensor
    ticket: bytes

    def seal(self) -> None:
        """Say that all who need the block have attached it.

        Where the system allows that, nobody else can from now on.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Nobody may have it attached or point into it any more."""


class Attached(ABC):
    """A block that another process has exported.

    Attributes:
        memory: (nbytes,) uint8 on the device.
    """

    memory: Tensor

    @abstractmethod
    def close(self) -> None:
        """Unmap the block. Nobody may point into it any more."""


class Accelerator(ABC):
    """One device of this process.

    Attributes:
        device: the torch device.
        is_host: whether its memory is the host's. Every call is then done when it returns, and MPI sees the memory.
    """

    device: torch.device
    is_host: bool = False

    @abstractmethod
    def mark(self) -> Mark:
        """Mark the end of what torch has started on this thread's current lane."""

    def finish(self) -> None:
        """Return when what torch has started on this thread's current lane is done."""
        self.mark().wait()

    @abstractmethod
    def span(self) -> Span:
        """Begin a span behind what torch has started on this thread's current lane."""

    @abstractmethod
    def lane(self) -> Lane:
        """Make a new lane."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 of host memory from and to which lanes copy without the processor."""

    @abstractmethod
    def export(self, nbytes: int) -> MemoryExport:
        """Allocate ``nbytes`` that other processes of this node can map.

        Raises:
            CommError: there is not enough memory, or such memory cannot be shared here; the message has the remedy.
        """

    @abstractmethod
    def attach(self, ticket: bytes, nbytes: int) -> Attached:
        """Map what another process exported. A process cannot map its own export.

        Raises:
            CommError: the block cannot be seen from here; the message has the remedy.
        """

    def bring(self, tensor: Tensor) -> Tensor:
        """``tensor`` of the host on the device, for what is started here from now on; does not wait for the device."""
        return tensor

    @property
    def identity(self) -> str:
        """Name of the device on its host, the same in every process that sees it; empty on the host."""
        return ""

    @abstractmethod
    def describe(self) -> str:
        """One line for a run header."""

    @abstractmethod
    def usage(self) -> Mapping[str, int]:
        """Bytes on the device: ``allocated``, ``reserved``, their peaks, ``total`` and more; empty on the host."""

    def reset_peak(self) -> None:
        """Begin to measure peaks anew."""
        return

    def enter_thread(self) -> None:
        """Make this device the current one of the calling thread. In CUDA each thread has its own current device."""
        return
