"""The contract of a path, by which activations go from rank to rank.

Owns: what one exchange promises, the pieces of tensors that are too large for one, and the check that all ranks are in
the same call. Must not know: sums, dimensions, autograd.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
