"""Sums, gathers and parts of activations over ranks that share each layer's products.

Owns: the verbs, the order of sums, and their accounts. Must not know: layers, autograd, how bytes travel (``path``).

Sums are in fp32 and in rank order, ((x0 + x1) + x2) + x3, and are rounded once. Every rank therefore has the same bits,
on every path. fp64 is summed in fp64. All verbs are collective over the group: every rank makes the same calls in the
same order, from one thread at a time. They return new tensors and leave their arguments as they are. In a group of one
they return the argument itself.

Source: issue 19; Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from hpczero.accelerator import accelerator_of
from hpczero.comm.calls import CommStats
from hpczero.comm.sums.path import Call, Messages, Path, Shared, as_bytes, kind_of
from hpczero.errors import CommError
from hpczero.job.group import Group

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
        """Not collective.

        Args:
            group: must outlive the sums.
            make: makes a path for tensors on a device; collective. It is called with the first tensor of each.
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
        if self.group.watchdog.cut_off.happened():
            return
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
                return self._sum_of_all(path, tensor, Call(kind, tensor.numel()), say)
            flat = tensor.reshape(-1)
            out = torch.empty_like(flat)
            room = path.room_nbytes // tensor.element_size()
            for piece, into in zip(torch.split(flat, room), torch.split(out, room), strict=True):
                call = Call(kind, piece.numel())
                if self.size == 2:
                    self._sum_of_all(path, piece, call, say, into)
                    continue
                mine = self._sum_of_parts(path, piece.tensor_split(self.size), call, say)
                gathered = path.gather(mine, Call(kind, mine.numel()), say)
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
            summed = self._sum_of_parts(path, parts, Call(kind), say)
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
            found = path.gather(tensor, Call(kind, tensor.numel(), length), say)
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
            rows = path.swap(parts, Call(kind), say)
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
            rows = path.gather(tensor, Call(kind, tensor.numel()), say).rows
            most = torch.maximum(rows[0], rows[1])
            for row in rows[2:]:
                torch.maximum(most, row, out=most)
            return most.view(tensor.shape)

    def compare(self, what: str, tensor: Tensor) -> None:
        """Have the next call find out whether all ranks have the same ``tensor`` here. Costs no exchange.

        Not collective. Several may be compared before the next call. Tensors on a device are not compared: it would
        have to be waited for.

        Args:
            what: names it in the message.
            tensor: any dtype and strides; it is read once.
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
    ) -> Iterator[tuple[Path, int, Callable[[], str]]]:
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
        self,
        path: Path,
        tensor: Tensor,
        call: Call,
        say: Callable[[], str],
        into: Tensor | None = None,
    ) -> Tensor:
        """Everybody reads everything and sums it."""
        self._count("all_reduce", tensor, to=self.size - 1)
        rows = path.gather(tensor, call, say).rows
        return in_rank_order(rows, into).view(tensor.shape)

    def _sum_of_parts(
        self, path: Path, parts: Sequence[Tensor], call: Call, say: Callable[[], str]
    ) -> Tensor:
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

    Args:
        rows: two or more of one shape and dtype. They are read only.
        into: where to put the sum, of the same shape and dtype; None makes a tensor.
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
        return Shared(group, accelerator_of(device))
    return Messages(group)
