"""What the ranks of a node share: segments of shared memory, counters, blocks of peers, and the level of a node."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, Attached, MemoryExport
from hpczero.comm.algorithms import BlockMessages, LibraryExchange, LibraryGather
from hpczero.comm.devices import Reach
from hpczero.errors import CommError
from hpczero.job.group import Group
from hpczero.memory.buffers import CPU, Buffer, Memory, Scratch, Use
from hpczero.memory.pages import padded
from hpczero.plan.footprint import EXCHANGE_BYTES

# What a transport needs inside a node, and the way that works everywhere: messages.
#
# On a node of ``size`` ranks a buffer of whole parameters or gradients has ``size`` equal parts. Part l belongs to
# local rank l. It holds the shards of all ranks with that local rank, one from each node.

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

        The result is what is left to do before the parts of others may be read; None for nothing.
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


class MessageLevel(NodeLevel):
    """Private buffers and MPI messages."""

    title = "messages"
    most_nbytes = EXCHANGE_BYTES
    reads_peers = False

    def __init__(
        self, node: MPI.Intracomm, memory: Memory, *, chunk_nbytes: int, reach: Reach
    ) -> None:
        """Not collective."""
        super().__init__(node, memory, device=reach.accelerator.device)
        self._messages = BlockMessages(
            reach.gather(LibraryGather, node, chunk_nbytes=chunk_nbytes),
            reach.exchange(LibraryExchange, node),
            Scratch(memory, category="exchange", device=self.device),
        )

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        self._messages.spread(full)
        return None

    @override
    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        return nullcontext(partial(self._messages.parts, full))

    @override
    def close(self) -> None:
        self._messages.free()


# Memory that the ranks of one node see together.
#
# A segment is a file in /dev/shm without a name. It is unlinked as soon as every rank has mapped it, so nothing is left
# behind however a job ends. Its memory lives as long as the last tensor that points into it.
#
# [Note: Full /dev/shm]
# A process that touches a page which a full tmpfs cannot give is killed (SIGBUS). Pages are therefore asked for
# beforehand (posix_fallocate), which fails with an error instead. On NUMA machines they lie near the rank that asks.

FOLDER = Path("/dev/shm")
PAGE = mmap.PAGESIZE
# mman.h: the same on all Linux but Alpha, MIPS and PA-RISC
FIXED, NORESERVE = 0x10, 0x4000
NOTHING = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NORESERVE  # no memory until something is put there
READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
POLLS_BEFORE_YIELD = 50
NAP_S = 50e-6
PUNCH_HOLE = 0x3  # falloc.h: FALLOC_FL_PUNCH_HOLE, and the size stays
LINE = 64  # bytes of a cache line: ranks must not slow each other down by writing side by side


class Segment:
    """Bytes that all ranks of ``node`` read and write.

    Attributes:
        bytes: (nbytes,) uint8, zero at first; empty where the segment is not mapped.
        file: descriptor, for who maps parts of it elsewhere; -1 once it is closed.
    """

    def __init__(self, file: int, memory: Tensor | None) -> None:
        """Take over ``file``. Use ``create`` to make a segment."""
        self.file = file
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu") if memory is None else memory

    def __del__(self) -> None:
        self.close_file()

    def close_file(self) -> None:
        """Nothing more is claimed or given back. The map is closed when the last tensor on it dies."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    @classmethod
    def create(cls, node: MPI.Intracomm, nbytes: int, what: str, *, mapped: bool = True) -> Segment:
        """Make a segment of ``nbytes``, rounded up to pages. Collective over ``node``, whose ranks may share memory.

        ``what`` names it in messages. ``mapped`` is False for who maps parts of the segment by itself.

        Raises:
            CommError: it cannot be made, or some rank cannot see it; on every rank.
        """
        nbytes = padded(max(nbytes, 1), PAGE)
        name, file, memory, problem = "", -1, None, ""
        if node.rank == 0:
            name = f"hpczero-{os.getpid()}-{secrets.token_hex(8)}"
            flags = os.O_CREAT | os.O_EXCL
            file, memory, problem = _open(FOLDER / name, nbytes, flags, mapped=mapped)
        name, problem = node.bcast((name, problem), root=0)
        if not problem and node.rank > 0:
            file, memory, problem = _open(FOLDER / name, nbytes, 0, mapped=mapped)
        problems = [said for said in node.allgather(problem) if said]
        if node.rank == 0 and file >= 0:
            os.unlink(FOLDER / name)
        if not problems:
            return cls(file, memory)
        if file >= 0:
            os.close(file)
        raise CommError(
            f"no shared memory for {what}: {problems[0]}; look at ulimit -v, at ulimit -n if too many files are open, "
            f"and at the size of {FOLDER} (--shm-size of a container), or use transport flat, which shares none "
            "(HPCZERO_TRANSPORT=flat)"
        ).on_all_ranks()

    def claim(self, start: int, stop: int) -> None:
        """Have memory behind bytes ``start`` to ``stop``, near this rank.

        Raises CommError if there is no memory left ([Note: Full /dev/shm]).
        """
        if stop > start:
            try:
                os.posix_fallocate(self.file, start, stop - start)
            except OSError as error:
                raise CommError(
                    f"{stop - start:,} more bytes of {FOLDER}: {error.strerror}; free some of it, enlarge it "
                    "(mount -o remount,size=...), or use transport flat"
                ) from error

    def give_back(self, start: int, stop: int) -> None:
        """Return the pages that lie wholly within bytes ``start`` to ``stop``. Their content is lost for all ranks."""
        start, stop = padded(start, PAGE), stop // PAGE * PAGE
        if stop > start and _fallocate(self.file, PUNCH_HOLE, start, stop - start):
            number = ctypes.get_errno()
            raise OSError(number, f"{stop - start:,} bytes of shared memory: {os.strerror(number)}")


