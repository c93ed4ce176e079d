"""From ``model.factory`` to an adapter.

Owns: how a function is found by its name and called. Must not know: any model, MPI.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys

from hpczero.adapters.base import Adapter
from hpczero.errors import ConfigError
from hpczero.options.config import ModelOptions


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
