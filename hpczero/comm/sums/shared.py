"""The path of one node: each rank exports a block, copies what it brings into it, and reads from the others' blocks.

Owns: the blocks and who may write to them when. Must not know: sums, other nodes. On devices this is CUDA IPC. On the
host the blocks are shared memory, the twin.

    copy into own block | wait for the device | told | read the others' blocks

[Note: Two halves]
A block has two halves, which exchanges take by turns. One wait for each exchange is then enough. A rank that fills a
half for exchange n + 2 has seen that all have come to n + 1. Whoever has come to n + 1 has read all it wanted of n.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, Attached, Mark
from hpczero.comm.inside.segment import Counters
from hpczero.comm.sums.path import Call, Path, found_numel
from hpczero.job.group import Group

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
        counters.publish(EXCHANGES, number)
        counters.wait(EXCHANGES, number)
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
