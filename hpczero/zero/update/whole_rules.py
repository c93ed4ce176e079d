"""Whole rules: optimizers whose update of a parameter needs all of it, and which of their groups do.

Owns: who may ask for whole parameters. Must not know: shards, ranks, how parameters become whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hpczero.errors import PlanError
from hpczero.plan.placement import ModelPart

# Torch's own update rules in which a parameter depends on its own value, gradient and state, on nothing else.
WHOLE: tuple[type[Optimizer], ...] = (
    torch.optim.Adafactor,
    *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),  # from torch 2.9
)
ATTRIBUTE = "hpczero_whole_parameters"


def needs_whole(optimizer: Optimizer, group: Mapping[str, Any] | None = None) -> bool:
    """Whether the optimizer is one that steps on whole parameters; with ``group``, whether that group of its does.

    Torch's own do, and classes that say so with ``hpczero_whole_parameters``: True, or a static method that says of a
    group whether it does. The other groups are then stepped on in pieces, element by element.
    """
    kind = type(optimizer)
    said = getattr(kind, ATTRIBUTE, None)
    if said is None:
        return isinstance(optimizer, WHOLE) and kind.step.__module__.startswith("torch.optim.")
    if callable(said) and group is not None:
        return bool(said(group))
    return bool(said)


def check_uncut(optimizers: Iterable[Optimizer], model: nn.Module, part: ModelPart | None) -> None:
    """Refuse parameters that no rank can have whole, because ranks beside the shards hold parts of them.

    Raises:
        PlanError: names the first.
    """
    if part is None:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"] if needs_whole(optimizer, group) else ():
                name = names.get(id(parameter), "")
                placement = part.placements.get(name)
                if placement is not None and placement.dim is not None and placement.parts > 1:
                    raise PlanError(
                        f"optimizer {type(optimizer).__name__} needs whole parameters, and {name!r} of shape "
                        f"{placement.shape} is cut over {placement.parts} tensor parallel ranks; use an elementwise "
                        "optimizer for it, or tensor degree 1"
                    )
