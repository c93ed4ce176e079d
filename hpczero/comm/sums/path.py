"""The contract of a path, by which activations go from rank to rank.

Owns: what one exchange promises, the pieces of tensors that are too large for one, and the check that all ranks are in
the same call. Must not know: sums, dimensions, autograd.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, Attached, Mark
from hpczero.comm.inside.segment import Counters
from hpczero.errors import CommError
from hpczero.job.group import Group


class Call(NamedTuple):
    """What a rank tells the others of its call.

    Attributes:
        kind: a number that is equal where verb, dtype and shape are.
        numel: elements that it brings; 0 where they are the same on all ranks.
        length: size of the dimension in which ranks may differ; 0 where there is none.
    """

    kind: int
    numel: int = 0
    length: int = 0


class Path(ABC):
    """One way to exchange tensors over ``group``.

    Attributes:
        group: borrowed.
        room_nbytes: bytes that one rank brings to one exchange at most, a multiple of 64 for each rank.
    """

    def __init__(self, group: Group, room_nbytes: int) -> None:
        """Not collective.

        Args:
            group: the ranks.
            room_nbytes: rounded up to 64 bytes for each rank.
        """
        self.group = group
        unit = 64 * group.size
        self.room_nbytes = max(1, -(-room_nbytes // unit)) * unit

    def gather(self, own: Tensor, call: Call, say: Callable[[], str]) -> Gathered:
        """What every rank brings. Collective over the group.

        The rows may lie in memory of others. Read them before the next exchange.

        Args:
            own: any shape and strides; ranks may bring different numbers of elements.
            call: with ``numel``.
            say: names the call where ranks differ.

        Raises:
            CommError: ranks are in different calls; on every rank.
        """
        room = self.room_nbytes // own.element_size()
        if own.numel() > room:
            own = own.contiguous().view(-1)
        calls, rows = self._exchange([_piece(own, 0, room)], call, say, whole=True)
        lengths = [other.length for other in calls]
        most = max(other.numel for other in calls)
        if most <= room:
            return Gathered(rows, lengths)
        full = [own.new_empty(other.numel) for other in calls]
        for start in range(0, most, room):
            if start:
                _, rows = self._exchange(
                    [_piece(own, start, room)], call, say, whole=True, start=start
                )
            for row, into in zip(rows, full, strict=True):
                into[start : start + room].copy_(row)
        return Gathered(full, lengths)

    def swap(self, parts: Sequence[Tensor], call: Call, say: Callable[[], str]) -> list[Tensor]:
        """What every rank has brought for this one. Collective over the group.

        Args:
            parts: one for each rank, any strides. Part i has the same shape on every rank.
            call: without ``numel``.
            say: names the call where ranks differ.

        Returns:
            Flat rows, one from each rank. They may lie in memory of others: read them before the next exchange.

        Raises:
            CommError: ranks are in different calls; on every rank.
        """
        room = self.room_nbytes // self.group.size // parts[0].element_size()
        most = max(part.numel() for part in parts)
        if most <= room:
            return self._exchange(parts, call, say, whole=False)[1]
        flat = [part.contiguous().view(-1) for part in parts]
        own = flat[self.group.rank]
        full = [own.new_empty(own.numel()) for _ in flat]
        for start in range(0, most, room):
            pieces = [_piece(part, start, room) for part in flat]
            _, rows = self._exchange(pieces, call, say, whole=False, start=start)
            for row, into in zip(rows, full, strict=True):
                into[start : start + room].copy_(row)
        return full

    @abstractmethod
    def _exchange(
        self,
        parts: Sequence[Tensor],
        call: Call,
        say: Callable[[], str],
        *,
        whole: bool,
        start: int = 0,
    ) -> tuple[list[Call], list[Tensor]]:
        """One exchange: what every rank says of its call, and what it has brought for this rank, flat.

        Args:
            parts: one for each rank that fits its share of the room; with ``whole`` one alone, for all.
            call: of this rank.
            say: names the call where ranks differ.
            whole: whether all ranks read the same.
            start: elements of the call that earlier exchanges have moved.
        """

    def done(self) -> None:
        """Say that the rows of the last exchange have been read, on a device: that the reads were started."""
        return

    @abstractmethod
    def close(self) -> None:
        """Give memory and communicators back. Collective over the group."""

    def _check(self, calls: Sequence[Call], say: Callable[[], str]) -> None:
        """Raise if ranks are in different calls. All see the same ``calls``, so all raise."""
        kinds = [call.kind for call in calls]
        if len(set(kinds)) == 1:
            return
        said = self.group.gather_text(say())
        odd = (
            next(rank for rank, text in enumerate(said) if text != said[0])
            if len(set(said)) > 1
            else 0
        )
        error = CommError(
            f"ranks that exchange tensors are in different calls: rank {odd} of the group in {said[odd]}, rank 0 in "
            f"{said[0]}; "
            "give all of them the same calls: the same model, the same samples and the same shapes"
        )
        error.agreed = True
        raise error


class Gathered(NamedTuple):
    """What ``Path.gather`` has found.

    Attributes:
        rows: what each rank brought, flat.
        lengths: ``Call.length`` of each rank.
    """

    rows: list[Tensor]
    lengths: list[int]


def kind_of(*facts: object) -> int:
    """A number that is equal on all ranks for equal ``facts``, of which the text says all."""
    return zlib.crc32(repr(facts).encode())


def found_numel(call: Call, own: int, room: int, start: int, *, whole: bool) -> int:
    """Elements that a rank with ``call`` has brought to an exchange for this rank."""
    return min(max(call.numel - start, 0), room) if whole else own


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, (nbytes,) uint8."""
    if not tensor.numel():  # torch gives it a stride that cannot be viewed
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)


