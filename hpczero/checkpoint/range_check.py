"""Whether values of weights on disk can be held in the precision of a model.

Owns: the comparison and its message. Must not know: where values rest, shards, MPI.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hpczero.checkpoint.disk.format import Table
from hpczero.errors import CheckpointMismatch


def check_range(
    part: Tensor,
    dtype: torch.dtype,
    table: Table,
    start: int,
    path: Path,
    *,
    stop: int | None = None,
) -> None:
    """Refuse a part of one parameter with finite values beyond ``dtype``.

    Args:
        part: the values.
        dtype: that must hold them.
        table: of the parameter.
        start: the first of them in ``table``.
        path: of the weights, for the message.
        stop: after the last; None: they are neighbours.

    Raises:
        CheckpointMismatch: names the parameter.
    """
    if bool((part.isfinite() & part.to(dtype).isinf()).any()):
        (name,) = table.overlapping(start, start + len(part) if stop is None else stop)
        raise CheckpointMismatch(
            f"{path}: {name} holds {part.abs().max().item():.6g}, which {dtype} cannot; take bf16 or fp32"
        )
