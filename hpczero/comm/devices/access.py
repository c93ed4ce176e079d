"""How MPI gets at device memory: not at all, by its address, or through pinned memory of the host.

Owns: the waits before MPI is called (accelerator/base.py: [Note: Two clocks]) and the choice of the wrapper around each
algorithm. Must not know: which algorithm, units, nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, HostAccelerator, Lane
from hpczero.comm.algorithms import Exchange, Gather, Meanwhile, Prepare
from hpczero.comm.algorithms.blocks import CHUNK_BYTES, Blocks
from hpczero.comm.devices.staged import StagedExchange, StagedGather


class Reach(ABC):
    """Makes algorithms that work on the memory of ``accelerator``."""

    name: str

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    @abstractmethod
    def gather(
        self, kind: type[Gather], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Gather:
        """An algorithm of class ``kind`` on ``comm``. Not collective."""

    @abstractmethod
    def exchange(
        self, kind: type[Exchange], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Exchange:
        """An algorithm of class ``kind`` on ``comm``. Not collective."""

    def outgoing(self, data: Tensor) -> Tensor:
        """Memory that MPI may read now, with the bytes of ``data``, a contiguous tensor that nobody writes to."""
        self.accelerator.finish()
        return data

    def incoming(self, data: Tensor) -> Tensor:
        """Memory that MPI may write to now, for the bytes of ``data``, a contiguous tensor; ``landed`` follows."""
        self.accelerator.finish()  # its memory may have been another tensor's, which a kernel still reads
        return data

    def landed(self, data: Tensor, memory: Tensor) -> None:
        """Have in ``data`` what MPI has written to ``memory``, which ``incoming`` gave."""
        return

    def broadcast(self, comm: MPI.Intracomm, blocks: Blocks, root: int) -> None:
        """Give every rank ``root``'s block 0.

        Collective over ``comm``. It is rare, so it goes through the host, in pieces.
        """
        for piece in blocks.pieces(CHUNK_BYTES):
            device = piece.view(0)
            host = device.cpu()
            comm.Bcast([MPI.buffer.fromaddress(host.data_ptr(), len(host)), MPI.BYTE], root=root)
            if comm.rank != root and host.data_ptr() != device.data_ptr():
                device.copy_(host)


class HostReach(Reach):
    """The memory is the host's; MPI sees it as it is."""

    name = "host memory"

    def __init__(self) -> None:
        super().__init__(HostAccelerator())

    @override
    def gather(
        self, kind: type[Gather], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Gather:
        return kind(comm, chunk_nbytes=chunk_nbytes)

    @override
    def exchange(
        self, kind: type[Exchange], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Exchange:
        return kind(comm, chunk_nbytes=chunk_nbytes)


class DirectReach(Reach):
    """This MPI takes addresses of device memory: it is CUDA-aware."""

    name = "device memory given to MPI"

    @override
    def gather(
        self, kind: type[Gather], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Gather:
        return _DirectGather(kind(comm, chunk_nbytes=chunk_nbytes), self.accelerator)

    @override
    def exchange(
        self, kind: type[Exchange], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Exchange:
        return _DirectExchange(kind(comm, chunk_nbytes=chunk_nbytes), self.accelerator)


class StagedReach(Reach):
    """This MPI knows the host's memory only. Everything goes through pinned memory, in pieces that overlap."""

    name = "device memory through the host"

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._copies: Lane | None = None

    @override
    def outgoing(self, data: Tensor) -> Tensor:
        memory = self._host_memory(data)
        self._copy(memory, _bytes_of(data))
        return memory

    @override
    def incoming(self, data: Tensor) -> Tensor:
        return self._host_memory(data)

    @override
    def landed(self, data: Tensor, memory: Tensor) -> None:
        self._copy(_bytes_of(data), memory)

    def _host_memory(self, data: Tensor) -> Tensor:
        return self.accelerator.pinned(data.numel() * data.element_size())

    def _copy(self, into: Tensor, source: Tensor) -> None:
        """Wait for the copy: MPI, or whoever gets the memory next, knows nothing of lanes."""
        if self._copies is None:
            self._copies = self.accelerator.lane()
        self._copies.after(self.accelerator.mark())
        self._copies.copy(into, source)
        self._copies.finish()

    @override
    def gather(
        self, kind: type[Gather], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Gather:
        return StagedGather(kind(comm, chunk_nbytes=chunk_nbytes), self.accelerator)

    @override
    def exchange(
        self, kind: type[Exchange], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Exchange:
        return StagedExchange(kind(comm, chunk_nbytes=chunk_nbytes), self.accelerator)


def _bytes_of(data: Tensor) -> Tensor:
    """(nbytes,) uint8 of a contiguous tensor; no copy."""
    return data.view(-1).view(torch.uint8)


class _DirectGather(Gather):
    """Waits for the device, then lets the inner algorithm work on its memory."""

    def __init__(self, inner: Gather, accelerator: Accelerator) -> None:
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = inner.name  # type: ignore[misc]  # of this one object
        self.in_rounds = inner.in_rounds  # type: ignore[misc]  # of this one object
        self._inner = inner
        self._accelerator = accelerator

    @override
    def __call__(self, blocks: Blocks, *, round_nbytes: int = CHUNK_BYTES) -> None:
        if blocks.count > 1:
            self._accelerator.finish()
            self._inner(blocks, round_nbytes=round_nbytes)
            self.messages = self._inner.messages

    def _gather(self, blocks: Blocks) -> None:
        raise AssertionError("the inner one does it")

    @override
    def free(self) -> None:
        self._inner.free()


class _DirectExchange(Exchange):
    """Has all blocks of a round made, and waits for the device once before the first leaves.

    The messages of the round before travel meanwhile.
    """

    def __init__(self, inner: Exchange, accelerator: Accelerator) -> None:
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = inner.name  # type: ignore[misc]  # of this one object
        self._inner = inner
        self._accelerator = accelerator

    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None:
        prepare(0, send.count)
        # What was read from ``receive`` before has then been read as well.
        self._accelerator.finish()
        self._inner(send, receive, meanwhile=meanwhile)
        self.messages = self._inner.messages

    @override
    def finish(self) -> None:
        self._inner.finish()

    @override
    def free(self) -> None:
        self._inner.free()
