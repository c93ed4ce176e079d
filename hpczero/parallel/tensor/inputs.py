"""Inputs of a model whose layers are cut: they must be the same on all ranks that share the layers.

Owns: which of them are compared. Must not know: layers, what a model does with them, how ranks compare.

Nothing else would tell. Every rank adds its part of each product, and a sum over parts of different samples has the
right shape. What a rank was given travels as a checksum with its first exchange, which costs no message. Tensors on a
device are not looked at: they would have to be waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from hpczero.comm.sums import Sums
from hpczero.parallel.tensor.functions import compare
from hpczero.plan.placement import part_of
from hpczero.zero.calls.ways import untraced


@untraced
def compare_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, sums: Sums
) -> None:
    """A forward pre-hook of the model; the next exchange raises CommError on all ranks where inputs differ.

    A pipeline stage gets activations, which under sequence parallelism are those of own tokens. Of its inputs only what
    is not floating point is compared: tokens, targets, masks.
    """
    part = part_of(module)
    is_whole = part is None or (part.first and part.last)
    for x in _pytree.tree_leaves((args, kwargs)):
        if _is_plain(x) and (is_whole or not x.is_floating_point()):
            compare("inputs of the model", x, sums)


def _is_plain(x: object) -> bool:
    plain = type(x) in (Tensor, nn.Parameter)
    return plain and x.layout is torch.strided and x.device.type == "cpu"  # type: ignore[attr-defined]
