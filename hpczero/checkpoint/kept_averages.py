"""Averages of weights in a checkpoint: what stands for them among the states of the optimizer.

Owns: their keys. Must not know: files, ranks, how averages are made.

    average.ema           fp32 of each trained element, as any state of the optimizer
    average.ema.count     with each parameter: how many updates
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpczero.checkpoint.state_kinds import Scalar
from hpczero.zero.averages import Average
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit

PREFIX = "average."
COUNT = ".count"


def averages_of(sharding: Sharding, unit: Unit, position: int) -> dict[str, Any]:
    """What is kept with this rank's part of the parameter in a slot of ``unit``, by keys."""
    found: dict[str, Any] = {}
    for name, average in sharding.averages.items():
        if average.count:
            found[PREFIX + name] = average.part(unit, position)
            found[PREFIX + name + COUNT] = average.count
    return found


def average_at(sharding: Sharding, key: str) -> Average | None:
    """Whose elements the key has; None for a state of the optimizer."""
    return sharding.averages.get(key.removeprefix(PREFIX)) if key.startswith(PREFIX) else None


def names_in(keys: Iterable[str]) -> list[str]:
    """Names of the averages of which there are elements."""
    averages = (key.removeprefix(PREFIX) for key in keys if key.startswith(PREFIX))
    return [name for name in averages if not name.endswith(COUNT)]


def set_counts(sharding: Sharding, present: Mapping[str, Mapping[str, Scalar | None]]) -> None:
    """Each average has as many updates as a checkpoint says, none where it has no such average.

    Args:
        sharding: of the model.
        present: for each key and parameter its number.
    """
    for name, average in sharding.averages.items():
        counts = present.get(PREFIX + name + COUNT, {}).values()
        average.count = max((int(count) for count in counts if count is not None), default=0)
