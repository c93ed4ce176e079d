"""Which path activations take: memory of the node that its ranks share, or messages.

Owns: the choice. Must not know: what is summed.
"""

from __future__ import annotations

import torch

from hpczero.accelerator import accelerator_of
from hpczero.comm.sums.messages import Messages
from hpczero.comm.sums.path import Path
from hpczero.comm.sums.shared import Shared
from hpczero.comm.sums.sums import Sums
from hpczero.job.group import Group


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
