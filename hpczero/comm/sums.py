"""Sums: what ranks that share each layer's products do with activations. `sums` has the verbs."""

from __future__ import annotations

import ctypes
import platform
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, Mark, accelerator_of
from hpczero.comm.calls import CommStats
from hpczero.comm.inside import Counters, PeerBlocks
from hpczero.errors import CommError
from hpczero.job.group import Group
from hpczero.job.messages import hand_out

Say = Callable[[], str]  # names a call, for an error


class SumCall(NamedTuple):
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
    """One way to exchange tensors over ``group``: each rank brings at most ``room_nbytes`` to one exchange."""

    def __init__(self, group: Group, room_nbytes: int) -> None:
        """Not collective. ``room_nbytes`` are rounded up to 64 bytes for each rank."""
        self.group = group
        unit = 64 * group.size
        self.room_nbytes = max(1, -(-room_nbytes // unit)) * unit

    def gather(self, own: Tensor, call: SumCall, say: Say) -> Gathered:
        """What every rank brings. Collective over the group.

        The rows may lie in memory of others. Read them before the next exchange. Ranks may bring different numbers of
        elements, of any shape and strides: ``call`` has the number. ``say`` names the call where ranks differ.

        Raises:
            CommError: ranks are in different calls; on every rank.
        """
        calls, rows = self._in_pieces([own], call, say, whole=True)
        return Gathered(rows, [other.length for other in calls])

    def swap(self, parts: Sequence[Tensor], call: SumCall, say: Say) -> list[Tensor]:
        """What every rank has brought for this one, as flat rows. Collective over the group.

        The rows may lie in memory of others. Read them before the next exchange. ``parts`` has one tensor for each
        rank, of any strides; part i has the same shape on every rank. ``call`` has no number. ``say`` names the call.

        Raises:
            CommError: ranks are in different calls; on every rank.
        """
        return self._in_pieces(parts, call, say, whole=False)[1]

    def _in_pieces(
        self, parts: Sequence[Tensor], call: SumCall, say: Say, *, whole: bool
    ) -> tuple[list[SumCall], list[Tensor]]:
        """As ``_exchange``, in as many exchanges as the room takes."""
        ranks = self.group.size
        room = self.room_nbytes // (1 if whole else ranks) // parts[0].element_size()
        if max(part.numel() for part in parts) > room:
            parts = [part.contiguous().view(-1) for part in parts]
        pieces = [_piece(part, 0, room) for part in parts]
        calls, rows = self._exchange(pieces, call, say, whole=whole)
        own = parts[0 if whole else self.group.rank]
        numels = [other.numel for other in calls] if whole else [own.numel()] * ranks
        most = max(numels if whole else (part.numel() for part in parts))
        if most <= room:
            return calls, rows
        full = [own.new_empty(numel) for numel in numels]
        for start in range(0, most, room):
            if start:
                pieces = [_piece(part, start, room) for part in parts]
                _, rows = self._exchange(pieces, call, say, whole=whole, start=start)
            for row, into in zip(rows, full, strict=True):
                into[start : start + room].copy_(row)
        return calls, full

    @abstractmethod
    def _exchange(
        self, parts: Sequence[Tensor], call: SumCall, say: Say, *, whole: bool, start: int = 0
    ) -> tuple[list[SumCall], list[Tensor]]:
        """One exchange: what every rank says of its call, and what it has brought for this rank, flat.

        ``parts`` are one for each rank that fits its share of the room; with ``whole`` one alone, which all ranks read.
        Earlier exchanges of the call have moved ``start`` elements.
        """

    def done(self) -> None:
        """Say that the rows of the last exchange have been read, on a device: that the reads were started."""
        return

    @abstractmethod
    def close(self) -> None:
        """Give memory and communicators back. Collective over the group."""

    def _check(self, calls: Sequence[SumCall], say: Say) -> None:
        """Raise if ranks are in different calls. All see the same ``calls``, so all raise."""
        kinds = [call.kind for call in calls]
        if len(set(kinds)) == 1:
            return
        said = self.group.gather_text(say())
        odd = next((rank for rank, text in enumerate(said) if text != said[0]), 0)
        raise CommError(
            f"ranks that exchange tensors are in different calls: rank {odd} of the group in {said[odd]}, rank 0 in "
            f"{said[0]}; give all of them the same calls: the same model, the same samples and the same shapes"
        ).on_all_ranks()


class Gathered(NamedTuple):
    """What ``Path.gather`` has found: what each rank brought, flat, and ``SumCall.length`` of each rank."""

    rows: list[Tensor]
    lengths: list[int]


def kind_of(*facts: object) -> int:
    """A number that is equal on all ranks for equal ``facts``, of which the text says all."""
    return zlib.crc32(repr(facts).encode())


def found_numel(call: SumCall, own: int, room: int, start: int, *, whole: bool) -> int:
    """Elements that a rank with ``call`` has brought to an exchange for this rank."""
    return min(max(call.numel - start, 0), room) if whole else own


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, (nbytes,) uint8."""
    if not tensor.numel():  # torch gives it a stride that cannot be viewed
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.view(-1).view(torch.uint8)


def _piece(own: Tensor, start: int, room: int) -> Tensor:
    return own if not start and own.numel() <= room else own[start : start + room]


def give_values(group: Group, tensor: Tensor) -> None:
    """Give every rank the values of the group's rank 0, in place. Collective over ``group``.

    ``tensor`` has any dtype, device and strides; the same dtype and shape on every rank. Raises CommError without
    memory.
    """
    if tensor.is_meta:
        raise CommError(
            f"rank {group.rank}: a tensor of {tuple(tensor.shape)} on the meta device has no values"
        )
    host = tensor.detach().contiguous().cpu()
    hand_out(group, as_bytes(host).numpy())
    if group.rank and host.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(host)


MESSAGE_NBYTES = 32 * 2**20


class MessagePath(Path):
    """Ranks that send each other what they bring."""

    def __init__(self, group: Group, *, room_nbytes: int = MESSAGE_NBYTES) -> None:
        """Collective over ``group``, which is borrowed. One rank sends ``room_nbytes`` in one exchange.

        Messages have a communicator of their own: another thread may reduce gradients meanwhile.
        """
        super().__init__(group.beside(), room_nbytes)

    @override
    def _exchange(
        self, parts: Sequence[Tensor], call: SumCall, say: Say, *, whole: bool, start: int = 0
    ) -> tuple[list[SumCall], list[Tensor]]:
        group, dtype, device = self.group, parts[0].dtype, parts[0].device
        found = np.empty((group.size, len(call)), dtype=np.int64)
        group.comm.Allgather(np.array(call, dtype=np.int64), found)
        calls = [SumCall(*row) for row in found.tolist()]
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
        """Not collective. ``column``: of ``counters``; messages of ``comm`` go on while this rank waits."""
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
COLUMNS = SAID + HALVES * len(SumCall._fields)


class SharedPath(Path):
    """Ranks of one node that read each other's memory."""

    def __init__(
        self, group: Group, accelerator: Accelerator, *, room_nbytes: int = ROOM_NBYTES
    ) -> None:
        """Collective over ``group``, borrowed, on one node. ``room_nbytes``: of one half of a block.

        Raises:
            CommError: there is not enough memory, or ranks cannot map it; on every rank.
        """
        super().__init__(group, room_nbytes)
        self._accelerator = accelerator
        self._exchanges = 0
        self._read: Mark = accelerator.mark()
        nbytes = HALVES * self.room_nbytes
        self._blocks = PeerBlocks(group, group.comm, accelerator, nbytes, "memory for activations")
        self._counters = Counters(group.comm, COLUMNS)
        self._bell = Bell(group.comm, self._counters, EXCHANGES)

    @override
    def _exchange(
        self, parts: Sequence[Tensor], call: SumCall, say: Say, *, whole: bool, start: int = 0
    ) -> tuple[list[SumCall], list[Tensor]]:
        group, counters, dtype = self.group, self._counters, parts[0].dtype
        room = self.room_nbytes if whole else self.room_nbytes // group.size
        self._exchanges = number = self._exchanges + 1
        half = number % HALVES
        first = half * self.room_nbytes
        for index, part in enumerate(parts):
            if part.numel():
                at = first + index * room
                place = self._blocks.parts[group.rank][at : at + part.numel() * dtype.itemsize]
                place.view(dtype).view(part.shape).copy_(part)
        self._read.wait()  # another lane may have read the last rows
        self._accelerator.finish()
        column = SAID + half * len(call)
        for place_of, value in enumerate(call, column):
            counters.publish(place_of, value)
        self._bell.publish(number)
        self._bell.wait(number)
        calls = [
            SumCall(
                *(counters.read(rank, place_of) for place_of in range(column, column + len(call)))
            )
            for rank in range(group.size)
        ]
        self._check(calls, say)
        at = first if whole else first + group.rank * room
        own = parts[0 if whole else group.rank].numel()
        rows = []
        for other, block in zip(calls, self._blocks.parts, strict=True):
            numel = found_numel(other, own, room // dtype.itemsize, start, whole=whole)
            rows.append(block[at : at + numel * dtype.itemsize].view(dtype))
        return calls, rows

    @override
    def done(self) -> None:
        self._read = self._accelerator.mark()

    @override
    def close(self) -> None:
        self._accelerator.finish()
        self._blocks.close()
        self._counters.free()


# Sums, gathers and parts of activations over ranks that share each layer's products.
#
# Sums are in fp32 and in rank order, ((x0 + x1) + x2) + x3, and are rounded once. Every rank therefore has the same
# bits, on every path. fp64 is summed in fp64. All verbs are collective over the group: every rank makes the same calls
# in the same order, from one thread at a time. They return new tensors and leave their arguments as they are. In a
# group of one they return the argument itself.
#
# Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3.

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Up to here everybody sums everything: one exchange. Above, each sums a part and gathers the others.
WHOLE_NBYTES = 64 * 2**10
# Elements that are summed at a time on the host, so that the partial sum stays in the cache.
PIECE_NUMEL = 2**16


class Sums:
    """What the ranks of ``group`` do with activations.

    Attributes:
        group: borrowed.
        rank: of this process in the group.
        size: ranks of the group.
        stats: calls, bytes and seconds; bytes are those that other ranks read of this one's.
    """

    def __init__(self, group: Group, make: Callable[[Group, torch.device], Path]) -> None:
        """Not collective. ``group`` must outlive the sums.

        ``make``, which is collective, makes a path for tensors on a device. It is called with the first tensor of each.
        """
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.stats = CommStats()
        self._make = make
        self._paths: dict[torch.device, Path] = {}
        self._compared: tuple[str, int] | None = None
        self._forward, self._place = 0, 0  # see _next_place

    def open(self, device: torch.device) -> None:
        """Make the path for tensors on ``device`` now rather than with the first of them. Collective over the group.

        Raises:
            CommError: it cannot be made; on every rank.
        """
        if self.size > 1 and device not in self._paths:
            with self.group.watchdog.collective("Sums.open"):
                self._paths[device] = self._make(self.group, device)

    def close(self) -> None:
        """Give back what the paths hold. Collective over the group; a later call makes them anew."""
        with self.group.watchdog.collective("Sums.close"):
            for path in self._paths.values():
                path.close()
        self._paths.clear()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors. Collective over the group.

        Args:
            tensor: fp32, bf16, fp16 or fp64, any shape and strides; the same shape on every rank.

        Returns:
            Its shape and dtype, contiguous; the same bits on every rank.

        Raises:
            CommError: another dtype, or ranks are in different calls.
        """
        if self.size == 1:
            return tensor
        self._check_dtype("all_reduce", tensor)
        with self._call("all_reduce", tensor) as (path, kind, say):
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes <= WHOLE_NBYTES or (self.size == 2 and nbytes <= path.room_nbytes):
                return self._sum_of_all(path, tensor, SumCall(kind, tensor.numel()), say)
            flat = tensor.reshape(-1)
            out = torch.empty_like(flat)
            room = path.room_nbytes // tensor.element_size()
            for piece, into in zip(torch.split(flat, room), torch.split(out, room), strict=True):
                call = SumCall(kind, piece.numel())
                if self.size == 2:
                    self._sum_of_all(path, piece, call, say, into)
                    continue
                mine = self._sum_of_parts(path, piece.tensor_split(self.size), call, say)
                gathered = path.gather(mine, SumCall(kind, mine.numel()), say)
                torch.cat(gathered.rows, out=into)
                self._count("all_reduce", mine, to=self.size - 1)
            return out.view(tensor.shape)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of the sum of all ranks' tensors. Collective over the group.

        Args:
            tensor: as for ``all_reduce``.
            dim: along which the sum is cut, as ``own_part`` cuts.

        Returns:
            This rank's part, contiguous; the same bits as in ``all_reduce``.

        Raises:
            CommError: another dtype, or ranks are in different calls.
        """
        if self.size == 1:
            return tensor
        self._check_dtype("reduce_scatter", tensor)
        with self._call("reduce_scatter", tensor, dim) as (path, kind, say):
            parts = tensor.tensor_split(self.size, dim)
            summed = self._sum_of_parts(path, parts, SumCall(kind), say)
            return summed.view(parts[self.rank].shape)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """All ranks' tensors one behind the other. Collective over the group.

        Args:
            tensor: any dtype and strides. Ranks may differ in the size of ``dim`` alone.
            dim: along which they follow one another, in rank order.

        Raises:
            CommError: ranks are in different calls.
        """
        if self.size == 1:
            return tensor
        shape = list(tensor.shape)
        length, shape[dim] = shape[dim], -1
        with self._call("all_gather", tensor, dim, shape=shape) as (path, kind, say):
            self._count("all_gather", tensor, to=self.size - 1)
            found = path.gather(tensor, SumCall(kind, tensor.numel(), length), say)
            rows = []
            for row, other in zip(found.rows, found.lengths, strict=True):
                shape[dim] = other
                rows.append(row.view(shape))
            return torch.cat(rows, dim)

    def all_to_all(self, tensor: Tensor, scatter_dim: int, gather_dim: int) -> Tensor:
        """This rank's part along one dimension of all ranks' tensors, one behind the other along another.

        Collective over the group. ``all_to_all(all_to_all(x, a, b), b, a)`` is ``x``.

        Args:
            tensor: any dtype and strides; the same shape on every rank.
            scatter_dim: along which it is cut; a multiple of the number of ranks.
            gather_dim: along which what arrives is joined.

        Raises:
            CommError: ``scatter_dim`` does not divide, or ranks are in different calls.

        Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, sec. 3.2.
        """
        if self.size == 1:
            return tensor
        if tensor.shape[scatter_dim] % self.size:
            raise CommError(
                f"rank {self.group.rank}: all_to_all of {tuple(tensor.shape)}: dimension {scatter_dim} has "
                f"{tensor.shape[scatter_dim]} elements, expected a multiple of {self.size} ranks"
            )
        with self._call("all_to_all", tensor, scatter_dim, gather_dim) as (path, kind, say):
            parts = tensor.chunk(self.size, scatter_dim)
            shape = parts[0].shape
            self._count("all_to_all", parts[0], to=self.size - 1)
            rows = path.swap(parts, SumCall(kind), say)
            return torch.cat([row.view(shape) for row in rows], gather_dim)

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of all ranks' values, element by element; NaN where any has one. Collective over the group.

        Args:
            tensor: small; any dtype that can be compared, the same shape on every rank.

        Raises:
            CommError: ranks are in different calls.
        """
        if self.size == 1:
            return tensor
        with self._call("maximum", tensor) as (path, kind, say):
            self._count("maximum", tensor, to=self.size - 1)
            rows = path.gather(tensor, SumCall(kind, tensor.numel()), say).rows
            most = torch.maximum(rows[0], rows[1])
            for row in rows[2:]:
                torch.maximum(most, row, out=most)
            return most.view(tensor.shape)

    def compare(self, what: str, tensor: Tensor) -> None:
        """Have the next call find out whether all ranks have the same ``tensor`` here. Not collective; no exchange.

        ``what`` names the tensor in the message. Several may be compared before the next call. Tensors on a device are
        not compared: it would have to be waited for.
        """
        if self.size > 1 and tensor.device.type == "cpu":
            before, checksum = self._compared or (what, 0)
            said = before if what in before else f"{before}, {what}"
            seen = as_bytes(tensor.detach().contiguous()).numpy()
            self._compared = said, zlib.crc32(seen.data, checksum)

    def own_part(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that all have whole: a view. Not collective.

        The first parts have one element more where the size does not divide, as in ``torch.tensor_split``.
        """
        return tensor if self.size == 1 else tensor.tensor_split(self.size, dim)[self.rank]

    def __deepcopy__(self, memo: dict[int, Any]) -> Sums:
        """Copies of a model exchange over the same paths."""
        return self

    def __reduce__(self) -> NoReturn:
        raise CommError(
            "a model whose layers are cut over ranks holds communicators and cannot be pickled; save its state_dict(), "
            "or use hpczero.checkpoint"
        )

    # --- inside a call

    @contextmanager
    def _call(
        self, verb: str, tensor: Tensor, *dims: int, shape: Sequence[int] | None = None
    ) -> Iterator[tuple[Path, int, Say]]:
        """The path, a number for the call and its words; around it the watchdog and the accounts."""
        self.open(tensor.device)
        shape = tuple(tensor.shape if shape is None else shape)
        compared, self._compared = self._compared, None
        place = self._next_place()

        def say() -> str:
            beside = f" with {compared[0]} of checksum {compared[1]:08x}" if compared else ""
            where = f", call {place} since a forward began"
            return f"{verb}{dims or ''} of {tuple(tensor.shape)} {tensor.dtype}{beside}{where}"

        path = self._paths[tensor.device]
        start = time.perf_counter()
        with torch.no_grad(), self.group.watchdog.collective(f"{verb} of activations {shape}"):
            yield path, kind_of(verb, dims, shape, tensor.dtype, compared, place), say
            path.done()
            self.stats.calls[verb] += 1
            self.stats.seconds += time.perf_counter() - start

    def _next_place(self) -> int:
        """Number of the call since a forward began. A rank that begins it anew, after an exception, has another one."""
        forward = self.group.forwards.begun
        self._forward, self._place = forward, self._place + 1 if forward == self._forward else 1
        return self._place

    def _count(self, verb: str, tensor: Tensor, *, to: int) -> None:
        self.stats.sent_nbytes[verb] += to * tensor.numel() * tensor.element_size()

    def _sum_of_all(
        self, path: Path, tensor: Tensor, call: SumCall, say: Say, into: Tensor | None = None
    ) -> Tensor:
        """Everybody reads everything and sums it."""
        self._count("all_reduce", tensor, to=self.size - 1)
        rows = path.gather(tensor, call, say).rows
        return in_rank_order(rows, into).view(tensor.shape)

    def _sum_of_parts(self, path: Path, parts: Sequence[Tensor], call: SumCall, say: Say) -> Tensor:
        """The sum of own parts, flat."""
        verb = "all_reduce" if call.numel else "reduce_scatter"
        for rank, part in enumerate(parts):
            self._count(verb, part, to=int(rank != self.rank))
        return in_rank_order(path.swap(parts, call, say))

    def _check_dtype(self, verb: str, tensor: Tensor) -> None:
        if tensor.dtype not in SUMMED:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in SUMMED)
            raise CommError(
                f"rank {self.group.rank}: {verb} of {tensor.dtype}, expected one of {names}; cast it before"
            )


def in_rank_order(rows: Sequence[Tensor], into: Tensor | None = None) -> Tensor:
    """The sum of flat rows, one behind the other, in fp32 (fp64 for fp64), rounded once to their dtype.

    ``rows`` are two or more of one shape and dtype, and are read only. The sum goes ``into`` a tensor like them.
    """
    out = torch.empty_like(rows[0]) if into is None else into
    if len(rows) == 2:  # torch adds halves in fp32 and rounds once
        return torch.add(rows[0], rows[1], out=out)
    if rows[0].dtype in (torch.float32, torch.float64):
        torch.add(rows[0], rows[1], out=out)
        for row in rows[2:]:
            out.add_(row)
        return out
    step = PIECE_NUMEL if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), step):
        piece = slice(start, start + step)
        total = rows[0][piece].float()
        for row in rows[1:]:
            total.add_(row[piece])
        out[piece] = total
    return out


def sums_over(group: Group) -> Sums:
    """Sums over ``group``: by shared memory or CUDA IPC where it lies on one node, by messages elsewhere.

    Not collective. The first call with a tensor of each device makes the path, which is.
    """
    return Sums(group, best_path)


def best_path(group: Group, device: torch.device) -> Path:
    """The path for tensors on ``device``. Collective over ``group``.

    Raises:
        CommError: memory cannot be shared; on every rank.
        ConfigError: the device is neither cpu nor cuda.
    """
    if group.num_nodes == 1:
        return SharedPath(group, accelerator_of(device))
    return MessagePath(group)
