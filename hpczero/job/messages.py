"""Data between ranks outside of a step: gathered, handed out and traded, in chunks that MPI can count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.errors import CommError
from hpczero.job.group import Group, told_all
from hpczero.job.topology import Topology

CHUNK_NBYTES = 2**30  # of one message: MPI counts in 32 bits

Array = npt.NDArray[Any]


def hand_out(group: Group, array: Array, root: int = 0) -> None:
    """Give every rank of ``group`` what ``array`` of rank ``root`` holds, in place. Collective over the group.

    ``array`` is contiguous, and of equal shape and dtype on all ranks.
    """
    if group.size == 1:
        return
    with group.watchdog.collective("handing values out"):
        for part in _chunks(array):
            group.comm.Bcast([part, MPI.BYTE], root=root)


def bring(group: Group, array: Array, source: int, root: int = 0) -> None:
    """Bring ``array`` of rank ``source`` into ``array`` of rank ``root``. Those two ranks call it; nobody else.

    ``array`` is contiguous, and of equal shape and dtype on both ranks.
    """
    if source == root:
        return
    with group.watchdog.collective(f"values of rank {source} for rank {root}"):
        for part in _chunks(array):
            if group.rank == source:
                group.comm.Send([part, MPI.BYTE], dest=root)
            else:
                group.comm.Recv([part, MPI.BYTE], source=source)


def _chunks(array: Array) -> list[npt.NDArray[np.uint8]]:
    flat = array.reshape(-1).view(np.uint8)
    return [flat[start : start + CHUNK_NBYTES] for start in range(0, flat.size, CHUNK_NBYTES)]


SAME_TAG = 30_001


def same_call(group: Group, what: str, detail: Any = None) -> list[Any]:
    """``detail`` of every rank in rank order, once all ranks are in the call ``what``. Collective over the group.

    ``what`` names the call. ``detail`` can be pickled.

    Raises:
        CommError: on every rank, if one of them is in another call that begins with this one.
    """
    if group.size == 1:
        return [detail]
    with group.watchdog.collective(what):
        found = group.comm.allgather((what, detail))
        calls = [call for call, _ in found]
        if len(set(calls)) > 1:
            odd = next(rank for rank, call in enumerate(calls) if call != calls[0])
            error = CommError(
                f"rank {odd} is about to {calls[odd]}, and rank 0 to {calls[0]}: ranks must take the same steps; check "
                "what differs between them (lengths of data, conditions on the rank, callbacks that stop)"
            )
            raise told_all(error, group.comm)
        return [each for _, each in found]


def arrays(group: Group, mine: Array, what: str) -> list[Array]:
    """``mine`` of every rank in rank order, on every rank. Collective over the group.

    ``mine`` is contiguous, of any shape and plain dtype; shapes may differ between ranks. The arrays are new.

    Raises:
        CommError: as ``same_call``.
    """
    with group.watchdog.operation(what):
        forms = same_call(group, what, (mine.shape, mine.dtype.str))
        counts = [
            int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize for shape, kind in forms
        ]
        starts = np.cumsum([0, *counts])
        found = np.empty(int(starts[-1]), dtype=np.uint8)
        own = slice(int(starts[group.rank]), int(starts[group.rank + 1]))
        found[own] = mine.reshape(-1).view(np.uint8)
        if found.nbytes <= CHUNK_NBYTES:
            with group.watchdog.collective(what):
                places = [int(start) for start in starts[:-1]]
                group.comm.Allgatherv(MPI.IN_PLACE, [found, counts, places, MPI.BYTE])
        else:
            for rank in range(group.size):
                hand_out(group, found[int(starts[rank]) : int(starts[rank + 1])], rank)
        return [
            found[int(starts[rank]) : int(starts[rank + 1])].view(np.dtype(kind)).reshape(shape)
            for rank, (shape, kind) in enumerate(forms)
        ]


def is_same_number(group: Group, mine: int) -> bool:
    """Whether all ranks have the same number of 64 bits. Collective over the group.

    By messages of a tag of its own: no collective that another rank may still be in can be taken for it. Before round k
    a rank knows the least and the largest number of 2**k ranks, from its own on downwards. It sends them 2**k ranks on.
    A number may count twice, which changes neither. A pair of ranks has one round, so a second call cannot be taken for
    the first.

    Source: Bruck et al., Efficient algorithms for all-to-all communications, IEEE TPDS 8(11), 1997.
    """
    comm = group.comm
    known, theirs = np.full(2, mine, dtype=np.int64), np.full(2, mine, dtype=np.int64)
    distance = 1
    while distance < comm.size:
        onward, before = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.Sendrecv(known, onward, SAME_TAG, recvbuf=theirs, source=before, recvtag=SAME_TAG)
        known[0], known[1] = min(known[0], theirs[0]), max(known[1], theirs[1])
        distance *= 2
    return bool(known[0] == known[1])


class ChunkedExchange:
    """The ranks of a training. Methods are collective over the topology's world."""

    def __init__(self, topology: Topology) -> None:
        """Not collective."""
        self.topology = topology

    def tensors(self, mine: Tensor, what: str) -> list[Tensor]:
        """``mine`` of every rank in rank order, on the device of ``mine``.

        Args:
            mine: any shape, device and dtype; dtype and number of dimensions are equal on all ranks.
            what: names the call.

        Raises:
            CommError: on every rank; a rank is in another call, or brings another dtype or number of dimensions.
        """
        with self.topology.watchdog.operation(what):
            data = mine.detach().cpu().contiguous()
            form = (str(data.dtype), tuple(data.shape))
            forms = same_call(self.topology.world, what, form)
            kinds = [(dtype, len(shape)) for dtype, shape in forms]
            odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
            if odd is not None:
                self._refuse(
                    f"{what}: rank {odd} brings {kinds[odd][0]} of {kinds[odd][1]} dimension(s), and rank 0 "
                    f"{kinds[0][0]} of {kinds[0][1]}; give tensors of one kind on all ranks"
                )
            raw = (
                data.reshape(-1).view(torch.uint8).numpy()
                if data.numel()
                else np.empty(0, np.uint8)
            )
            found = arrays(self.topology.world, raw, what)
            return [
                torch.from_numpy(part).view(data.dtype).reshape(shape).to(mine.device)
                if part.size
                else mine.new_empty(shape)
                for part, (_, shape) in zip(found, forms, strict=True)
            ]

    def _refuse(self, text: str) -> NoReturn:
        raise told_all(CommError(text), self.topology.world.comm)

    def joined(self, mine: Tensor, what: str) -> Tensor:
        """``mine`` of every rank, one after the other along the first dimension; numbers become a vector.

        Raises:
            CommError: as ``tensors``; or other dimensions than the first differ between ranks.
        """
        found = self.tensors(mine[None] if mine.dim() == 0 else mine, what)
        shapes = [tuple(part.shape) for part in found]
        odd = next((rank for rank, shape in enumerate(shapes) if shape[1:] != shapes[0][1:]), None)
        if odd is not None:
            self._refuse(
                f"{what}: rank {odd} brings shape {shapes[odd]}, and rank 0 {shapes[0]}; only the first dimension may "
                "differ: call pad_across_processes first"
            )
        return torch.cat(found)

    def reduced(self, mine: Tensor, reduction: str, what: str) -> Tensor:
        """Sum, mean or maximum of ``mine`` over ranks, elementwise, in rank order; equal shapes on all ranks."""
        found = torch.stack(self.tensors(mine, what))
        if reduction == "max":
            return found.amax(0)
        total = found.sum(0, dtype=mine.dtype)
        return total / self.topology.size if reduction == "mean" else total

    def padded(self, mine: Tensor, dim: int, value: Any, *, first: bool, what: str) -> Tensor:
        """``mine`` made as long in ``dim`` as the longest of any rank's, with ``value``.

        Args:
            mine: any shape; without that dimension it is returned as it is.
            dim: dimension that is lengthened.
            value: what is put in.
            first: whether it is put before the elements instead of after them.
            what: names the call.
        """
        if not -mine.dim() <= dim < mine.dim():
            return mine
        with self.topology.watchdog.operation(what):
            length = max(self.objects(mine.shape[dim], what))
            more = length - mine.shape[dim]
            if more == 0:
                return mine
            shape = list(mine.shape)
            shape[dim] = length
            longer = mine.new_full(shape, value)
            longer.narrow(dim, more if first else 0, mine.shape[dim]).copy_(mine)
            return longer

    def objects(self, mine: Any, what: str) -> list[Any]:
        """``mine`` of every rank in rank order; it can be pickled."""
        return same_call(self.topology.world, what, mine)

    def of_rank(self, mine: Any, rank: int, what: str) -> Any:
        """``mine`` of that rank; it can be pickled."""
        with self.topology.watchdog.operation(what):
            return self.objects(mine if self.topology.rank == rank else None, what)[rank]

    def of_root(self, mine: Any, what: str) -> Any:
        """``mine`` of rank 0; it can be pickled."""
        return self.of_rank(mine, 0, what)

    def any_of(self, flags: dict[str, bool], what: str) -> dict[str, bool]:
        """Each flag, True if it is on any rank."""
        with self.topology.watchdog.operation(what):
            found = self.objects(flags, what)
            return {name: any(each[name] for each in found) for name in flags}

    def mean(self, mine: Tensor, what: str) -> Tensor:
        """The mean of one number of each rank, rounded once."""
        with self.topology.watchdog.operation(what):
            same_call(self.topology.world, what)
            total = self.topology.world.total(float(mine))
            return torch.full_like(mine, total / self.topology.size)

    def on_root(self, act: Callable[[], object], what: str) -> None:
        """Run ``act`` on rank 0; if it fails there, all ranks raise."""
        with self.topology.agreed(what):
            if self.topology.is_root:
                act()
