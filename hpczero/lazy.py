"""Names of a package that are loaded on first use, so that importing the package starts neither MPI nor torch."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpczero.errors import ConfigError


def lazy(
    package: str, file: str, *, rooms: Sequence[str] = (), needs: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Its names are those that the file imports as themselves (``from x import A as A``) under ``if TYPE_CHECKING``. So
    they stand once, where type checkers read them too.

    Args:
        package: its name.
        file: its ``__init__``.
        rooms: packages in it that are attributes as well.
        needs: distributions with which hpczero is not installed, as pip is given them.
    """
    homes = {
        alias.name: statement.module or package
        for statement in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name
    }

    def load(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(homes[name]), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in [need.partition(">")[0].replace("-", "_") for need in needs]:
                raise
            wanted = " ".join(f"'{need}'" for need in needs)
            raise ConfigError(
                f"{package}.{name} needs {missing}, which is not installed; type: pip install {wanted}"
            ) from error

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *rooms})

    return load, names, sorted(homes)


def library(name: str, user: str, package: str) -> Any:  # Any: modules without types
    """The module ``name`` of a package that hpczero is installed without.

    Args:
        name: as of ``import``.
        user: what needs it, for the message.
        package: as pip is given it.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{user} needs {error.name}, which is not installed; type: pip install {package}"
        ) from error