def _piece(own: Tensor, start: int, room: int) -> Tensor:
    return own if not start and own.numel() <= room else own[start : start + room]


PIECE_NBYTES = 64 * 2**20


def give_values(group: Group, tensor: Tensor) -> None:
    """Give every rank the values of the group's rank 0, in place. Collective over ``group``.

    Args:
        group: the ranks.
        tensor: any dtype, device and strides; the same dtype and shape on every rank.
    """
    if group.size == 1 or not tensor.numel():
        return
    with torch.no_grad(), group.watchdog.collective("give_values"):
        host = tensor.detach().contiguous().cpu()
        for piece in torch.split(as_bytes(host), PIECE_NBYTES):
            group.comm.Bcast(piece.numpy(), root=0)
        if group.rank and host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)


MESSAGE_NBYTES = 32 * 2**20


class Messages(Path):
    """Ranks that send each other what they bring."""

    def __init__(self, group: Group, *, room_nbytes: int = MESSAGE_NBYTES) -> None:
        """Collective over ``group``.

        Args:
            group: borrowed. Messages have a communicator of their own: another thread may reduce gradients meanwhile.
            room_nbytes: bytes that one rank sends in one exchange.
        """
        super().__init__(group.beside(), room_nbytes)

    @override
    def _exchange(
        self,
        parts: Sequence[Tensor],
        call: Call,
        say: Callable[[], str],
        *,
        whole: bool,
        start: int = 0,
    ) -> tuple[list[Call], list[Tensor]]:
        group, dtype, device = self.group, parts[0].dtype, parts[0].device
        found = np.empty((group.size, len(call)), dtype=np.int64)
        group.comm.Allgather(np.array(call, dtype=np.int64), found)
        calls = [Call(*row) for row in found.tolist()]
        self._check(calls, say)
        room = (self.room_nbytes if whole else self.room_nbytes // group.size) // dtype.itemsize
        own = parts[0 if whole else group.rank].numel()
        numels = [found_numel(other, own, room, start, whole=whole) for other in calls]
        # To the host: it waits for the device.
        sent = torch.cat([as_bytes(part.detach().contiguous().cpu()) for part in parts])
        received = torch.empty(sum(numels) * dtype.itemsize, dtype=torch.uint8, device="cpu")
        counts = [numel * dtype.itemsize for numel in numels]
        into = [received.numpy(), counts, MPI.BYTE]
        if whole:
            group.comm.Allgatherv([sent.numpy(), MPI.BYTE], into)
        else:
            sizes = [part.numel() * dtype.itemsize for part in parts]
            group.comm.Alltoallv([sent.numpy(), sizes, MPI.BYTE], into)
        return calls, list(torch.split(received.view(dtype).to(device), numels))

    @override
    def close(self) -> None:
        self.group.comm.Free()


# Sleep until another rank of the node has come far enough: a rank that waits leaves its core to those that work.
#
# Ranks of a layer wait for each other many times in a step. Where there are more ranks than cores, whoever looks again
# and again takes time from those that it waits for. A rank therefore looks for a moment, and then sleeps in the kernel.
# It wakes at least every millisecond, so that MPI's messages go on. Where there is no futex (other systems than Linux,
# or a processor that is not known here) it looks again and again, as ``Counters`` do.
#
# Source: futex(2); the numbers of the call are those of the kernel's tables.

FUTEX = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}
WAIT, WAKE = range(2)
EVERYBODY = 2**31 - 1
LOOKS = 30  # before it sleeps
NAP_NS = 10**6


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Bell:
    """Tells others that a counter has changed, and waits for theirs."""

    def __init__(self, comm: MPI.Intracomm, counters: Counters, column: int) -> None:
        """Not collective.

        Args:
            comm: the ranks of the counters; MPI's messages go on while this one waits.
            counters: borrowed.
            column: which of their numbers.
        """
        self._comm, self._counters, self._column = comm, counters, column
        self._addresses = [
            ctypes.c_void_p(counters.address(rank, column)) for rank in range(comm.size)
        ]
        known = sys.platform == "linux" and sys.byteorder == "little"
        self._number = FUTEX.get(platform.machine()) if known else None
        self._call = ctypes.CDLL(None).syscall
        self._nap = ctypes.byref(_Time(0, NAP_NS))

    def publish(self, value: int) -> None:
        """Say that this rank has come to ``value``, and wake who sleeps until it does."""
        self._counters.publish(self._column, value)
        if self._number is not None:
            address = self._addresses[self._comm.rank]
            self._call(self._number, address, WAKE, EVERYBODY, None, None, 0)

    def wait(self, value: int) -> None:
        """Return when every rank has come to ``value``."""
        counters, column = self._counters, self._column
        if self._number is None:
            counters.wait(column, value)
            return
        for _ in range(LOOKS):
            if counters.reached(column, value):
                return
        for rank, address in enumerate(self._addresses):
            while (seen := counters.read(rank, column)) < value:
                self._comm.Iprobe()  # a peer may wait for the rest of a message of ours
                # It returns at once if the counter has changed since it was read.
                low = ctypes.c_uint32(seen & 0xFFFFFFFF)
                self._call(self._number, address, WAIT, low, self._nap, None, 0)
        counters.wait(column, value)


