"""A device that is only pretended: its memory is the host's, and what a real device would not do is told.

Every tensor counts as one of the host or of the device, and says so in ``tensor.device`` (``sides``):

    with pretended_device() as device:
        hpczero.zeroify(model, optimizer, device=device.accelerator)
        batch = device.accelerator.bring(tokens)    of the device
        model(batch)                                so is what comes of it
        model(tokens)                               a fault: weights of the device, tokens of the host
    assert not device.faults

Told are operations on tensors of both sides and on generators of the host, memory of the device that MPI or NumPy is
given, copies of lanes that would wait, and copies whose memory is gone too early. Counted is where the host would wait.
What comes too late or in another order is not seen: ``late`` is a device for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from hpczero.accelerator import Attached, HostAccelerator, Lane, Mark, MemoryExport
from tests.helpers.sides import DEVICE, Sides, line_now, replaced_functions, replaced_methods


class Copy:
    """One by a lane. A real device may not have begun it before somebody has waited for it."""

    def __init__(self, sides: Sides, tensors: Sequence[Tensor]) -> None:
        self.is_over = False
        self._sides, self._line = sides, line_now()
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    def end(self) -> None:
        """Somebody has waited for it."""
        if not self.is_over and any(storage.expired() for storage in self._storages):
            self._sides.tell("memory is gone before its copy was waited for", self._line)
        self.is_over = True


class PretendedMark(Mark):
    """Has passed at once; whoever waits for it would have waited."""

    def __init__(self, sides: Sides, behind: Sequence[Copy | PretendedMark] = ()) -> None:
        self.is_over = False
        self._sides, self._behind = sides, behind

    @override
    def wait(self) -> None:
        self._sides.waits["mark"] += 1
        self.end()

    def end(self) -> None:
        """Somebody has waited for it, and so for all that it is behind."""
        behind, self._behind, self.is_over = self._behind, (), True
        for each in behind:
            each.end()


class PretendedLane(Lane):
    """Does everything at once; nobody waits for it."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        self._begun: list[Copy | PretendedMark] = []

    @override
    def after(self, mark: Mark) -> None:
        assert isinstance(mark, PretendedMark), "marks of one kind of device"
        self._begun.append(mark)

    @override
    def copy(self, into: Tensor, source: Tensor) -> None:
        sides = self._sides
        if not all(tensor in sides.device or tensor in sides.pinned for tensor in (into, source)):
            sides.tell("a lane copies memory of the host that is not pinned, and waits for it")
        with torch._C._DisableTorchDispatch():  # it is no wait
            into.copy_(source)
        self._begun.append(Copy(sides, (into, source)))

    @override
    def mark(self) -> Mark:
        self._begun = [each for each in self._begun if not each.is_over]
        return PretendedMark(self._sides, tuple(self._begun))

    @override
    @contextmanager
    def current(self) -> Iterator[None]:
        yield


class PretendedAccelerator(HostAccelerator):
    """Gives out memory of the device, and of the host, as a real one does."""

    is_host = False

    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self.device = DEVICE
        self._sides = sides

    @override
    def mark(self) -> Mark:
        return PretendedMark(self._sides)

    @override
    def lane(self) -> Lane:
        return PretendedLane(self._sides)

    @override
    def pinned(self, nbytes: int) -> Tensor:
        memory = super().pinned(nbytes)
        self._sides.pinned.put(memory)
        return memory

    @override
    def export(self, nbytes: int) -> MemoryExport:
        block = super().export(nbytes)
        self._sides.device.put(block.memory)
        return block

    @override
    def attach(self, ticket: bytes, nbytes: int) -> Attached:
        block = super().attach(ticket, nbytes)
        self._sides.device.put(block.memory)
        return block

    @override
    def bring(self, tensor: Tensor) -> Tensor:
        return self._sides.moved(tensor, tensor, on_device=True)

    @property
    @override
    def identity(self) -> str:
        return "pretended"

    @override
    def describe(self) -> str:
        return "a pretended device"

    @override
    def usage(self) -> Mapping[str, int]:
        names = "allocated allocated_peak reserved reserved_peak inactive_split retries used_by_all"
        return {**dict.fromkeys(names.split(), 0), "total": 2**36}

    @override
    def enter_thread(self) -> None:
        self._sides.watch_thread()


class PretendedDevice:
    """What a test has of the device.

    Attributes:
        accelerator: for ``zeroify``.
        faults: what a real device would not have done, with the line that asked for it.
        waits: of the host for the device, by what made it wait.
    """

    def __init__(self, sides: Sides) -> None:
        self.accelerator = PretendedAccelerator(sides)
        self.faults: list[str] = sides.faults
        self.waits: Counter[str] = sides.waits


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """There is a device inside, of which nothing is used afterwards. Starts MPI where it has not; not collective."""
    from mpi4py import MPI

    sides = Sides()
    with pytest.MonkeyPatch.context() as patch:
        for name, method in replaced_methods(sides).items():
            patch.setattr(Tensor, name, method)
        for name, function in replaced_functions(sides).items():
            patch.setattr(torch, name, function)
        patch.setattr(MPI, "buffer", watched_buffer(sides, MPI.buffer))
        with sides.watched():
            yield PretendedDevice(sides)


def watched_buffer(sides: Sides, buffer: Any) -> type:
    """MPI's class ``buffer``, which tells of addresses of the device."""

    class Watched:
        def __new__(cls, *args: Any) -> Any:
            return buffer(*args)

        @staticmethod
        def fromaddress(address: int, nbytes: int, readonly: bool = False) -> Any:
            if nbytes and sides.device.have_address(address, nbytes):
                sides.tell("MPI is given memory of the device")
            return buffer.fromaddress(address, nbytes, readonly)

    return Watched
