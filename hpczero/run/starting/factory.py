"""From ``model.factory`` to an adapter.

Owns: how a function is found by its name and called. Must not know: any model, MPI.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
import numbers
import os
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from hpczero.adapters.base import Adapter
from hpczero.errors import ConfigError
from hpczero.files.regular import shown
from hpczero.job.topology import Topology
from hpczero.models.config import GPTConfig
from hpczero.options.config import ModelOptions, RunConfig
from hpczero.options.reading import to_toml


def check_same_options(config: RunConfig, topology: Topology) -> None:
    """Refuse ranks that were started with other options: they would train another model. Collective.

    Raises:
        ConfigError: on every rank; the message names the ranks that differ from rank 0.
    """
    mine = float(zlib.crc32(to_toml(config).encode()))
    first = topology.gather(mine)[0]
    with topology.agreed("agree on the options"):
        if mine != first:
            raise ConfigError(
                "got other options than rank 0; give every rank the same command line and file"
            )


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


def made_by_factory(options: ModelOptions) -> Adapter:
    """What ``model.factory`` returns for ``model.arguments``. Not collective; the same on every rank by contract.

    The current folder is searched for modules too, as by ``python -m``. A ValueError
    of the factory is one of its arguments; other errors pass.

    Raises:
        ConfigError: there is no such module or function, it does not take the arguments, or gives no adapter.
    """
    assert options.factory is not None, "asked for a factory"
    name, _, called = options.factory.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        where = (
            f"a module {missing!r} that it imports"
            if missing not in _parents(name)
            else repr(missing)
        )
        raise ConfigError(
            f"model.factory: {options.factory}: no module {where} in the current folder {here} nor among what is "
            "installed; start the command where it lies, install it, or set PYTHONPATH"
        ) from error
    factory = getattr(module, called, None)
    if not callable(factory):
        known = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(
            f"model.factory: {name} has no function {called!r}; it has {', '.join(known) or 'none'}"
        )
    arguments = {} if options.arguments is None else options.arguments.value
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"model.arguments: {options.factory}{inspect.signature(factory)} {error}"
        ) from error
    except ValueError:  # of a function in C nothing is known before it is called
        pass
    try:
        adapter = factory(**arguments)
    except ValueError as error:  # what Python's own functions say of a value that cannot be
        raise ConfigError(f"model.arguments: {options.factory}: {error}") from error
    if not isinstance(adapter, Adapter):
        raise ConfigError(
            f"model.factory: {options.factory} gave {type(adapter).__name__}, expected an hpczero.Adapter, whose "
            "build() makes the module and whose samples() gives its data (docs/models.md)"
        )
    return adapter


def _parents(name: str) -> list[str]:
    """``a.b.c``, ``a.b`` and ``a``."""
    parts = name.split(".")
    return [".".join(parts[: size + 1]) for size in range(len(parts))]
