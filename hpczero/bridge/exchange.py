"""Exchange: the collectives of one group, on flat tensors in memory of the host.

Bytes take a path of ``comm.sums``: memory that the ranks of a node share, or messages. With each exchange a path tells
what every rank calls. Ranks in different calls all raise the same error; nobody waits or gets another call's bytes. A
large all-reduce is a reduction of parts and a gather of them; a small one, and one of two ranks, is one gather of which
every rank joins everything. All methods are collective over the group, and are called by one thread at a time.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.bridge.tensors import PIECE_NUMEL, Reduction
from hpczero.comm.sums import Path, SumCall, as_bytes, kind_of
from hpczero.errors import CommError
from hpczero.job.group import Group

WHOLE_NBYTES = 64 * 2**10  # up to here everybody joins everything
MESSAGE_NBYTES = 2**30  # of one message: MPI counts in 32 bits

# What is done with the rows of all ranks, given the place of a piece, and of each rank the elements there.
Read = Callable[[int, Sequence[Tensor]], None]


class BridgeExchange:
    """What the ranks of ``group`` do with tensors.

    Tensors are contiguous and flat, in memory of the host. Arguments that name a call are equal on all ranks.

    Attributes:
        group: borrowed.
        rank: of this process in the group.
        size: ranks of the group.
    """

    def __init__(
        self, group: Group, make: Callable[[Group, torch.device], Path], name: str
    ) -> None:
        """Not collective. ``make`` makes the path, with the first call, collectively.

        ``name`` is that of the process group.
        """
        self.group, self.rank, self.size = group, group.rank, group.size
        self._make, self._name = make, name
        self._path: Path | None = None

    def close(self) -> None:
        """Give the path back."""
        if self._path is not None:
            self._path.close()
            self._path = None

    def barrier(self) -> None:
        """Wait for every rank."""
        self._meet("barrier")

    def all_gather(self, own: Tensor, rows: Sequence[Tensor]) -> None:
        """``own`` of every rank, of one dtype and length, into ``rows``, of which the own one may be ``own`` itself."""
        what = f"all_gather of {words(own)}"
        self._gathered(what, as_bytes(own), copying(dict(enumerate(rows))))

    def broadcast(self, flat: Tensor, root: int) -> None:
        """``flat`` of rank ``root`` into that of all others; the same dtype and length on every rank."""
        what = f"broadcast of {words(flat)} from rank {root}"
        read = nothing if self.rank == root else copying({root: flat})
        self._gathered(what, as_bytes(flat), read, only=root)

    def gather(self, own: Tensor, rows: Sequence[Tensor] | None, root: int) -> None:
        """``own`` of every rank into ``rows`` of rank ``root``; the others give None."""
        what = f"gather of {words(own)} to rank {root}"
        self._gathered(what, as_bytes(own), copying(dict(enumerate(rows or ()))))

    def all_reduce(self, flat: Tensor, reduction: Reduction) -> None:
        """``flat`` of all ranks, reduced, into ``flat`` of all ranks; the same bits on every rank."""
        reduction.check(flat.dtype)
        what = f"all_reduce {reduction.name} of {words(flat)}"
        source = reduction.prepared(flat)
        if self.size == 2 or flat.numel() * flat.element_size() <= WHOLE_NBYTES:
            self._gathered(what, source, joining(reduction, flat))
            return
        parts = flat.tensor_split(self.size)
        own = parts[self.rank]
        self._swapped(what, source.tensor_split(self.size), joining(reduction, own))
        # Ranks agree on the call by now; parts may differ by one element.
        others = {rank: part for rank, part in enumerate(parts) if rank != self.rank}
        most = as_bytes(parts[0]).numel()
        self._gathered(f"{what}, parts", as_bytes(own), copying(others), most=most)

    def reduce(self, flat: Tensor, reduction: Reduction, root: int) -> None:
        """``flat`` of all ranks, reduced, into that of rank ``root``; the others keep theirs."""
        reduction.check(flat.dtype)
        what = f"reduce {reduction.name} of {words(flat)} to rank {root}"
        read = joining(reduction, flat) if self.rank == root else nothing
        self._gathered(what, reduction.prepared(flat), read)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, reduction: Reduction) -> None:
        """Part ``rank`` of all ranks, reduced, into ``out``, which may lie within the own part.

        Part i has the same length on all ranks.
        """
        reduction.check(out.dtype)
        given = [reduction.prepared(part) for part in parts]
        self._swapped(scatter_words(parts, reduction), given, joining(reduction, out))

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, root: int) -> None:
        """Part ``rank`` of rank ``root`` into ``out``; ranks other than ``root`` give None."""
        target = as_bytes(out)
        self._meet(f"scatter of {words(out)} from rank {root}")
        given = [target[:0]] * self.size if parts is None else [as_bytes(part) for part in parts]
        came = [target if rank == root else target[:0] for rank in range(self.size)]
        self._send_all(given, came)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """``sent[i]`` of every rank to rank i; what rank i has for this one into ``received[i]``. Lengths may differ.

        Raises:
            CommError: a rank expects another number of bytes than it is sent; on every rank.
        """
        what = f"all_to_all of {sent[0].dtype}"
        out, into = [as_bytes(one) for one in sent], [as_bytes(one) for one in received]
        told = [torch.tensor([one.numel()], dtype=torch.int64, device="cpu") for one in out]
        odd: list[int] = []

        def read(_: int, found: Sequence[Tensor]) -> None:
            odd.extend(r for r, row in enumerate(found) if int(row[0]) != into[r].numel())

        self._swapped(what, told, read)
        verdict = torch.tensor([odd[0] if odd else -1], dtype=torch.int64, device="cpu")
        self._gathered(what, verdict, lambda _, found: self._check_lengths(what, found))
        self._send_all(out, into)

    # --- pieces

    def _send_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """``sent[i]`` to rank i, what rank i sends into ``received[i]``: bytes, as many as the other side has said."""
        if received[self.rank].numel():
            received[self.rank].copy_(sent[self.rank])
        comm, others = self.group.comm, [rank for rank in range(self.size) if rank != self.rank]
        requests: list[MPI.Request] = []
        for start, tensors in ((comm.Irecv, received), (comm.Isend, sent)):
            for rank in others:
                if tensors[rank].numel():
                    for piece in torch.split(tensors[rank], MESSAGE_NBYTES):
                        requests.append(start([piece.numpy(), MPI.BYTE], rank))
        MPI.Request.Waitall(requests)

    def _check_lengths(self, what: str, found: Sequence[Tensor]) -> None:
        wrong = [(rank, int(row[0])) for rank, row in enumerate(found) if int(row[0]) >= 0]
        if wrong:
            raise CommError(
                f"{what} over process group {self._name}: rank {wrong[0][0]} expects another number of bytes from rank "
                f"{wrong[0][1]} than it is sent; compare the split sizes of the two"
            ).on_all_ranks()

    def _gathered(
        self,
        what: str,
        own: Tensor,
        read: Read,
        *,
        only: int | None = None,
        most: int | None = None,
    ) -> None:
        """Show ``own`` to all ranks, or that of rank ``only``; ``most``: its length on the rank that has most."""
        if self.size == 1:
            read(0, [own])
            return
        path, kind = self._open(), kind_of(what)
        room = path.room_nbytes // own.element_size()
        for start in range(0, max(most or own.numel(), 1), room):
            piece = own[start : start + room] if only in (None, self.rank) else own[:0]
            read(start, path.gather(piece, SumCall(kind, piece.numel()), self._say(what)).rows)
            path.done()

    def _swapped(self, what: str, parts: Sequence[Tensor], read: Read) -> None:
        """Give each rank its part."""
        if self.size == 1:
            read(0, [parts[0]])
            return
        path, kind = self._open(), kind_of(what)
        room = path.room_nbytes // self.size // parts[0].element_size()
        for start in range(0, max(*(part.numel() for part in parts), 1), room):
            pieces = [part[start : start + room] for part in parts]
            read(start, path.swap(pieces, SumCall(kind), self._say(what)))
            path.done()

    def _meet(self, what: str) -> None:
        """Wait for all ranks."""
        self._gathered(what, torch.empty(0, dtype=torch.uint8, device="cpu"), nothing)

    def _open(self) -> Path:
        if self._path is None:
            self._path = self._make(self.group, torch.device("cpu"))
        return self._path

    def _say(self, what: str) -> Callable[[], str]:
        return lambda: f"{what} over process group {self._name}"


def nothing(start: int, rows: Sequence[Tensor]) -> None:
    """Read no rows."""


def copying(targets: Mapping[int, Tensor]) -> Read:
    """Copy the rows of some ranks, bytes, into their ``targets``."""
    into = {rank: as_bytes(target) for rank, target in targets.items()}

    def read(start: int, rows: Sequence[Tensor]) -> None:
        for rank, target in into.items():
            target[start : start + rows[rank].numel()].copy_(rows[rank])

    return read


def joining(reduction: Reduction, out: Tensor) -> Read:
    """Reduce the rows of all ranks into ``out``."""
    return lambda start, rows: reduction.join(rows, out[start : start + rows[0].numel()])


def words(flat: Tensor) -> str:
    """Length and dtype, for messages."""
    return f"{flat.numel()} {str(flat.dtype).removeprefix('torch.')}"


def scatter_words(parts: Sequence[Tensor], reduction: Reduction) -> str:
    """A reduce-scatter of these parts, which all ranks must name alike."""
    lengths = [part.numel() for part in parts]
    uneven = f" of lengths {lengths}" if len(set(lengths)) > 1 else ""
    return f"reduce_scatter {reduction.name} to {words(parts[0])}{uneven}"


# DirectExchange: large tensors of one node, read by their receivers from where they lie.
#
#     tell addresses | read from the others | all have read
#
# Staging in shared memory costs a copy of each byte and a wait for each piece. Here a call waits twice, an all-reduce
# three times, however large it is. What is read goes through the cache in pieces and is reduced there, in rank order as
# everywhere.

# Reads: memory of another process on this node, read from where it lies.
#
# Linux lets a process read memory of another one of the same user (process_vm_readv), unless a container or the
# security settings of a machine forbid it. Nothing is changed to have it allowed: where the trial fails, bytes take
# another way.

TOKEN_NBYTES = 32


class _IOVec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Reads:
    """Reads of the other ranks' memory."""

    def __init__(self, processes: list[int]) -> None:
        """Not collective; ``create`` tries whether it works. ``processes``: number of each rank's process."""
        self._processes = processes
        self._call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        pointer = ctypes.POINTER(_IOVec)
        number = ctypes.c_ulong
        self._call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        self._call.restype = ctypes.c_ssize_t

    @classmethod
    def create(cls, group: Group) -> Reads | None:
        """Reads between the ranks of ``group``, or None where one of them may not. Collective over ``group``."""
        if group.num_nodes > 1 or group.size == 1 or not sys.platform.startswith("linux"):
            return None
        token = torch.tensor(
            list(secrets.token_bytes(TOKEN_NBYTES)), dtype=torch.uint8, device="cpu"
        )
        told = group.comm.allgather((os.getpid(), token.data_ptr(), token.tolist()))
        reads: Reads | None = None
        try:
            reads = cls([process for process, _, _ in told])
            for rank, (_, address, expected) in enumerate(told):
                found = torch.zeros_like(token)
                reads.fill(found, rank, address)
                if found.tolist() != expected:
                    reads = None
                    break
        except (AttributeError, CommError):  # a C library without the call, or not allowed
            reads = None
        # The token must live until all have read it.
        return reads if all(group.comm.allgather(reads is not None)) else None

    def fill(self, target: Tensor, rank: int, address: int) -> None:
        """Fill a contiguous tensor from ``address`` of ``rank``'s process. Not collective.

        Raises:
            CommError: it is not allowed, or not memory of that process.
        """
        done, nbytes = 0, target.numel() * target.element_size()
        while done < nbytes:  # the kernel copies at most 2 GiB at a time
            here, there = (
                _IOVec(start + done, nbytes - done) for start in (target.data_ptr(), address)
            )
            copied = self._call(self._processes[rank], here, 1, there, 1, 0)
            if copied <= 0:
                number = ctypes.get_errno()
                raise CommError(
                    f"{nbytes:,} bytes of process {self._processes[rank]}, rank {rank} of the group, cannot be read: "
                    f"{os.strerror(number)}"
                )
            done += copied


