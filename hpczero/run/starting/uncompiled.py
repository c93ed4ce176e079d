"""torch's compiler left out of a process that compiles nothing.

Owns: what replaces ``torch._dynamo`` until it is needed. Must not know: models, optimizers, who compiles.

Every optimizer of torch imports the compiler when it is made and when it steps, to say that it is not to be compiled.
Activation checkpointing does so too. The import reads about a thousand files and takes as long and as much memory as
the rest of torch; 400 ranks on a parallel file system feel it. The stand-in answers the three questions of these two as
they are answered where nothing is compiled. Everything else, such as ``torch.compile``, imports the true compiler.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from threading import RLock
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"


def leave_out_compiler() -> None:
    """Do not import torch's compiler from now on, before it is used.

    For our commands; no effect once it is imported.
    """
    if _NAME not in sys.modules:
        found = importlib.util.find_spec(_NAME)
        standin = _Compiler(_NAME)
        standin.__file__ = None if found is None else found.origin
        sys.modules[_NAME] = standin
        torch._dynamo = standin


class _Config:
    """Answers as ``torch._dynamo.config`` does."""

    # Checkpointing keeps it at each forward, and uses it only while it is itself traced.
    error_on_nested_fx_trace = True

    def __init__(self, compiler: _Compiler) -> None:
        object.__setattr__(self, "_compiler", compiler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler.true().config, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._compiler.true().config, name, value)


class _Compiler(ModuleType):
    """Answers as ``torch._dynamo`` does in a process that compiles nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._lock = RLock()
        self.config = _Config(self)

    def graph_break(self, msg: str = "") -> None:
        """Do nothing, as where nothing is compiled."""

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """``fn``, which the compiler leaves out once it is imported."""
        if fn is None:
            return functools.partial(self.disable, recursive=recursive, **options)
        disabled: Callable[..., Any] | None = None

        @functools.wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal disabled
            if sys.modules.get(_NAME) is self:
                return fn(*args, **kwargs)
            if disabled is None:
                disabled = self.true().disable(fn, recursive, **options)
            return disabled(*args, **kwargs)

        return called

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__path__", "__all__"):
            raise AttributeError(name)  # many tools look at each module for such
        return getattr(self.true(), name)

    def true(self) -> Any:
        """The compiler itself, imported now if it was not."""
        with self._lock:
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
                del torch._dynamo
            return importlib.import_module(_NAME)  # which puts itself in both places