# The path of one node: each rank exports a block, copies what it brings into it, and reads from the others' blocks.
#
#     copy into own block | wait for the device | told | read the others' blocks
#
# [Note: Two halves]
# A block has two halves, which exchanges take by turns. One wait for each exchange is then enough. A rank that fills a
# half for exchange n + 2 has seen that all have come to n + 1. Whoever has come to n + 1 has read all it wanted of n.

HALVES = 2
ROOM_NBYTES = 8 * 2**20
# Columns of the counters: exchanges, then what a rank says of its call, for each half.
EXCHANGES, SAID = range(2)
COLUMNS = SAID + HALVES * len(Call._fields)


class Shared(Path):
    """Ranks of one node that read each other's memory."""

    def __init__(
        self, group: Group, accelerator: Accelerator, *, room_nbytes: int = ROOM_NBYTES
    ) -> None:
        """Collective over ``group``.

        Args:
            group: borrowed; all its ranks are on one node.
            accelerator: whose memory the tensors are in.
            room_nbytes: of one half of a block.

        Raises:
            CommError: there is not enough memory, or ranks cannot map it; on every rank.
        """
        super().__init__(group, room_nbytes)
        self._accelerator = accelerator
        self._attached: list[Attached] = []
        self._blocks: list[Tensor] = []
        self._exchanges = 0
        self._read: Mark = accelerator.mark()
        nbytes = HALVES * self.room_nbytes
        with group.agreed("export memory for activations to the ranks of the node"):
            self._block = accelerator.export(nbytes)
        tickets = group.comm.allgather(self._block.ticket)
        with group.agreed("map the memory for activations of the ranks of the node"):
            for rank, ticket in enumerate(tickets):
                if rank == group.rank:
                    self._blocks.append(self._block.memory)
                else:
                    self._attached.append(accelerator.attach(ticket, nbytes))
                    self._blocks.append(self._attached[-1].memory)
        group.comm.Barrier()
        self._block.seal()
        self._counters = Counters(group.comm, COLUMNS)
        self._bell = Bell(group.comm, self._counters, EXCHANGES)

    @override
    def _exchange(
        self,
        parts: Sequence[Tensor],
        call: Call,
        say: Callable[[], str],
        *,
        whole: bool,
        start: int = 0,
    ) -> tuple[list[Call], list[Tensor]]:
        group, counters, dtype = self.group, self._counters, parts[0].dtype
        room = self.room_nbytes if whole else self.room_nbytes // group.size
        self._exchanges = number = self._exchanges + 1
        half = number % HALVES
        first = half * self.room_nbytes
        for index, part in enumerate(parts):
            if part.numel():
                at = first + index * room
                place = self._blocks[group.rank][at : at + part.numel() * dtype.itemsize]
                place.view(dtype).view(part.shape).copy_(part)
        self._read.wait()  # another lane may have read the last rows
        self._accelerator.finish()
        column = SAID + half * len(call)
        for place_of, value in enumerate(call, column):
            counters.publish(place_of, value)
        self._bell.publish(number)
        self._bell.wait(number)
        calls = [
            Call(*(counters.read(rank, place_of) for place_of in range(column, column + len(call))))
            for rank in range(group.size)
        ]
        self._check(calls, say)
        at = first if whole else first + group.rank * room
        own = parts[0 if whole else group.rank].numel()
        rows = []
        for other, block in zip(calls, self._blocks, strict=True):
            numel = found_numel(other, own, room // dtype.itemsize, start, whole=whole)
            rows.append(block[at : at + numel * dtype.itemsize].view(dtype))
        return calls, rows

    @override
    def done(self) -> None:
        self._read = self._accelerator.mark()

    @override
    def close(self) -> None:
        self._accelerator.finish()
        self._blocks.clear()
        for attached in self._attached:
            attached.close()
        self._attached.clear()
        self.group.comm.Barrier()  # nobody has it mapped when its owner gives it back
        self._counters.free()
        with contextlib.suppress(Exception):  # the job ends; the driver takes it back anyway
            self._block.close()
