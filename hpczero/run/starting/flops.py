"""How many FLOPs a model takes for one token or sample, for the rates in metrics.

Owns: the count. Must not know: time, shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from hpczero.adapters.base import Adapter

BACKWARD = 2  # times the forward: gradients of inputs and of weights


def flops_per_unit(adapter: Adapter, batch: Callable[[], Sequence[Any]]) -> float:
    """FLOPs of forward and backward for one unit of the adapter, without recomputation. Not collective.

    Where the adapter does not say, torch counts the products and convolutions of one forward on the meta device.

    Args:
        adapter: of the model.
        batch: gives some samples, of which shapes and dtypes count.

    Returns:
        NaN where a forward cannot be taken without values.

    Source: of the factor: Kaplan et al., arXiv 2001.08361, sec. 2.1.
    """
    said = adapter.flops_per_token
    if said is not None:
        return said
    from torch.utils.flop_counter import FlopCounterMode

    try:
        with torch.device("meta"):
            model = adapter.build().to("meta")  # buffers, too, which may have been made elsewhere
        given = _pytree.tree_map(lambda x: torch.as_tensor(x).to("meta"), tuple(batch()))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            adapter.loss(model, *given)
    except Exception:  # whatever a model does with values that are not there
        return math.nan
    taken: int = counter.get_total_flops()
    return (1 + BACKWARD) * taken / (len(given[0]) * adapter.context)
