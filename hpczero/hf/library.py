"""The library transformers: imported where it is used, and the few of its inner functions that this room calls.

Owns: which of them there are. Must not know: MPI, shards, files. They are called and not copied, since they change with
the models; a version without one of them is refused by name.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from hpczero.errors import ConfigError


def transformers() -> ModuleType:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    return _module("transformers")


def model_kind() -> Any:  # Any: the library ships no types
    """The class of all its models."""
    return transformers().PreTrainedModel


def conversion(name: str) -> Any:
    """A function or class of transformers that knows names and layouts of weights in files.

    Raises:
        ConfigError: this version does not have it.
    """
    homes = ("transformers.core_model_loading", "transformers.conversion_mapping")
    for home in homes:
        try:
            found = getattr(_module(home), name, None)
        except ModuleNotFoundError:
            found = None
        if found is not None:
            return found
    version = getattr(transformers(), "__version__", "unknown")
    raise ConfigError(
        f"transformers {version} has no {name} in {' or '.join(homes)}; hpczero.hf was tested with the version in "
        "install/constraints.txt: pip install 'transformers>=5.20,<6'"
    )


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise ConfigError(
                "transformers is not installed, and hpczero.hf loads and saves its models; "
                "type: pip install 'transformers>=5.20,<6'"
            ) from error
        raise
