"""HostUpdate: torch's own step, taken by the host where state rests in its memory, for a model on a device.

Owns: what stands in ``param_groups`` for that, and the way of new values up. Must not know: the agreement of ranks,
clipping, streams of a device.

    backward   gradients come down behind it, one reduction after the other (units/away.py)
    step       [values | gradient | state] where they rest; no state moves
    after      values go up in the dtype of the parameters, beside the steps on the next windows

Source: Ren et al., ZeRO-Offload, ATC21, sec. 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hpczero.tier import Fetch, InPlaceTier, Staged
from hpczero.zero.units.away import AwayRest
from hpczero.zero.units.away_shard import MIRROR, VALUES, AwayShard, Store, floats
from hpczero.zero.units.mirrored import mirrored
from hpczero.zero.units.near import SentNear
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.streamed import StreamedUpdate

# Classes of torch's with a fused kernel for the host: one pass over memory, several times faster than the others.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class HostUpdate(StreamedUpdate):
    """Of one optimizer, whose pieces rest in memory that the host works on; nothing here is collective."""

    def __init__(self, units: Sequence[Unit], optimizer: Optimizer, store: Store) -> None:
        """As of ``StreamedUpdate``; ``store`` has an ``InPlaceTier`` and an ascent."""
        super().__init__(units, optimizer, store)
        assert isinstance(store.tier, InPlaceTier), "opened by zeroify"
        self._tier = store.tier

    @override
    def begin(self) -> None:
        for unit in self._units:
            if isinstance(unit.rest, AwayRest) and unit.rest.near is not None:
                unit.rest.near.settle()  # it is sent from memory that changes now
        super().begin()

    @override
    def _start(self, shard: AwayShard, index: int) -> Fetch:
        wanted, fresh = shard.of_step(index)
        self._begun.append(self._tier.open(shard.places[index], wanted, fresh=fresh))
        return self._begun[-1]

    @override
    def _call(self, optimizer: Optimizer) -> None:
        with fused_where_nothing_was_chosen(optimizer):
            super()._call(optimizer)

    @override
    def _number(self, value: Any) -> Any:
        return value.to("cpu", copy=True) if isinstance(value, Tensor) else value

    @override
    def _bring_up(self, rest: AwayRest, elements: range, staged: Staged) -> list[str]:
        if not isinstance(rest.near, SentNear):
            return super()._bring_up(rest, elements, staged)
        rest.near.send(elements, ready(staged, rest.near.tensor.dtype))
        return []


def ready(staged: Staged, dtype: torch.dtype) -> Tensor:
    """(elements,) values of a window in ``dtype``, where they rest, so that they can be sent from there."""
    return mirrored(staged, dtype) if MIRROR in staged else floats(staged, VALUES)


@contextmanager
def fused_where_nothing_was_chosen(optimizer: Optimizer) -> Iterator[None]:
    """Context: groups that leave the implementation to torch have the fused one, where the host has one.

    Torch itself chooses another one on each kind of device; on a host it would choose the slowest.
    """
    chosen = _groups_without_choice(optimizer)
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def leaves_choice(optimizer: Optimizer) -> bool:
    """Whether a group leaves the implementation to torch, and the host has a fused one."""
    return bool(_groups_without_choice(optimizer))


def _groups_without_choice(optimizer: Optimizer) -> list[dict[str, Any]]:
    if not isinstance(optimizer, FUSED):
        return []
    groups = optimizer.param_groups
    return [g for g in groups if g.get("fused", False) is None and g.get("foreach") is None]
