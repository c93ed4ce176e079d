"""What an adapter says of itself: held against its contract, and the same on every rank.

Owns: what is refused by name, and the comparison. Must not know: how a model is built, fed or trained. Ranks that
believe different adapters make other collectives, and wait for each other for ever, or go on with other numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any

from hpczero.adapters.base import Adapter
from hpczero.errors import ConfigError
from hpczero.files.regular import shown
from hpczero.job.topology import Topology
from hpczero.models.config import GPTConfig


def check_kind(adapter: Adapter, topology: Topology) -> None:
    """Hold against the contract what decides how a run begins. Collective over the topology's world.

    Raises:
        ConfigError: on every rank.
    """
    name = type(adapter).__name__
    with topology.agreed("ask the adapter what it reads"):
        said = {
            "class": f"{type(adapter).__module__}.{type(adapter).__qualname__}",
            "reads_text": _flag(name, "reads_text", adapter.reads_text),
            "on_meta": _flag(name, "on_meta", adapter.on_meta),
        }
    check_same(said, topology, of=name)


def check_numbers(adapter: Adapter, topology: Topology) -> None:
    """Hold the rest of it against the contract, once the vocabulary is known. Collective over the topology's world.

    Raises:
        ConfigError: on every rank.
    """
    name = type(adapter).__name__
    with topology.agreed("ask the adapter for its numbers"):
        said = {
            "unit": _word(name, "unit", adapter.unit),
            "metric_name": _word(name, "metric_name", adapter.metric_name, may_be_empty=True),
            "context": _count(name, "context", adapter.context),
            "flops_per_token": _flops(name, adapter.flops_per_token),
            "transformer": _sizes(name, adapter.transformer),
        }
    check_same(said, topology, of=name)


def check_card(card: Mapping[str, Any], topology: Topology, *, of: str) -> None:
    """Refuse ranks whose models have different cards. Collective over the topology's world.

    Args:
        card: of ``resume.model_card``.
        topology: the ranks.
        of: who gave it, for messages.

    Raises:
        ConfigError: on every rank.
    """
    check_same({f"card()[{key!r}]": value for key, value in card.items()}, topology, of=of)


def check_same(said: Mapping[str, Any], topology: Topology, *, of: str) -> None:
    """Refuse ranks of which one says something else than rank 0. Collective over the topology's world.

    Args:
        said: by what it is of; as JSON knows it.
        topology: the ranks.
        of: who says it, for messages.

    Raises:
        ConfigError: on every rank; names what differs.
    """
    text = json.dumps(dict(said))
    first, mine = json.loads(topology.broadcast_text(text)), json.loads(text)
    with topology.agreed(f"compare what {of} says with rank 0"):
        for name in {**first, **mine}:
            here, there = (
                shown(each[name]) if name in each else "missing" for each in (mine, first)
            )
            if here != there or mine.get(name) != first.get(name):
                raise ConfigError(
                    f"model.factory: {of}.{name} is {here}, where rank 0 has {there}; it must be the same on every "
                    "rank, so take nothing from the rank, the host or the clock"
                )


def an_adapter(given: object, what: str) -> Adapter:
    """``given``, which ``what`` of an adapter gave. Not collective.

    Raises:
        ConfigError: it is no adapter.
    """
    if isinstance(given, Adapter):
        return given
    raise ConfigError(
        f"model.factory: {what} gave {type(given).__name__}, expected an hpczero.Adapter, of the same model"
    )


def _flag(name: str, member: str, got: Any) -> bool:
    if not isinstance(got, bool):
        raise ConfigError(f"model.factory: {name}.{member} is {shown(got)}, expected True or False")
    return got


def _word(name: str, member: str, got: Any, *, may_be_empty: bool = False) -> str:
    if not isinstance(got, str) or not (got or may_be_empty):
        raise ConfigError(f"model.factory: {name}.{member} is {shown(got)}, expected a word")
    return got


def _count(name: str, member: str, got: Any) -> int:
    if not isinstance(got, numbers.Integral) or isinstance(got, bool) or got < 1:
        raise ConfigError(
            f"model.factory: {name}.{member} is {shown(got)}, expected a whole number of at least 1: the tokens in one "
            "sample, or 1 where samples themselves are counted"
        )
    return int(got)


def _flops(name: str, got: Any) -> float | None:
    if got is None:
        return None
    if isinstance(got, numbers.Real) and not isinstance(got, bool) and 0 < float(got) < math.inf:
        return float(got)
    raise ConfigError(
        f"model.factory: {name}.flops_per_token is {shown(got)}, expected a number above 0, or None: torch counts them"
    )


def _sizes(name: str, got: Any) -> dict[str, Any] | None:
    if got is None:
        return None
    if isinstance(got, GPTConfig):
        return dataclasses.asdict(got)
    raise ConfigError(
        f"model.factory: {name}.transformer is {type(got).__name__}, expected an hpczero.models.GPTConfig, or None"
    )