LEAST_NBYTES = 2**21  # of a whole call; below, a wait costs more than copies


class DirectReads(BridgeExchange):
    """An exchange that reads directly where the machine allows it; elsewhere it is its base."""

    _reads: Reads | None = None

    @override
    def all_gather(self, own: Tensor, rows: Sequence[Tensor]) -> None:
        reads = self._direct(own, self.size)
        if reads is None:
            super().all_gather(own, rows)
            return
        if rows[self.rank].data_ptr() != own.data_ptr():  # first: others may not have come yet
            rows[self.rank].copy_(own)
        with self._shown(f"all_gather of {words(own)}", own) as addresses:
            for rank in self._others():
                reads.fill(rows[rank], rank, addresses[rank])

    @override
    def broadcast(self, flat: Tensor, root: int) -> None:
        reads = self._direct(flat, 1)
        if reads is None:
            super().broadcast(flat, root)
            return
        with self._shown(f"broadcast of {words(flat)} from rank {root}", flat) as addresses:
            if self.rank != root:
                reads.fill(flat, root, addresses[root])

    @override
    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, reduction: Reduction) -> None:
        reads = self._direct(max(parts, key=Tensor.numel), self.size)
        reduction.check(out.dtype)
        if reads is None:
            super().reduce_scatter(parts, out, reduction)
            return
        given = [reduction.prepared(part) for part in parts]
        with self._shown(scatter_words(parts, reduction), *given) as addresses:
            mine = addresses[self.rank :: self.size]
            self._reduce_read(reads, mine, given[self.rank], out, reduction)

    @override
    def all_reduce(self, flat: Tensor, reduction: Reduction) -> None:
        reads = self._direct(flat, 1)
        reduction.check(flat.dtype)
        if reads is None:
            super().all_reduce(flat, reduction)
            return
        what = f"all_reduce {reduction.name} of {words(flat)}"
        parts = flat.tensor_split(self.size)
        given = reduction.prepared(flat).tensor_split(self.size)
        own = parts[self.rank]
        with self._shown(what, *given, own) as addresses:
            each = self.size + 1
            # Nobody else reads or writes this rank's own part before it is whole.
            mine = addresses[self.rank :: each]
            self._reduce_read(reads, mine, given[self.rank], own, reduction)
            self._meet(f"{what}, reduced")
            for rank in self._others():
                reads.fill(parts[rank], rank, addresses[rank * each + self.size])

    def _direct(self, flat: Tensor, parts: int) -> Reads | None:
        """The reads, if the call is large enough; the same on every rank that makes the same call."""
        if self.size == 1 or flat.numel() * flat.element_size() * parts < LEAST_NBYTES:
            return None
        self._open()
        return self._reads

    @override
    def _open(self) -> Path:
        if self._path is None:
            self._path = super()._open()
            self._reads = Reads.create(self.group)
        return self._path

    def _others(self) -> list[int]:
        """The other ranks, each beginning with another one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @contextmanager
    def _shown(self, what: str, *tensors: Tensor) -> Iterator[list[int]]:
        """Where these tensors of every rank lie, rank by rank; they must stay as they are inside."""
        found: list[int] = []
        own = torch.tensor([each.data_ptr() for each in tensors], dtype=torch.int64, device="cpu")
        tell = f"{what}, directly"
        self._gathered(tell, own, lambda _, rows: found.extend(torch.cat(list(rows)).tolist()))
        yield found
        # At an error nobody is waited for: the line is broken then.
        self._meet(f"{what}, read")

    def _reduce_read(
        self, reads: Reads, addresses: Sequence[int], own: Tensor, out: Tensor, reduction: Reduction
    ) -> None:
        """Reduce what lies at ``addresses``, of each rank as much as ``own``, into ``out``."""
        scratch = own.new_empty(self.size, min(PIECE_NUMEL, own.numel()))
        for start in range(0, own.numel(), PIECE_NUMEL):
            numel = min(PIECE_NUMEL, own.numel() - start)
            rows = [row[:numel] for row in scratch.unbind()]
            for rank in self._others():
                reads.fill(rows[rank], rank, addresses[rank] + start * own.element_size())
            rows[self.rank] = own[start : start + numel]
            reduction.join(rows, out[start : start + numel])
