"""Exchange: the collectives of one group, on flat tensors in memory of the host.

Owns: which bytes go where, and in which pieces. Must not know: torch's process groups, threads.

Bytes take a path of ``comm.sums``: memory that the ranks of a node share, or messages. With each exchange a path tells
what every rank calls. Ranks in different calls all raise the same error; nobody waits or gets another call's bytes. A
large all-reduce is a reduction of parts and a gather of them; a small one, and one of two ranks, is one gather of which
every rank joins everything. All methods are collective over the group, and are called by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.bridge.reductions import Reduction
from hpczero.comm.sums import Call, Path, as_bytes, kind_of
from hpczero.errors import CommError
from hpczero.job.group import Group

WHOLE_NBYTES = 64 * 2**10  # up to here everybody joins everything
MESSAGE_NBYTES = 2**30  # of one message: MPI counts in 32 bits


class Exchange:
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
        """Not collective.

        Args:
            group: must outlive this.
            make: makes the path, with the first call; collective.
            name: of the process group, for messages.
        """
        self.group, self.rank, self.size = group, group.rank, group.size
        self._make, self._name = make, name
        self._path: Path | None = None

    def close(self) -> None:
        """Give the path back. Collective."""
        if self._path is not None:
            self._path.close()
            self._path = None

    def barrier(self) -> None:
        """Wait for every rank."""
        self._gathered(
            "barrier", [torch.empty(0, dtype=torch.uint8, device="cpu")], lambda *_: None
        )

    def all_gather(self, own: Tensor, rows: Sequence[Tensor]) -> None:
        """``own`` of every rank into ``rows``.

        Args:
            own: any dtype; the same dtype and length on every rank.
            rows: one for each rank, of dtype and length of ``own``; the own one may be ``own`` itself.
        """
        targets = [as_bytes(row) for row in rows]

        def read(start: int, found: Sequence[Tensor]) -> None:
            for target, row in zip(targets, found, strict=True):
                target[start : start + row.numel()].copy_(row)

        self._gathered(f"all_gather of {words(own)}", [as_bytes(own)], read)

    def broadcast(self, flat: Tensor, root: int) -> None:
        """``flat`` of rank ``root`` into that of all others; the same dtype and length on every rank."""
        target = as_bytes(flat)

        def read(start: int, found: Sequence[Tensor]) -> None:
            if self.rank != root:
                row = found[root]
                target[start : start + row.numel()].copy_(row)

        self._gathered(f"broadcast of {words(flat)} from rank {root}", [target], read, only=root)

    def gather(self, own: Tensor, rows: Sequence[Tensor] | None, root: int) -> None:
        """``own`` of every rank into ``rows`` of rank ``root``; the others give None."""
        targets = [as_bytes(row) for row in rows or ()]

        def read(start: int, found: Sequence[Tensor]) -> None:
            for target, row in zip(targets, found, strict=False):
                target[start : start + row.numel()].copy_(row)

        self._gathered(f"gather of {words(own)} to rank {root}", [as_bytes(own)], read)

    def all_reduce(self, flat: Tensor, reduction: Reduction) -> None:
        """``flat`` of all ranks, reduced, into ``flat`` of all ranks; the same bits on every rank."""
        reduction.check(flat.dtype)
        what = f"all_reduce {reduction.name} of {words(flat)}"
        source = reduction.prepared(flat)
        if self.size == 2 or flat.numel() * flat.element_size() <= WHOLE_NBYTES:

            def read(start: int, found: Sequence[Tensor]) -> None:
                reduction.join(found, flat[start : start + found[0].numel()])

            self._gathered(what, [source], read)
            return
        parts = flat.tensor_split(self.size)
        self._reduce_parts(what, source.tensor_split(self.size), parts[self.rank], reduction)
        # Ranks agree on the call by now; parts may differ by one element.
        self._spread(what, parts)

    def reduce(self, flat: Tensor, reduction: Reduction, root: int) -> None:
        """``flat`` of all ranks, reduced, into that of rank ``root``; the others keep theirs."""
        reduction.check(flat.dtype)
        source = reduction.prepared(flat)

        def read(start: int, found: Sequence[Tensor]) -> None:
            if self.rank == root:
                reduction.join(found, flat[start : start + found[0].numel()])

        what = f"reduce {reduction.name} of {words(flat)} to rank {root}"
        self._gathered(what, [source], read)

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor, reduction: Reduction) -> None:
        """Part ``rank`` of all ranks, reduced, into ``out``.

        Args:
            parts: one for each rank, of the dtype of ``out``, each of the same length on all ranks.
            out: may lie within the own part.
            reduction: the same on every rank.
        """
        reduction.check(out.dtype)
        what = scatter_words(parts, reduction)
        self._reduce_parts(what, [reduction.prepared(part) for part in parts], out, reduction)

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, root: int) -> None:
        """Part ``rank`` of rank ``root`` into ``out``; ranks other than ``root`` give None."""
        target = as_bytes(out)
        self._gathered(f"scatter of {words(out)} from rank {root}", [target[:0]], lambda *_: None)
        given = [target[:0]] * self.size if parts is None else [as_bytes(part) for part in parts]
        came = [target if rank == root else target[:0] for rank in range(self.size)]
        self._send_all(given, came)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """``sent[i]`` of every rank to rank i; what rank i has for this one into ``received[i]``.

        Args:
            sent: one for each rank, of one dtype and any lengths.
            received: one for each rank, of lengths that the others send.

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
        self._gathered(what, [verdict], lambda _, found: self._check_lengths(what, found))
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
            error = CommError(
                f"{what} over process group {self._name}: rank {wrong[0][0]} expects another number of bytes from rank "
                f"{wrong[0][1]} than it is sent; compare the split sizes of the two"
            )
            error.agreed = True
            raise error

    def _gathered(
        self,
        what: str,
        own: Sequence[Tensor],
        read: Callable[[int, Sequence[Tensor]], None],
        *,
        only: int | None = None,
    ) -> None:
        """Show ``own[0]`` to all ranks, or that of rank ``only``; ``read`` gets the place of a piece and all rows."""
        flat = own[0]
        if self.size == 1:
            read(0, [flat])
            return
        path, say = self._open(), self._say(what)
        kind, room = kind_of(what), path.room_nbytes // flat.element_size()
        for start in range(0, max(flat.numel(), 1), room):
            piece = flat[start : start + room]
            brought = piece if only in (None, self.rank) else piece[:0]
            rows = path.gather(brought, Call(kind, brought.numel()), say).rows
            read(start, rows)
            path.done()

    def _swapped(
        self, what: str, parts: Sequence[Tensor], read: Callable[[int, Sequence[Tensor]], None]
    ) -> None:
        """Give each rank its part; ``read`` gets the place of a piece and the rows from all ranks."""
        if self.size == 1:
            read(0, [parts[0]])
            return
        path, say = self._open(), self._say(what)
        kind, room = kind_of(what), path.room_nbytes // self.size // parts[0].element_size()
        most = max(part.numel() for part in parts)
        for start in range(0, max(most, 1), room):
            pieces = [part[start : start + room] for part in parts]
            read(start, path.swap(pieces, Call(kind), say))
            path.done()

    def _reduce_parts(
        self, what: str, parts: Sequence[Tensor], out: Tensor, reduction: Reduction
    ) -> None:
        def read(start: int, found: Sequence[Tensor]) -> None:
            reduction.join(found, out[start : start + found[0].numel()])

        self._swapped(what, parts, read)

    def _spread(self, what: str, parts: Sequence[Tensor]) -> None:
        """Every rank's own part to all; parts may differ in length."""
        path, say, own = self._open(), self._say(what), parts[self.rank]
        kind, room = kind_of(what, "parts"), path.room_nbytes // own.element_size()
        for start in range(0, max(part.numel() for part in parts), room):
            piece = own[start : start + room]
            rows = path.gather(piece, Call(kind, piece.numel()), say).rows
            for rank, (part, row) in enumerate(zip(parts, rows, strict=True)):
                if rank != self.rank:
                    part[start : start + row.numel()].copy_(row)
            path.done()

    def _open(self) -> Path:
        if self._path is None:
            self._path = self._make(self.group, torch.device("cpu"))
        return self._path

    def _say(self, what: str) -> Callable[[], str]:
        return lambda: f"{what} over process group {self._name}"


def words(flat: Tensor) -> str:
    """Length and dtype, for messages."""
    return f"{flat.numel()} {str(flat.dtype).removeprefix('torch.')}"


def scatter_words(parts: Sequence[Tensor], reduction: Reduction) -> str:
    """A reduce-scatter of these parts, which all ranks must name alike."""
    lengths = [part.numel() for part in parts]
    uneven = f" of lengths {lengths}" if len(set(lengths)) > 1 else ""
    return f"reduce_scatter {reduction.name} to {words(parts[0])}{uneven}"
