"""Values of one rank for all of a group, before training.

Owns: the broadcast of a tensor in pieces. Must not know: models, sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpczero.comm.sums.path import as_bytes
from hpczero.job.group import Group

PIECE_NBYTES = 64 * 2**20


def give_values(group: Group, tensor: Tensor) -> None:
    """Give every rank the values of the group's rank 0, in place. Collective over ``group``.

    Args:
        group: the ranks.
        tensor: any dtype, device and strides; the same dtype and shape on every rank.
    """
    if group.size == 1 or not tensor.numel():
        return
    with torch.no_grad(), group.watchdog.collective("give_values"):
        host = tensor.detach().contiguous().cpu()
        for piece in torch.split(as_bytes(host), PIECE_NBYTES):
            group.comm.Bcast(piece.numpy(), root=0)
        if group.rank and host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)
