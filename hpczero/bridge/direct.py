"""DirectExchange: large tensors of one node, read by their receivers from where they lie.

Owns: which memory is read when. Must not know: torch's process groups, threads.

    tell addresses | read from the others | all have read

Staging in shared memory costs a copy of each byte and a wait for each piece. Here a call waits twice, an all-reduce
three times, however large it is. What is read goes through the cache in pieces and is reduced there, in rank order as
everywhere.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hpczero.bridge.exchange import Exchange, scatter_words, words
from hpczero.bridge.reductions import PIECE_NUMEL, Reduction
from hpczero.comm.sums import Path
from hpczero.errors import CommError
from hpczero.job.group import Group

# Reads: memory of another process on this node, read from where it lies.
#
# Linux lets a process read memory of another one of the same user (process_vm_readv), unless a container or the
# security settings of a machine forbid it. Nothing is changed to have it allowed: where the trial fails, bytes take
# another way.

TOKEN_NBYTES = 32


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Reads:
    """Reads of the other ranks' memory."""

    def __init__(self, processes: list[int]) -> None:
        """Not collective; ``create`` tries whether it works.

        Args:
            processes: number of each rank's process.
        """
        self._processes = processes
        self._call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        pointer = ctypes.POINTER(_Piece)
        number = ctypes.c_ulong
        self._call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
        self._call.restype = ctypes.c_ssize_t

    @classmethod
    def create(cls, group: Group) -> Reads | None:
        """Reads between the ranks of ``group``, or None where one of them may not. Collective over ``group``."""
        if group.num_nodes > 1 or group.size == 1 or not sys.platform.startswith("linux"):
            return None
        token = np.frombuffer(secrets.token_bytes(TOKEN_NBYTES), dtype=np.uint8).copy()
        told = group.comm.allgather((os.getpid(), token.ctypes.data, token.tobytes()))
        try:
            reads: Reads | None = cls([process for process, _, _ in told])
        except AttributeError:  # a C library without it
            reads = None
        works = reads is not None
        for rank, (_, address, expected) in enumerate(told):
            found = np.zeros(TOKEN_NBYTES, dtype=np.uint8)
            try:
                works = works and reads is not None
                if works and reads is not None:
                    reads.fetch(rank, address, found.ctypes.data, TOKEN_NBYTES)
                    works = found.tobytes() == expected
            except CommError:
                works = False
        # The token must live until all have read it.
        return reads if all(group.comm.allgather(works)) else None

    def fetch(self, rank: int, address: int, into: int, nbytes: int) -> None:
        """Copy ``nbytes`` at ``address`` of ``rank``'s process to ``into`` of this one. Not collective.

        Raises:
            CommError: it is not allowed, or not memory of that process.
        """
        done = 0
        while done < nbytes:  # the kernel copies at most 2 GiB at a time
            here, there = (_Piece(start + done, nbytes - done) for start in (into, address))
            copied = self._call(self._processes[rank], here, 1, there, 1, 0)
            if copied <= 0:
                number = ctypes.get_errno()
                raise CommError(
                    f"{nbytes:,} bytes of process {self._processes[rank]}, rank {rank} of the group, cannot be read: "
                    f"{os.strerror(number)}"
                )
            done += copied

    def fill(self, target: Tensor, rank: int, address: int) -> None:
        """Fill a contiguous tensor from ``address`` of ``rank``'s process. Not collective."""
        self.fetch(rank, address, target.data_ptr(), target.numel() * target.element_size())


LEAST_NBYTES = 2**21  # of a whole call; below, a wait costs more than copies


class DirectExchange(Exchange):
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
        what = scatter_words(parts, reduction)
        given = [reduction.prepared(part) for part in parts]
        with self._shown(what, *given) as addresses:
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
            path = super()._open()
            self._reads = Reads.create(self.group)
            return path
        return self._path

    def _others(self) -> list[int]:
        """The other ranks, each beginning with another one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @contextmanager
    def _shown(self, what: str, *tensors: Tensor) -> Iterator[list[int]]:
        """Where these tensors of every rank lie, rank by rank; they must stay as they are inside."""
        found: list[int] = []
        own = torch.tensor(
            [tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device="cpu"
        )
        self._gathered(
            f"{what}, directly", [own], lambda _, rows: found.extend(torch.cat(list(rows)).tolist())
        )
        yield found
        # At an error nobody is waited for: the line is broken then.
        self._meet(f"{what}, read")

    def _meet(self, what: str) -> None:
        """Wait for all ranks."""
        self._gathered(what, [torch.empty(0, dtype=torch.uint8, device="cpu")], lambda *_: None)

    def _reduce_read(
        self,
        reads: Reads,
        addresses: Sequence[int],
        own: Tensor,
        out: Tensor,
        reduction: Reduction,
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
