"""Trade: each rank gives each other one tensors of any length, and gets some from each.

Owns: the messages, and their entry in a transport's accounts. Must not know: what is in them, units.

Counts go first, so that a rank which brings another length than its peer expects is seen by the peer and not by MPI.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.comm.collectives import Collectives

CHUNK = 2**28  # elements of one message: MPI counts bytes in 32 bits


def trade(
    collectives: Collectives, outgoing: Sequence[Sequence[Tensor]], *, name: str
) -> list[list[Tensor]]:
    """Send the tensors ``outgoing[index]`` to each rank of ``collectives.group``. Blocking. Collective over that group.

    Args:
        collectives: whose group, in the order of ``group.ordered``, and whose accounts.
        outgoing: (ranks,) of each any number of flat fp32 tensors of any length in memory of the host. Bits are moved,
            not numbers.
        name: for messages.

    Returns:
        (ranks,) what each of them has sent to this one.
    """
    group = collectives.group
    packed = [_packed(tensors) for tensors in outgoing]
    sent = sum(each.nbytes for place, each in enumerate(packed) if place != group.index)
    with collectives.calls.issue("trade", name, sent, key=0):  # each rank sends as much as it has
        return [_unpacked(each) for each in _traded(group.ordered, packed)]


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor: how many, the length of each, each; nothing for none."""
    if not tensors:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    lengths = torch.tensor([len(tensors), *map(len, tensors)], dtype=torch.int64, device="cpu")
    return torch.cat([lengths.view(torch.float32), *tensors])


def _unpacked(flat: Tensor) -> list[Tensor]:
    if not len(flat):
        return []
    count = int(flat[:2].view(torch.int64))
    lengths = flat[2 : 2 + 2 * count].clone().view(torch.int64).tolist()
    return list(flat[2 + 2 * count :].split_with_sizes(lengths))


def _traded(comm: MPI.Intracomm, outgoing: Sequence[Tensor]) -> list[Tensor]:
    counts = np.array([len(each) for each in outgoing], dtype=np.int64)
    theirs = np.empty_like(counts)
    comm.Alltoall(counts, theirs)
    incoming = [
        outgoing[rank]
        if rank == comm.rank
        else torch.empty(count, dtype=torch.float32, device="cpu")
        for rank, count in enumerate(theirs.tolist())
    ]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    requests = [
        comm.Irecv([part.numpy(), MPI.FLOAT], source=rank)
        for rank in others
        for part in _chunks(incoming[rank])
    ]
    requests += [
        comm.Isend([part.numpy(), MPI.FLOAT], dest=rank)
        for rank in others
        for part in _chunks(outgoing[rank])
    ]
    MPI.Request.Waitall(requests)
    return incoming


def _chunks(flat: Tensor) -> list[Tensor]:
    return [flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK)]
