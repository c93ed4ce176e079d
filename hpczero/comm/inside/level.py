"""What a transport needs inside a node, and the way that works everywhere: messages.

Owns: the contract of a node level, and its form by MPI messages. Must not know: other nodes, the order of sums, units.

On a node of ``size`` ranks a buffer of whole parameters or gradients has ``size`` equal parts. Part l belongs to local
rank l. It holds the shards of all ranks with that local rank, one from each node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ClassVar

import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.algorithms import LibraryExchange, LibraryGather
from hpczero.comm.algorithms.base import Blocks
from hpczero.comm.devices.access import Reach
from hpczero.memory.buffers import CPU, Buffer, Memory, Scratch, Use
from hpczero.plan.rounds import EXCHANGE_BYTES

# Elements [start, start + count) of a buffer, as every local rank has them, in local order.
Parts = Callable[[int, int], list[Tensor]]


class NodeLevel(ABC):
    """The ranks of one node. Every method is collective over the node unless it says otherwise.

    Attributes:
        title: what it is called in a run header.
        most_nbytes: most bytes that one call of ``Parts`` may ask for, over all ranks of the node.
        reads_peers: whether ranks read each other's memory, without a message.
        shares_wholes: whether the node has one copy of whole parameters.
    """

    title: ClassVar[str]
    most_nbytes: ClassVar[int]
    reads_peers: ClassVar[bool] = True
    shares_wholes: bool = False

    def __init__(self, node: MPI.Intracomm, memory: Memory, *, device: torch.device = CPU) -> None:
        """Not collective. The communicator is borrowed; private buffers are on ``device``."""
        self.comm = node
        self.memory = memory
        self.device = device

    def allocate(
        self, numel: int, dtype: torch.dtype, *, category: str, use: Use, keep: bool
    ) -> Buffer:
        """A buffer as of ``Collectives.allocate``; private memory in this base class."""
        return Buffer(
            numel, dtype, memory=self.memory, category=category, keep=keep, device=self.device
        )

    def settle(self) -> None:
        """Say that all buffers with a use have been asked for."""
        return

    def shares(self, full: Tensor, use: Use) -> bool:
        """Whether peers see ``full`` without a message. Not collective; the same on every rank of the node."""
        return False

    @abstractmethod
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        """Give every rank of the node all parts of ``full``, in place. Each rank has its own part already.

        Returns:
            What is left to do before the parts of others may be read; None for nothing.
        """

    @abstractmethod
    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        """Context: ``Parts`` of every rank's ``full``. Each rank asks for elements of its own part.

        The ranks make as many calls, the same ones as seen from the beginning of their parts. A result of ``Parts`` is
        valid until the next call. If ``shares(full, Use.REDUCE)``, this call itself lets peers read. The block may then
        be entered later, in the order of the calls.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything but the memory of buffers."""


class Messages(NodeLevel):
    """Private buffers and MPI messages."""

    title = "messages"
    most_nbytes = EXCHANGE_BYTES
    reads_peers = False

    def __init__(
        self, node: MPI.Intracomm, memory: Memory, *, chunk_nbytes: int, reach: Reach
    ) -> None:
        """Not collective."""
        super().__init__(node, memory, device=reach.accelerator.device)
        self._gather = reach.gather(LibraryGather, node, chunk_nbytes=chunk_nbytes)
        self._exchange = reach.exchange(LibraryExchange, node)
        self._received = Scratch(memory, category="exchange", device=self.device)

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        part = full.numel() // self.comm.size
        self._gather(Blocks.of(full, 0, part, part, self.comm.size))
        return None

    @contextmanager
    @override
    def reading(self, full: Tensor) -> Iterator[Parts]:
        size, me = self.comm.size, self.comm.rank
        part = full.numel() // size

        def parts(start: int, count: int) -> list[Tensor]:
            if size == 1:
                return [full[start : start + count]]
            received = self._received.get(size * count, full.dtype)
            self._exchange(
                Blocks.of(full, start - me * part, count, part, size),
                Blocks.of(received, 0, count, count, size),
            )
            self._exchange.finish()
            rows = list(received.view(size, count).unbind())
            rows[me] = full[start : start + count]
            return rows

        yield parts

    def close(self) -> None:
        """Free datatypes and the memory to receive into. Not collective here."""
        self._gather.free()
        self._exchange.free()
        self._received.release()