class Counters:
    """Numbers that only grow, ``columns`` for each rank of a node. They say what each rank has done so far."""

    def __init__(self, node: MPI.Intracomm, columns: int, *, naps: bool = False) -> None:
        """Collective over ``node``, which is borrowed. Each rank has ``columns`` numbers.

        With ``naps`` a long wait sleeps between looks, because another thread of the process has work for the core.
        """
        self._node = node
        self._naps = naps
        self._window = MPI.Win.Allocate_shared(columns * LINE, 8, comm=node)
        self._window.Lock_all()
        rows: list[npt.NDArray[np.int64]] = []
        for rank in range(node.size):
            memory, _ = self._window.Shared_query(rank)
            rows.append(np.asarray(memory).view(np.int64)[: columns * LINE // 8 : LINE // 8])
        self._rows = rows
        rows[node.rank][:] = 0
        self._window.Sync()
        node.Barrier()

    def publish(self, column: int, value: int) -> None:
        """Say that this rank has come to ``value``. Whoever sees the number also sees what was written before."""
        self._window.Sync()
        self._rows[self._node.rank][column] = value
        self._window.Sync()

    def read(self, rank: int, column: int) -> int:
        """Value that ``rank`` has come to."""
        return int(self._rows[rank][column])

    def address(self, rank: int, column: int) -> int:
        """Where the number lies in this process: 8 bytes that all ranks of the node share."""
        return int(self._rows[rank][column:].ctypes.data)

    def reached(self, column: int, value: int) -> bool:
        """Whether every rank has come to ``value``. What they wrote before can then be read."""
        for row in self._rows:
            if row[column] < value:
                return False
        self._window.Sync()
        return True

    def has(self, rank: int, column: int, value: int) -> bool:
        """Whether ``rank`` has come to ``value``. What it wrote before can then be read."""
        if self._rows[rank][column] < value:
            return False
        self._window.Sync()
        return True

    def wait(self, column: int, value: int) -> None:
        """Return when every rank has come to ``value``."""
        self.wait_until(lambda: self.reached(column, value))

    def wait_for(self, rank: int, column: int, value: int) -> None:
        """Return when ``rank`` has come to ``value``."""
        self.wait_until(lambda: self.has(rank, column, value))

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Return when ``done()`` is true. MPI's own messages go on meanwhile."""
        polls = 0
        while not done():
            polls += 1
            if polls > POLLS_BEFORE_YIELD:
                self._node.Iprobe()  # a peer may wait for the rest of a message of ours
                if self._naps:
                    time.sleep(NAP_S)
                else:
                    os.sched_yield()

    def free(self) -> None:
        """Collective over the node."""
        self._rows = []
        self._window.Unlock_all()
        self._window.Free()


def _open(path: Path, nbytes: int, flags: int, *, mapped: bool) -> tuple[int, Tensor | None, str]:
    """File descriptor, its ``nbytes`` mapped, and ""; or what went wrong. The file may exist in either case."""
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        if flags:
            os.ftruncate(file, nbytes)
        memory = addresses(nbytes) if mapped else None
        if memory is not None:
            map_at(memory.data_ptr(), nbytes, mmap.MAP_SHARED, file, 0)
        return file, memory, ""
    except OSError as error:
        return file, None, f"{path}: {os.strerror(error.errno or errno.EIO)}"


def addresses(nbytes: int) -> Tensor:
    """(nbytes,) uint8 with nothing behind it yet; ``nbytes`` in whole pages.

    Python's own map of a file would keep a second descriptor of it for as long as the map lives.
    """
    with torch.inference_mode(False):
        return torch.frombuffer(mmap.mmap(-1, nbytes, NOTHING, READ_WRITE), dtype=torch.uint8)


def map_at(address: int, nbytes: int, flags: int, file: int, begin: int) -> None:
    """Put bytes of ``file`` from ``begin`` on behind ``address``, instead of what is there. Raises OSError."""
    if _mmap(address, nbytes, READ_WRITE, flags | FIXED, file, begin) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]


class PeerBlocks:
    """One block of accelerator memory of each rank of a node, which all of them see.

    ``parts`` are (nbytes,) uint8 of each rank, in the order of the communicator.
    """

    def __init__(
        self,
        group: Group,
        node: MPI.Intracomm,
        accelerator: Accelerator,
        nbytes: int,
        what: str = "memory",
    ) -> None:
        """Export this rank's block and map those of its peers. Collective over ``group``, which agrees on failures.

        ``node`` has the ranks of the group on this node, which may share one device. ``nbytes`` of each block are equal
        on all ranks of the node. ``what`` names the memory in messages.

        Raises:
            CommError: there is not enough memory, or peers cannot map it; on every rank.
        """
        self.parts: list[Tensor] = []
        self._node = node
        self._block: MemoryExport | None = None
        self._attached: list[Attached] = []
        try:
            with group.agreed(f"export {what} to the ranks of the node"):
                block = self._block = accelerator.export(nbytes)
            tickets = node.allgather(block.ticket)
            with group.agreed(f"map the {what} of the ranks of the node"):
                for rank, ticket in enumerate(tickets):
                    if rank == node.rank:
                        self.parts.append(block.memory)
                    else:
                        self._attached.append(accelerator.attach(ticket, nbytes))
                        self.parts.append(self._attached[-1].memory)
            node.Barrier()
            block.seal()
        except Exception:  # of all ranks
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back. Collective over the node. Nobody may point into the blocks any more."""
        self.parts.clear()
        for attached in self._attached:
            attached.close()
        self._attached.clear()
        self._node.Barrier()  # nobody has it mapped when its owner gives it back
        if self._block is not None:
            with suppress(Exception):  # the job ends; the driver takes it back anyway
                self._block.close()
            self._block = None
