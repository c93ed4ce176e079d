"""The contract of an accelerator: where tensors live, in which order its work is done, what others may see of it.

Owns: nothing but the contract. Must not know: MPI, collectives, units.

[Note: Two clocks]
Work on a device is issued now and done later, in the order of its lane. MPI, other processes and the host's own
memory know nothing of that order. Whoever hands device memory to them first waits on the host for a ``Mark`` behind
the last operation that wrote it; whoever hands the host's result to the device does so after the host has it. There is
no other rule, and all transports keep it (docs/architecture.md). On the host's own memory every mark has passed at
once, which is why the same transports run there, and are tested there with a twin whose lanes are late on purpose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class Mark(ABC):
    """A place in the order of a lane's work."""

    @abstractmethod
    def wait(self) -> None:
        """Return when everything before it is done. Any thread."""


class Lane(ABC):
    """One order of work on the device, beside that of the caller."""

    @abstractmethod
    def after(self, mark: Mark) -> None:
        """What is started here from now on begins when ``mark`` has passed; returns at once."""

    @abstractmethod
    def copy(self, into: Tensor, source: Tensor) -> None:
        """Start to copy; either side may be pinned memory of the host. Both must live until a later mark has passed."""

    @abstractmethod
    def mark(self) -> Mark:
        """Behind what was started here so far."""

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """Inside, what torch starts on this thread goes to this lane."""

    def finish(self) -> None:
        """Return when everything started here is done."""
        self.mark().wait()


class Span(ABC):
    """From ``Accelerator.span`` to ``end`` on the caller's lane, by the device's own clock."""

    @abstractmethod
    def end(self) -> None:
        """Here it ends; returns at once."""

    @abstractmethod
    def passed(self) -> bool:
        """Whether the device is through with it; after ``end``."""

    @abstractmethod
    def seconds(self) -> float:
        """How long it was; waits until the device is through with it. After ``end``."""


class Export(ABC):
    """One block of device memory that other processes of the node may map.

    Attributes:
        memory: (nbytes,) uint8 on the device.
        ticket: what ``Accelerator.attach`` needs in another process.
    """

    memory: Tensor
    ticket: bytes

    def seal(self) -> None:
        """Everybody who needs it has attached it; nobody else can any more, where that can be had."""
        return

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; nobody may have it attached or point into it."""


class Attached(ABC):
    """A block that another process has exported.

    Attributes:
        memory: (nbytes,) uint8 on the device.
    """

    memory: Tensor

    @abstractmethod
    def close(self) -> None:
        """Unmap it; nobody may point into it."""


class Accelerator(ABC):
    """One device of this process.

    Attributes:
        device: of torch.
        is_host: whether its memory is the host's: every call is done when it returns, and MPI sees the memory.
    """

    device: torch.device
    is_host: bool = False

    @abstractmethod
    def mark(self) -> Mark:
        """Behind what torch has started on this thread's current lane."""

    def finish(self) -> None:
        """Return when what torch has started on this thread's current lane is done."""
        self.mark().wait()

    @abstractmethod
    def span(self) -> Span:
        """Begins behind what torch has started on this thread's current lane."""

    @abstractmethod
    def lane(self) -> Lane:
        """A new one."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 of host memory that lanes can copy from and to without the processor."""

    @abstractmethod
    def export(self, nbytes: int) -> Export:
        """Memory that other processes of this node can map.

        Raises:
            CommError: there is not enough; or such memory cannot be shared here, with the remedy.
        """

    @abstractmethod
    def attach(self, ticket: bytes, nbytes: int) -> Attached:
        """Map what another process exported; a process cannot map its own.

        Raises:
            CommError: it cannot be seen from here, with the remedy.
        """

    def bring(self, tensor: Tensor) -> Tensor:
        """``tensor`` of the host, on the device for what is started here from now on; does not wait for the device."""
        return tensor

    @property
    def identity(self) -> str:
        """Names the device on its host, whatever number this process knows it by; empty on the host."""
        return ""

    @abstractmethod
    def describe(self) -> str:
        """One line for a run header."""

    @abstractmethod
    def usage(self) -> Mapping[str, int]:
        """Bytes on the device: ``allocated``, ``reserved``, their peaks, ``total``, and more; none on the host."""

    def reset_peak(self) -> None:
        """Start new peaks."""
        return

    def enter_thread(self) -> None:
        """Make this device the current one of the calling thread: in CUDA the choice belongs to a thread."""
        return
