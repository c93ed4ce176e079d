"""Names of a package that are loaded on first use, so that importing the package starts neither MPI nor torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpczero.errors import ConfigError


def lazy(
    package: str, homes: Mapping[str, str], *, needs: Sequence[str] = ()
) -> Callable[[str], Any]:
    """What ``__getattr__`` of a package is.

    Args:
        package: its name.
        homes: by name, the module below the package that has it.
        needs: distributions with which hpczero is not installed, as pip is given them.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            home = importlib.import_module(f"{package}.{homes[name]}")
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in [need.partition(">")[0].replace("-", "_") for need in needs]:
                raise
            wanted = " ".join(f"'{need}'" for need in needs)
            raise ConfigError(
                f"{package}.{name} needs {missing}, which is not installed; type: pip install {wanted}"
            ) from error
        return getattr(home, name)

    return load
