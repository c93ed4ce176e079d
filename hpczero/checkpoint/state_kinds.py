"""Kinds of the optimizer's state: which a checkpoint can keep, and numbers made of them again.

Owns: the names of kinds in the manifest. Must not know: units, files, ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpczero.errors import CheckpointError
from hpczero.zero.update.away_states import AWAY
from hpczero.zero.update.coded import CodedState

Scalar = int | float | bool


def kind_of(key: str, value: Any, numel: int, *, packed: bool = False) -> str | None:
    """``elements``, ``tensor:float32``, ``int`` ...; None for a state that does not exist yet.

    Args:
        key: of the state.
        value: of it.
        numel: elements of the shard that it belongs to.
        packed: whether it may have fewer, those of the others being zero (``zero.update.whole_states``).

    Raises:
        CheckpointError: it is neither fp32 with the elements of its shard nor one number.
    """
    if value is None:
        return None
    if value is AWAY or isinstance(value, CodedState):
        return "elements"
    if isinstance(value, Tensor):
        if not value.dim():
            return f"tensor:{str(value.dtype).removeprefix('torch.')}"
        fits = value.numel() == numel or (packed and value.numel() < numel)
        if fits and value.dtype == torch.float32:
            return "elements"
        got = f"{tuple(value.shape)} {value.dtype}"
    else:
        if type(value) in (bool, int, float):
            return type(value).__name__
        got = type(value).__name__
    raise CheckpointError(
        f"optimizer state {key!r} is {got}, expected fp32 of the {numel} elements of its shard, or one number; such a "
        "state cannot be kept in a checkpoint"
    )


def scalar_of(kind: str, number: Scalar | None) -> Any:
    """The state of one value that ``scalars`` gave."""
    assert number is not None, "scalars are numbers"
    if kind.startswith("tensor:"):
        return torch.tensor(
            number, dtype=getattr(torch, kind.removeprefix("tensor:")), device="cpu"
        )
    return {"bool": bool, "int": int, "float": float}[kind](number)
