"""The path of ranks that share no memory: messages of bytes, through the host's memory.

Owns: the buffers of MPI calls. Must not know: sums, nodes. MPI moves bytes alone: what it adds in half precision is
wrong without an error, and what it adds in fp32 depends on its algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.comm.sums.path import Call, Path, as_bytes, found_numel
from hpczero.job.group import Group

ROOM_NBYTES = 32 * 2**20


class Messages(Path):
    """Ranks that send each other what they bring."""

    def __init__(self, group: Group, *, room_nbytes: int = ROOM_NBYTES) -> None:
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
